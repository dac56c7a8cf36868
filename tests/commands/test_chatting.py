"""`chat` in a real terminal (a pty), over the real CLI: it streams, remembers, cancels and leaves."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import httpx

from cli_session_proxy.commands.chatting import COMMANDS, Interrupts, RemoteTalk, _turn, printable
from cli_session_proxy.domain.approvals import Verdict
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export.feed import SHOWN
from cli_session_proxy.http.binding import bind
from cli_session_proxy.http.served import announced
from cli_session_proxy.http.server import create_app
from cli_session_proxy.settings import Profile, Settings
from turnfault.provider.script import Fail, HeldReply, Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, MakeSettings
from ..files import files
from ..scripted import Asker, Scripted, delta
from ..serving import server_of
from ..talking import ask, heard, running
from ..until import until

SOON = 60.0


class Terminal:
    """What is on the screen, and a keyboard."""

    def __init__(self, master: int, process: asyncio.subprocess.Process) -> None:
        self._master = master
        self.process = process
        self.screen = ""
        self._seen = 0
        self._changed = asyncio.Event()
        os.set_blocking(master, False)
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the other side is gone
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self.screen += data.decode(errors="replace")
        self._changed.set()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    async def see(self, text: str) -> str:
        """Wait for this text behind what was waited for before; returns all up to it."""
        async with asyncio.timeout(SOON):
            while (at := self.screen.find(text, self._seen)) < 0:
                self._changed.clear()
                await self._changed.wait()
        before, self._seen = self.screen[self._seen : at], at + len(text)
        return before


@asynccontextmanager
async def in_terminal(env: Mapping[str, str], *argv: object) -> AsyncIterator[Terminal]:
    """A program in a terminal of its own, with this environment alone."""
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *map(str, argv), stdin=slave, stdout=slave, stderr=slave, env=dict(env), start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    terminal = Terminal(master, process)
    try:
        yield terminal
    finally:
        asyncio.get_running_loop().remove_reader(master)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)


@asynccontextmanager
async def chatting(
    settings: Settings, *more: str, env: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Terminal]:
    """The command, with the settings that a user would give by flags and environment."""
    given = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "PYTHONPATH": str(ROOT),
        "CLI_SESSION_PROXY_CLAUDE_ENV": json.dumps(settings.claude_env),
        "CLI_SESSION_PROXY_STOP_GRACE": "2",
        **env,
    }
    async with in_terminal(
        given, sys.executable, "-m", "cli_session_proxy", "chat", "--var", settings.var, "--claude-bin",
        settings.claude_bin or "", "--claude-config-dir", settings.claude_config_dir or "", *more,
    ) as terminal:  # fmt: skip
        try:
            yield terminal
        finally:
            if terminal.process.returncode is None:
                terminal.process.terminate()
                await terminal.process.wait()


async def left(terminal: Terminal) -> int:
    return await asyncio.wait_for(terminal.process.wait(), SOON)


async def test_it_streams_remembers_and_goes_on_the_next_time(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply(after=1, reply=Reply("first second"))
    upstream.when("slowly", gate)
    async with chatting(settings) as terminal:
        await terminal.see("› ")
        terminal.type("remember: the colour is teal\n")
        await terminal.see("Noted: colour is teal.")
        await terminal.see("[started, session")
        await terminal.see("› ")
        terminal.type("now slowly\n")
        await asyncio.wait_for(gate.reached.wait(), SOON)
        await terminal.see("first")
        gate.open()
        await terminal.see("second")
        await terminal.see("[warm, session")
        await terminal.see("› ")
        terminal.type("\x04")
        assert await left(terminal) == 0
    (transcript,) = files(settings.claude_config_dir, "*.jsonl")
    await asyncio.to_thread(transcript.unlink)
    async with chatting(settings) as terminal:
        terminal.type("what is the colour?\n")
        await terminal.see("colour is teal.")
        await terminal.see("[The session's transcript was gone (no transcript at")
        terminal.type("\x04")
        assert await left(terminal) == 0


async def test_it_draws_markdown_and_tells_which_tools_ran(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("list", Reply("Two **things**:\n\n- `one`\n- two\n\n```sh\necho three\n```"))
    upstream.when("look", ToolUse([("Bash", {"command": "echo there", "description": "looks"})]))
    profile = Profile(tools=("Bash",), permission_mode="bypassPermissions")
    settings = make_settings(claude_bin=claude_2, claude_env=make_settings().claude_env | {"IS_SANDBOX": "1"})
    env = {
        "CLI_SESSION_PROXY_PROFILE": "shell",
        "CLI_SESSION_PROXY_PROFILES": json.dumps({"shell": profile.model_dump(include={"tools", "permission_mode"})}),
    }
    async with chatting(settings, env=env) as terminal:
        await terminal.see("› ")
        terminal.type("list\n")
        await terminal.see("[started, session")
        drawn = terminal.screen.rpartition("Two ")[2]
        assert "things" in drawn
        assert "**" not in drawn
        assert "```" not in terminal.screen.rpartition("\x1b[2K")[2], "what grew is wiped away"
        assert " • " in drawn
        await terminal.see("› ")
        terminal.type("look\n")
        await terminal.see("[used Bash]")
        terminal.type("\x04")
        assert await left(terminal) == 0


async def test_ctrl_c_cancels_the_turn_and_the_chat_goes_on(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply(after=1, reply=Reply("some words that nobody waits for"))
    upstream.when("wait", gate)
    upstream.when("break", Fail(400, message="no such thing"), times=None)
    async with chatting(make_settings(claude_bin=claude_2), "--agent-id", "böse/name") as terminal:
        await terminal.see("agent böse/name over an engine of its own")
        await terminal.see("› ")
        terminal.type("\x03")
        await terminal.see("› ")
        terminal.type("wait\n")
        await asyncio.wait_for(gate.reached.wait(), SOON)
        await terminal.see("some")
        terminal.type("\x03")
        await terminal.see("(cancelled: the conversation is as before)")
        # it was meant: nothing warns of it
        assert (await terminal.see("› ")).strip() == ""
        terminal.type("break\n")
        await terminal.see("error: ")
        await terminal.see("› ")
        terminal.type("are you there?\n")
        await terminal.see("You said: are you there? (1)")
        await terminal.see("› ")
        terminal.type("/show\n")
        await terminal.see("[started, session")
        await terminal.see("› ")
        terminal.type("/rewind\n")
        await terminal.see("1 off the path")
        await terminal.see("› ")
        terminal.type("/rewind 7\n")
        await terminal.see("error: ")
        await terminal.see("› ")
        terminal.type("\x04")
        assert await left(terminal) == 0
    assert heard(upstream) == ["are you there?"]


async def test_its_commands_are_told_and_work_without_a_server(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with chatting(make_settings(claude_bin=claude_2), "--model", "haiku") as terminal:
        await terminal.see("› ")
        terminal.type("/show\n")
        await terminal.see("nothing was said yet")
        await terminal.see("› ")
        terminal.type("/help\n")
        told = await terminal.see("Any other line is sent to the agent.")
        assert {line.split(" ")[0] for line in told.split("\r\n")} >= COMMANDS
        await terminal.see("› ")
        terminal.type("/model\n")
        await terminal.see("model haiku")
        terminal.type("/model opus\n")
        await terminal.see("model opus")
        await terminal.see("› ")
        # a command is one only where the line begins with its whole name; a blank line says nothing
        terminal.type("\n")
        await terminal.see("› ")
        terminal.type("/helpless \\\n")
        await terminal.see("… ")
        terminal.type("and \\\n")
        await terminal.see("… ")
        terminal.type("last\n")
        await terminal.see("You said: /helpless")
        await terminal.see("[started, session")
        await terminal.see("› ")
        terminal.type("/show\n")
        await terminal.see("turn 1 turn_")
        await terminal.see("[started, session")
        await terminal.see("› ")
        terminal.type("never ends \\\n")
        await terminal.see("… ")
        terminal.type("\x04")
        await terminal.see("You said: never ends")
        assert await left(terminal) == 0
    assert heard(upstream) == ["/helpless \nand \nlast", "never ends \n"]
    assert upstream.requests[-1].body["model"].startswith("claude-opus")


async def test_it_talks_to_the_server_that_runs_on_the_same_var(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, default_model="sonnet")
    async with running(settings) as engine:
        listener = bind(settings)
        app = create_app(engine, settings)
        with listener, announced(settings.var, listener) as app.state.served_secret:
            await ask(engine, "remember: the number is seven", agent="shared")
            async with (
                server_of(app, settings, listener),
                chatting(settings, "--agent-id", "shared") as terminal,
            ):
                await terminal.see("over http://127.0.0.1:")
                terminal.type("what is the number?\n")
                await terminal.see("number is seven.")
                await terminal.see("[warm, session")
                await terminal.see("› ")
                terminal.type("/help\n")
                await terminal.see("/rewind [N]")
                await terminal.see("› ")
                terminal.type("/rewind 1\n")
                await terminal.see("1 off the path")
                terminal.type("/model opus\n")
                await terminal.see("model opus")
                await terminal.see("› ")
                terminal.type("one \\\n")
                await terminal.see("… ")
                terminal.type("two\n")
                await terminal.see("You said: one")
                await terminal.see("[branched, session")
                terminal.type("\x04")
                assert await left(terminal) == 0
            assert heard(upstream) == ["remember: the number is seven", "one \ntwo"]
            assert upstream.requests[-1].body["model"].startswith("claude-opus")


async def test_a_person_is_asked_whether_a_tool_may_run(make_settings: MakeSettings) -> None:
    asker = Asker()
    backend = Scripted(
        [
            asker.asks("r1", command="ls\n\x1b[2J -l"), None,
            asker.asks("r2", "Write", file_path="/f", content="x"), None,
            asker.asks("r3", command="ls " + "x" * SHOWN), None, delta("All done."),
        ]
    )  # fmt: skip
    settings = make_settings()
    engine = Engine(settings, backend=backend)
    await engine.start()
    listener = bind(settings)
    app = create_app(engine, settings)
    with listener, announced(settings.var, listener) as app.state.served_secret:
        async with server_of(app, settings, listener), chatting(settings, "--agent-id", "a") as terminal:
            await terminal.see("› ")
            terminal.type("do it\n")
            await terminal.see("[waits for a person's approval: may Bash run?]")
            shown = await terminal.see("may it? y once, t for this turn, n WORDS no › ")
            assert "Bash waits for your approval:" in shown
            assert "ls\r\n    \N{REPLACEMENT CHARACTER}[2J -l" in shown
            terminal.type("\n")  # that is no answer
            await terminal.see("may it?")
            terminal.type("yes please\n")  # nor is that
            await terminal.see("may it?")
            await terminal.see("› ")
            assert asker.told == []
            terminal.type("y\n")
            await until(lambda: len(asker.told) == 1)
            backend.go.release()
            await terminal.see("+x")
            await terminal.see("no › ")
            terminal.type("n put it elsewhere\n")
            await until(lambda: len(asker.told) == 2)
            backend.go.release()
            await terminal.see("Bash waits for your approval:")
            await terminal.see("more characters: to allow it, read all of it on the page")
            await terminal.see("may it? n WORDS no › ")
            terminal.type("y\n")  # nobody allows what was not shown
            await terminal.see("may it? n WORDS no › ")
            assert len(asker.told) == 2
            (question,) = engine.asked("local")
            await engine.approve("local", "a", question.waiting.approval.id, Verdict("allowed", "local"))
            await terminal.see("[answered elsewhere, or over]")
            backend.go.release()
            await terminal.see("All done.")
            await terminal.see("› ")
            terminal.type("\x04")
            assert await left(terminal) == 0
    await engine.stop()
    assert [(verdict.outcome, verdict.word) for _, verdict in asker.told] == [
        ("allowed", None), ("denied", "put it elsewhere"), ("allowed", None),
    ]  # fmt: skip


async def test_a_server_that_goes_away_after_its_answer_is_a_line_not_a_fault() -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            raise httpx.ConnectError("gone")
        return httpx.Response(200, text='data: {"choices":[{"delta":{"content":"Hi"}}]}\n\ndata: [DONE]\n\n')

    written: list[str] = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://x") as http:
        with Interrupts() as interrupts:
            await _turn(RemoteTalk(http, "a", "sonnet"), "hello", written.append, interrupts, None)
    assert "".join(written) == "Hi\n\nerror: the server ended after its answer\n"


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\n") == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}\tc\n"
