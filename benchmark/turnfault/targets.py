"""Who answers: a server behind a URL, which is known by nothing else, or the CLI itself.

A server is started with the strict upstream as its ANTHROPIC_BASE_URL and an environment of its own: no account and
none of the user's files can be reached from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import httpx
import psutil

from .errors import TargetError
from .provider.upstream import Upstream
from .talk import RequestRefused, Talk

WireName = Literal["chat", "responses", "messages", "generate"]
# `id`: the target keeps the conversation, under a name; `history`: the client sends all of it each time. The others are
# what can be broken: the CLI's files, the target's processes.
Surface = Literal["id", "history", "files", "process"]

FAKE_KEY = "sk-ant-fake-continuity"
# Seconds: for a turn, for a target to take connections, and to end by itself.
TURN = 90.0
START = 60.0
STOP = 15.0
POLL = 0.05
MAX_TOKENS = 1024


def environment(home: Path, upstream: Upstream, config: Path) -> dict[str, str]:
    """Built up, never inherited, but for PATH and what a language needs to find its modules."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH", "NODE_PATH") if name in os.environ}
    home.mkdir(parents=True, exist_ok=True)
    return passed | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "CLAUDE_CONFIG_DIR": str(config),
        "ANTHROPIC_API_KEY": FAKE_KEY,
        "ANTHROPIC_BASE_URL": upstream.url,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


@dataclass
class ServerTarget:
    """A server behind `url`, in which `{agent}` stands for the conversation's name; or `agent_header` carries it.

    `history_url`: where a client asks that sends its whole history, where that is another address.

    `start` is its command; without one it runs already, and cannot be restarted. `config` is where its CLI keeps
    transcripts, where that is known.
    """

    url: str
    wire: WireName
    upstream: Upstream
    folder: Path
    history_url: str | None = None
    agent_header: str | None = None
    key: str | None = None
    model: str = "sonnet"
    start: str | None = None
    stop: str | None = None
    config: Path | None = None
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    @property
    def surfaces(self) -> frozenset[Surface]:
        found: set[Surface] = set()
        if self.history_url is not None or "{agent}" not in self.url:
            found.add("history")
        if "{agent}" in self.url or self.agent_header or self.wire == "responses":
            found.add("id")
        if self.start is not None:
            found.add("process")
        if self.config is not None:
            found.add("files")
        return frozenset(found)

    def talk(self, agent: str, *, by_id: bool) -> ServerTalk:
        return ServerTalk(self, agent, by_id=by_id)

    async def up(self) -> None:
        """Start it, and wait until it takes connections. Raises `TargetError`."""
        at = urlsplit(self.url)
        if self.start is not None:
            env = environment(self.folder / "home", self.upstream, self.config or self.folder / "config")
            with (self.folder / "log").open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *shlex.split(self.start), env=env, cwd=self.folder, stdin=asyncio.subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True,
                )  # fmt: skip
        deadline = time.monotonic() + START
        while True:
            try:
                _, writer = await asyncio.open_connection(at.hostname, at.port or 80)
            except OSError as exc:
                ended = self.process is not None and self.process.returncode is not None
                if ended or time.monotonic() > deadline:
                    said = (self.folder / "log").read_text(errors="replace")[-500:] if self.start else ""
                    raise TargetError(f"nothing takes connections at {self.url}: start it first. {said}") from exc
                await asyncio.sleep(POLL)
            else:
                writer.close()
                return

    async def down(self, *, kill: bool = False) -> None:
        """End it and all that it started; what it leaves behind is ended too."""
        if self.process is None:
            return
        below = self.below()
        if self.stop is not None and not kill:
            env = environment(self.folder / "home", self.upstream, self.config or self.folder / "config")
            await (await asyncio.create_subprocess_exec(*shlex.split(self.stop), env=env, cwd=self.folder)).wait()
        elif self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        _kill(below)
        self.process = None

    def below(self) -> list[psutil.Process]:
        """The processes that the target started."""
        if self.process is None or self.process.returncode is not None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def kill_clis(self) -> bool:
        """End every CLI below it. False where there is none."""
        found = []
        for one in self.below():
            with contextlib.suppress(psutil.Error):
                if any("claude" in Path(word).name or "claude-code" in word for word in one.cmdline()[:2]):
                    found.append(one)
        return _kill(found)


def transcript_of(config: Path | None, talk: Talk) -> Path | None:
    """The newest transcript that holds the conversation."""
    if config is None:
        return None
    files = sorted(config.glob("projects/*/*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    key = talk.facts[-1].key
    return next((path for path in files if key in path.read_text(encoding="utf-8", errors="replace")), None)


def _kill(processes: list[psutil.Process]) -> bool:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(processes, timeout=STOP)
    return bool(processes)


class ServerTalk(Talk):
    """A conversation with a server. `by_id`: only what is new is sent; else all of it, and no name."""

    def __init__(self, server: ServerTarget, agent: str, *, by_id: bool) -> None:
        super().__init__(server.upstream, server.model)
        self.server = server
        self.agent = agent
        self.by_id = by_id
        self.history: list[tuple[str, str]] = []  # what the client keeps: (words, answer)
        self.previous: str | None = None
        self.leave_after: asyncio.Event | None = None  # the client goes away when this is set

    async def _say(self, said: str) -> str:
        count = len(self.upstream.requests)
        path, body = self._body(said)
        base = self.server.url if self.by_id else self.server.history_url or self.server.url
        base = base.replace("{agent}", quote(self.agent, safe=""))
        headers = {"Authorization": f"Bearer {self.server.key or FAKE_KEY}"}
        if self.server.agent_header and self.by_id:
            headers[self.server.agent_header] = quote(self.agent, safe="")
        asking = asyncio.ensure_future(_post(base.rstrip("/") + path, body, headers))
        if self.leave_after is not None:
            leaving = asyncio.ensure_future(self.leave_after.wait())
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
                raise RequestRefused("the client left")
        data = await asking
        answer = _answer(self.server.wire, data)
        if self.server.wire == "responses":
            self.previous = data.get("id")
        self.history.append((said, answer))
        mine = [seen for seen in self.upstream.requests[count:] if said in "".join(seen.user_texts())]
        self.before = mine[-1] if mine else self.before
        return answer

    def _body(self, said: str) -> tuple[str, dict[str, Any]]:
        """(path, body) of a request on the target's wire."""
        turns: list[tuple[str, str]] = []
        for words, answer in () if self.by_id else self.history:
            turns += [("user", words), ("assistant", answer)]
        turns.append(("user", said))
        messages = [{"role": role, "content": text} for role, text in turns]
        match self.server.wire:
            case "chat":
                return "/chat/completions", {"model": self.model, "messages": messages}
            case "messages":
                return "/messages", {"model": self.model, "max_tokens": MAX_TOKENS, "messages": messages}
            case "responses":
                more = {"previous_response_id": self.previous} if self.by_id and self.previous else {}
                return "/responses", {"model": self.model, "input": messages, **more}
            case "generate":
                names = {"user": "user", "assistant": "model"}
                contents = [{"role": names[role], "parts": [{"text": text}]} for role, text in turns]
                return f"/models/{self.model}:generateContent", {"contents": contents}


async def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    raw = json.dumps(body).encode()
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=TURN) as http:
            got = await http.post(url, content=raw, headers={**headers, "Content-Type": "application/json"})
    except httpx.TimeoutException as exc:
        raise RequestRefused("no answer in time") from exc
    except httpx.HTTPError as exc:
        raise RequestRefused("connection lost") from exc
    if got.status_code != 200:
        raise RequestRefused(f"HTTP {got.status_code}")
    try:
        data = got.json()
    except ValueError as exc:
        raise RequestRefused("no JSON") from exc
    return data if isinstance(data, dict) else {}


def _answer(wire: WireName, data: Mapping[str, Any]) -> str:
    """The words of an answer. Raises `RequestRefused` where it has none, such as an error that is sent as 200."""
    try:
        match wire:
            case "chat":
                text = data["choices"][0]["message"]["content"]
            case "messages":
                text = "".join(block.get("text", "") for block in data["content"])
            case "responses":
                text = "".join(part.get("text", "") for item in data["output"] for part in item.get("content") or ())
            case "generate":
                text = "".join(part.get("text", "") for part in data["candidates"][0]["content"]["parts"])
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise RequestRefused("an answer without words") from exc
    if not text:
        raise RequestRefused("an empty answer")
    return str(text)


@dataclass
class Cli:
    """The bare CLI as many a script drives it: one `claude -p` a turn, `--resume` of the last id that came back."""

    claude: Path
    upstream: Upstream
    folder: Path
    model: str = "sonnet"
    children: dict[int, asyncio.subprocess.Process] = field(default_factory=dict, repr=False)

    @property
    def config(self) -> Path:
        return self.folder / "config"

    @property
    def surfaces(self) -> frozenset[Surface]:
        return frozenset({"id", "files", "process"})

    def talk(self, agent: str, *, by_id: bool) -> CliTalk:  # noqa: ARG002 - it has no other way
        return CliTalk(self, agent)

    async def up(self) -> None:
        """Nothing of it lives between turns."""

    async def down(self, *, kill: bool = False) -> None:  # noqa: ARG002 - it has no softer way
        self.kill_clis()

    def kill_clis(self) -> bool:
        running = [one for one in self.children.values() if one.returncode is None]
        for one in running:
            one.kill()
        return bool(running)


class CliTalk(Talk):
    def __init__(self, cli: Cli, agent: str) -> None:
        super().__init__(cli.upstream, cli.model)
        self.cli = cli
        self.session_id: str | None = None
        self.leave_after: asyncio.Event | None = None
        self._cwd = cli.folder / "cwd" / quote(agent, safe="")
        self._cwd.mkdir(parents=True, exist_ok=True)

    async def _say(self, said: str) -> str:
        count = len(self.upstream.requests)
        env = environment(self.cli.folder / "home", self.upstream, self.cli.config)
        result = await print_mode(
            self.cli.claude, said, self.session_id, model=self.model, system="You are a helpful assistant.",
            cwd=self._cwd, env=env, children=self.cli.children, leave_after=self.leave_after,
        )  # fmt: skip
        self.session_id = result["session_id"]
        mine = [seen for seen in self.upstream.requests[count:] if said in "".join(seen.user_texts())]
        self.before = mine[-1] if mine else self.before
        return str(result["result"])


async def print_mode(
    claude: Path,
    said: str,
    session_id: str | None,
    *,
    model: str,
    system: str,
    cwd: Path,
    env: Mapping[str, str],
    children: dict[int, asyncio.subprocess.Process],
    leave_after: asyncio.Event | None = None,
) -> dict[str, Any]:
    """One `claude -p`, as a script runs it; its result as JSON. `children` holds the process while it lives. Who drives
    it goes away, and kills it, when `leave_after` is set. Raises `RequestRefused`."""
    argv = [str(claude), "-p", "--output-format", "json", "--model", model, "--system-prompt", system]
    argv += [f"--resume={session_id}"] if session_id else []
    pipe = asyncio.subprocess.PIPE
    try:
        with tempfile.TemporaryFile() as prompt:  # not a pipe: uvloop raises where the CLI has ended before it read it
            prompt.write(said.encode("utf-8", "surrogatepass"))
            prompt.seek(0)
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=prompt, stdout=pipe, stderr=pipe, cwd=cwd, env=env, limit=64 * 1024 * 1024
            )
    except OSError as exc:
        raise RequestRefused("cannot start") from exc
    children[child.pid] = child
    asking = asyncio.ensure_future(child.communicate())
    waited: list[asyncio.Future[Any]] = [asking]
    if leave_after is not None:
        waited.append(asyncio.ensure_future(leave_after.wait()))
    try:
        await asyncio.wait(waited, timeout=TURN, return_when=asyncio.FIRST_COMPLETED)
        in_time = asking.done()
    finally:
        for leaving in waited[1:]:
            leaving.cancel()
        if child.returncode is None:
            child.kill()
        out, _ = await asking
        del children[child.pid]
    if not in_time:
        raise RequestRefused(
            "the client left" if leave_after is not None and leave_after.is_set() else "no answer in time"
        )
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError as exc:
        raise RequestRefused(f"exit {child.returncode}") from exc
    if result.get("is_error") or child.returncode:
        raise RequestRefused("error")
    return result


Target = ServerTarget | Cli
AnyTalk = ServerTalk | CliTalk
