"""The commands as programs: their output, their one-line errors, their exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cli_session_proxy import cli
from cli_session_proxy.commands import changing
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.http.binding import bind
from cli_session_proxy.http.served import served_at
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy_store_conformance.samples import a_finished_turn

from .conftest import ROOT
from .fakes import TURN
from .zones import machine_in

SOON = 60


def fill(var: Path, *agents: str) -> None:
    """A store with a turn for each of these agents."""

    async def run() -> None:
        store = store_for(Settings(var=var))
        await store.open()
        try:
            for number, agent_id in enumerate(agents):
                agent = await store.ensure_agent("local", agent_id, f"dir-{number}", named=True, now=time.time())
                turn = a_finished_turn(
                    id=f"turn_{number}", agent_key=agent.key, parent_id=None, model="sonnet", input=TURN.input,
                    output=TURN.output, records=(), created_at=time.time(), path_hash=f"h{number}", depth=1,
                )  # fmt: skip
                await store.import_turns([turn], head=turn.turn.id)
        finally:
            await store.close()

    var.mkdir(exist_ok=True)
    asyncio.run(run())


def run(*args: str | Path) -> None:
    cli.main([str(arg) for arg in args])


def error_of(capsys: pytest.CaptureFixture[str], code: int, *args: str | Path) -> str:
    """The one line on stderr of a command that exits with `code`."""
    with pytest.raises(SystemExit) as caught:
        run(*args)
    assert caught.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def done(*args: str | Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*args)
    assert caught.value.code == 0


def test_each_wrong_setting_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cli_session_proxy.toml").write_text("prot = 1\nlease = -1\n")
    with pytest.raises(SystemExit) as caught:
        run("chains")
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: setting lease: ")
    assert (
        second == "error: setting prot: there is no such setting: did you mean `port`? (cli_session_proxy.toml line 1)"
    )


@pytest.mark.parametrize(
    "words",
    ["chains", "chains --json", "chains --by day", "find ada", "show ada", "dump ada", "verify", "delete ada -y"],
)
def test_a_wrong_var_is_told_as_such_and_nothing_is_made_there(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = error_of(capsys, 2, *words.split(), "--var", tmp_path / "vra")
    assert said.startswith(f"error: no store at {tmp_path / 'vra'}: ")
    monkeypatch.setenv("CLI_SESSION_PROXY_VAR", str(tmp_path / "vra"))
    assert "no store at" in error_of(capsys, 2, *words.split())
    assert not (tmp_path / "vra").exists()


@pytest.mark.parametrize(("setting", "zone"), [("local", "JST"), ("utc", "UTC")])
@pytest.mark.sample(1)
def test_one_setting_says_in_which_zone_every_command_shows_times(
    setting: str, zone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "ada")
    monkeypatch.setenv("CLI_SESSION_PROXY_TIMEZONE", setting)
    with machine_in("Asia/Tokyo"):
        for words in (
            ("chains",), ("chains", "--by", "day"), ("show", "ada"), ("find", "ada"), ("status",), ("doctor",),
            ("dump", "ada", "--format", "markdown"), ("dump", "ada", "--format", "html"),
        ):  # fmt: skip
            with pytest.raises(SystemExit):
                run(*words, "--var", tmp_path)
            said = capsys.readouterr().out
            assert {"JST", "UTC"} & set(re.findall(r"[A-Z]{3}", said)) == {zone}, words


def test_chains_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "first", "evil\x1b[31m[bold]x[/bold]")
    done("chains", "--var", tmp_path)
    table = capsys.readouterr().out
    assert "first" in table
    assert "\x1b[31m" not in table
    assert "[bold]x" in table
    done("chains", "--var", tmp_path, "--json")
    rows = json.loads(capsys.readouterr().out)
    assert {row["agent_id"]: row["turns"] for row in rows} == {"first": 1, "evil\x1b[31m[bold]x[/bold]": 1}


def test_looking_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done("chains")
    assert "no chains" in capsys.readouterr().out
    assert "nobody" in error_of(capsys, 1, "dump", "nobody")
    assert not list((tmp_path / "here").iterdir())


def test_dump_prints_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "a/b")
    done("dump", "a/b", "--var", tmp_path)
    # `dir-0` is the directory that the store was told
    assert json.loads(capsys.readouterr().out)["turns"][0]["output"] == list(TURN.output)
    done("dump", "a/b", "--var", tmp_path, "--format", "markdown")
    assert "Hello there." in capsys.readouterr().out
    assert "no agent" in error_of(capsys, 1, "dump", "a/b", "--var", tmp_path, "--owner", "other")


def test_the_folder_can_come_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "from env")
    monkeypatch.setenv("CLI_SESSION_PROXY_VAR", str(tmp_path))
    done("chains", "--json")
    assert json.loads(capsys.readouterr().out)[0]["agent_id"] == "from env"


def test_delete_of_an_unknown_agent_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "ada")
    assert "no agent" in error_of(capsys, 1, "delete", "nobody", "--yes", "--var", tmp_path)


def test_delete_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    async def delete(_settings: Settings, agent_id: str, owner: str) -> None:
        called.append(f"{owner}/{agent_id}")

    monkeypatch.setattr(changing, "delete", delete)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        run("delete", "a", "--var", tmp_path)
    assert caught.value.code == 1
    assert called == []
    done("delete", "a", "--yes", "--var", tmp_path)
    assert called == ["local/a"]


def test_broken_settings_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cli_session_proxy.toml").write_text("port = = 1")
    assert "TOML" in error_of(capsys, 2, "serve")
    Path("cli_session_proxy.toml").write_text("wort = 1")
    assert "wort" in error_of(capsys, 2, "serve")
    Path("cli_session_proxy.toml").unlink()
    assert "log_level" in error_of(capsys, 2, "serve", "--log-level", "loud")


def test_serve_takes_no_program_from_a_file_that_merely_lies_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cli_session_proxy.toml").write_text(f'claude_bin = "{tmp_path}/claude"')
    for command in (("serve",), ("doctor",), ("chat",), ("chains",)):
        line = error_of(capsys, 2, *command)
        assert "claude_bin" in line
        assert "--config" in line
    done("chains", "--config", "cli_session_proxy.toml")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("dump", "ada", "--format", "markdwn"), "did you mean `markdown`?"),
        (("dump", "ada", "--follow", "--format", "html"), "--follow takes --format json or markdown"),
        (("chains", "--since", "yesterday"), "use 30m, 12h, 7d, or a date"),
        (("chains", "--status", "complete"), "did you mean `completed`?"),
        (("chat", "--profile", "codr"), "unknown profile 'codr'"),
    ],
)
def test_a_wrong_use_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], says: str
) -> None:
    assert says in error_of(capsys, 2, *args, "--var", tmp_path)


@pytest.mark.parametrize("args", [("serv",), ("serve", "--prot", "1"), ("dump",), ("serve", "--port", "many")])
def test_what_the_parser_refuses_is_exit_code_2_too(capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*args)
    assert caught.value.code == 2
    assert "--help" in capsys.readouterr().err


def test_a_port_that_the_proxy_of_this_var_has_is_told_with_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        (tmp_path / "serve.json").write_text(json.dumps({"url": url, "uds": None, "pid": os.getppid()}))
        said = error_of(capsys, 2, "serve", "--port", port, "--var", tmp_path)
        assert (
            f"by this proxy itself: this --var is served already, at {url} (page: {url}/ui, pid {os.getppid()})" in said
        )
        (tmp_path / "serve.json").write_text(json.dumps({"url": url, "uds": None, "pid": 0}))
        assert "by another program" in error_of(capsys, 2, "serve", "--port", port, "--var", tmp_path)


def test_a_login_without_a_terminal_says_what_to_do_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "CLAUDE_CODE_OAUTH_TOKEN" in error_of(capsys, 2, "login", "--claude-bin", "/nowhere/claude")


def test_no_summary_of_a_command_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    done("--help")
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_a_taken_port_and_an_open_host_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "taken" in error_of(capsys, 2, "serve", "--port", port, "--var", tmp_path)
    assert "keys" in error_of(capsys, 2, "serve", "--host", "0.0.0.0", "--port", "0", "--var", tmp_path)
    assert "resolved" in error_of(capsys, 2, "serve", "--host", "no.such.invalid", "--port", "0", "--var", tmp_path)


def test_a_port_that_another_program_has_at_all_addresses_is_taken_on_bsd_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There SO_REUSEADDR gives 127.0.0.1 of a port of 0.0.0.0 away; here SO_REUSEPORT does."""
    settings = Settings(var=tmp_path)
    monkeypatch.setattr(socket, "create_server", partial(socket.create_server, reuse_port=True))
    with socket.create_server(("0.0.0.0", 0)) as taken:
        settings = settings.model_copy(update={"port": taken.getsockname()[1]})
        with bind(settings):
            pass  # the system has nothing against it
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(ConfigError, match="is taken by another program"):
            bind(settings)


def test_a_var_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "--var" in error_of(capsys, 2, "serve", "--port", "0", "--var", tmp_path / "file")


@pytest.mark.parametrize("command", ["chains --json", "dump agent-1 --format json"])
def test_a_reader_that_has_enough_is_no_error(tmp_path: Path, command: str) -> None:
    fill(tmp_path, *(f"agent-{number}" for number in range(300)))
    command = f"{sys.executable} -m cli_session_proxy {command} --var {tmp_path} | head -c 10"
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=SOON, check=True)
    assert answer.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_where_and_stops_when_asked(tmp_path: Path, number: signal.Signals) -> None:
    args = [sys.executable, "-m", "cli_session_proxy", "serve", "--port", "0", "--var", str(tmp_path / "var")]
    args += ["--claude-bin", str(tmp_path / "no-claude")]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            first = server.stdout.readline()
            assert "listening on http://127.0.0.1:" in first
            told = [server.stdout.readline() for _ in range(3)]
            assert "--claude-bin" in told[-1]
            assert (tmp_path / "var" / "serve.json").exists()
            server.send_signal(number)
            assert server.wait(SOON) == 0
            assert server.stderr.read() == ""
            assert not (tmp_path / "var" / "serve.json").exists()
        finally:
            server.kill()


def test_a_second_server_on_one_var_says_so_and_leaves_the_first_one_to_be_found(tmp_path: Path) -> None:
    @contextmanager
    def served(port: int) -> Iterator[tuple[str, str]]:
        """Its address, and what it says behind its banner."""
        args = [sys.executable, "-m", "cli_session_proxy", "serve", "--port", str(port), "--var", str(tmp_path / "var")]
        with subprocess.Popen([*args, "--claude-bin", "none"], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                first, _, _, more = [server.stdout.readline() for _ in range(4)]
                yield first.split()[2], more
                server.send_signal(signal.SIGTERM)
                assert server.wait(SOON) == 0
            finally:
                server.kill()

    with served(0) as (url, more):
        assert "no Claude CLI" in more
        with served(0) as (other, shared):
            assert shared.startswith(f"this --var is served already, at {url} (page: {url}/ui, pid ")
            assert str(served_at(tmp_path / "var")) == other
        assert str(served_at(tmp_path / "var")) == url
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port} .* is taken by this proxy itself: .* at {url}"):
            bind(Settings(var=tmp_path / "var", port=port))
    assert served_at(tmp_path / "var") is None


def test_serve_loads_no_client_library() -> None:
    """It is to start fast: litellm alone takes 4 s."""
    loaded = "[m for m in ('litellm', 'openai', 'aiohttp', 'httpx') if m in sys.modules]"
    code = f"import sys, cli_session_proxy.http.server; print({loaded})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON, check=True)
    assert answer.stdout.strip() == "[]"


HEAVY = ("litellm", "openai", "httpx", "uvicorn", "starlette", "pydantic_settings", "aiohttp", "watchfiles")
LISTS = (*HEAVY, "cli_session_proxy.engine.engine", "cli_session_proxy.http.server", "psycopg")
READS = (
    *LISTS, "structlog", "pygments", "psutil", "rich.progress", "cli_session_proxy.backends.base",
    "cli_session_proxy.engine.live",
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "without"),
    [
        (["--version"], (*LISTS, "pydantic", "sqlalchemy", "rich", "structlog")),
        (["--help"], (*LISTS, "pydantic", "sqlalchemy", "rich", "structlog")),
        (["chains", "--help"], (*LISTS, "cli_session_proxy.settings", "sqlalchemy", "rich", "structlog")),
        (["status"], LISTS),
        (["chains"], READS),
        (["show", "ada"], (*READS, "rich")),
        (["find", "there"], (*READS, "rich")),
        (["dump", "ada"], (*READS, "rich", "markdown_it")),
        (["verify", "ada"], (*LISTS, "rich", "cli_session_proxy.backends.claude.process.pool")),
    ],
    ids=" ".join,
)
@pytest.mark.sample(4)
def test_a_command_imports_only_what_it_needs(tmp_path: Path, command: list[str], without: tuple[str, ...]) -> None:
    """Nearly all of its time are imports: none of these is a part of what it does. What it has imported is not looked
    through for garbage once more when it ends."""
    fill(tmp_path, "ada")
    words = command if command[-1].startswith("--") else [*command, "--var", str(tmp_path)]
    code = (
        "import atexit, gc, sys\natexit.register(lambda: print(gc.get_freeze_count() > 0, file=sys.stderr))\n"
        f"from cli_session_proxy.cli import main\ntry: main({words})\nexcept SystemExit: pass\n"
        f"print([m for m in {without} if m in sys.modules], file=sys.stderr)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLI_SESSION_PROXY_")}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON, check=True,
        env=env | {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, cwd=tmp_path,
    )  # fmt: skip
    assert answer.stderr == "[]\nTrue\n", answer.stderr


@pytest.mark.parametrize(
    "command", sorted(info.name or info.callback.__name__ for info in cli.app.registered_commands if info.callback)
)
def test_every_help_has_examples_and_loses_no_brackets(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    done(command.rstrip("_"), "--help")
    said = capsys.readouterr().out
    assert "Examples:" in said
    assert f"  cli-session-proxy {command.rstrip('_')}" in said
    if command == "serve":
        assert "scheme://host[:port]" in said


def test_a_part_of_a_chain_can_be_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "a", "b")
    done("dump", "b", "--turn", "turn_1", "--var", tmp_path)
    assert [turn["id"] for turn in json.loads(capsys.readouterr().out)["turns"]] == ["turn_1"]
    done("dump", "b", "--last", "5", "--format", "markdown", "--var", tmp_path)
    assert "## Turn 1" in capsys.readouterr().out
    assert "has no turn 'turn_0'" in error_of(capsys, 1, "dump", "b", "--turn", "turn_0", "--var", tmp_path)
    assert "take --format json or markdown" in error_of(
        capsys, 2, "dump", "b", "--last", "1", "--format", "html", "--var", tmp_path
    )


def test_chains_fit_a_terminal_and_tell_the_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, *(f"agent-{n}-{'x' * 100}" for n in range(3)))
    done("chains", "--limit", "2", "--var", tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("2 of 3 agents, 3 turns, $0, ")
    assert len(said) == 4
    assert "owner" not in said[0]
    width = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    code = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    shown = [sys.executable, "-m", "cli_session_proxy", "chains", "--var", str(tmp_path)]
    out = subprocess.run([sys.executable, "-c", code, *shown], capture_output=True, text=True, check=True, env=width)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert any(line.rstrip().endswith(("just now", " ago")) for line in lines)


def test_a_dump_is_read_in_a_terminal_and_json_in_a_pipe(tmp_path: Path) -> None:
    fill(tmp_path, "ada")
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "PAGER": "cat", "PYTHONPATH": str(ROOT)}
    code = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    shown = [sys.executable, "-m", "cli_session_proxy", "dump", "ada", "--var", str(tmp_path)]
    out = subprocess.run([sys.executable, "-c", code, *shown], capture_output=True, text=True, check=True, env=env)
    assert "Turn 1" in out.stdout
    assert "Hello there." in out.stdout
    assert '"schema"' not in out.stdout
    piped = subprocess.run(shown, capture_output=True, text=True, check=True, env=env)
    assert json.loads(piped.stdout)["agent_id"] == "ada"


@pytest.mark.parametrize("command", ["adopt", "show", "dump", "verify"])
@pytest.mark.parametrize("place", ["{}", "/tmp/{}.jsonl", "{}.jsonl"])
@pytest.mark.sample(4)
def test_an_argument_that_would_steer_the_terminal_comes_back_harmless(
    command: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = place.format("x\x1b]0;title\x07\x9b31m\u202ey")
    fill(tmp_path / "var", "ada")
    said = error_of(capsys, 1, command, named, "--var", tmp_path / "var")
    assert said.isprintable(), repr(said)
