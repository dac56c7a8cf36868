"""Who can reach the proxy at all: a unix socket for one user, a key made at the first start, and what `serve` says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from pydantic import SecretStr
from starlette.applications import Starlette

from cli_session_proxy import logs
from cli_session_proxy.commands import asking, changing, status
from cli_session_proxy.commands.asking import alive, client_of, key_of
from cli_session_proxy.commands.prerequisites import TERMS, shared_login
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.http import server as http_server
from cli_session_proxy.http.binding import bind, bound
from cli_session_proxy.http.keys import PREFIX, Keys, make_key
from cli_session_proxy.http.served import Served, served_at, server_pid
from cli_session_proxy.http.server import notices
from cli_session_proxy.http.watchdog import Watchdog
from cli_session_proxy.settings import GitMemory, Profile, Settings

from ..conftest import FAKE_KEY
from ..fakes import FakeEngine
from ..no_cli import NoCli
from ..serving import started
from ..test_cli import fill

SOON = 60
BOTH = {"alice": "alices-secret-0123456789", "bob": "bobs-secret-0123456789"}


@contextmanager
def served(var: Path, *options: str | Path, lines: int = 1, code: int = 0) -> Iterator[list[str]]:
    """`serve` as a program, until the body ends, and the first lines that it says."""
    args = [
        sys.executable,
        "-m",
        "cli_session_proxy",
        "serve",
        "--var",
        str(var),
        "--claude-bin",
        str(var / "no-claude"),
    ]
    with subprocess.Popen([*args, *map(str, options)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield [server.stdout.readline() for _ in range(lines)]
            server.send_signal(signal.SIGTERM)
            assert server.wait(SOON) == code
        finally:
            server.kill()


# --- a port


async def test_a_program_on_the_port_of_a_killed_proxy_is_sent_no_key(tmp_path: Path) -> None:
    var = tmp_path / "var"
    await asyncio.to_thread(fill, var, "ada")
    make_key(var)
    with served(var, "--port", "0", code=-signal.SIGKILL) as said:
        where = served_at(var)
        assert where is not None
        assert where.url in said[0]
        assert await alive(where)
        os.kill(server_pid(var) or 0, signal.SIGKILL)
    heard: list[bytes] = []

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\nx-serve-proof: 0\r\n\r\n{"status":"ok"}')

    async with await asyncio.start_server(taken, "127.0.0.1", int(where.url.rpartition(":")[2])):
        assert served_at(var) == where
        _, there = await status.look(Settings(var=var, claude_bin=var / "no-claude"))
        assert there is None
        # `chat` has asked it before it was killed.
        async with client_of(where, 5.0, key_of(Settings(var=var), "local")) as asked:
            with pytest.raises(httpx.ConnectError, match="no longer the server of this --var"):
                await asked.post("/v1/chat/completions", json={"messages": []})
    assert heard
    assert not any(b"authorization" in said.lower() for said in heard)


@pytest.mark.parametrize("what", ["drops", "a flood"])
async def test_a_program_on_the_port_of_a_killed_proxy_holds_no_command_up(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "HEALTH_TIMEOUT", 0.5)

    async def taken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x" if what == "drops" else b"x" * 100_000)
                await writer.drain()
                await asyncio.sleep(0.05 if what == "drops" else 0)
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async with await asyncio.start_server(taken, "127.0.0.1", 0) as server:
        where = Served(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", secret="ours")
        async with asyncio.timeout(SOON):
            assert not await alive(where)


@pytest.mark.parametrize(
    ("host", "others"), [("0.0.0.0", ("::1", "::")), ("::", ("127.0.0.1", "0.0.0.0")), ("::1", ("127.0.0.1",))]
)
def test_nobody_else_listens_at_an_address_of_the_other_family(
    tmp_path: Path, host: str, others: tuple[str, ...]
) -> None:
    """A program that is told a name of the machine may go there first, with its key; so may another proxy, with a
    prompt: who listened there had the proof from us."""
    keys = {"alice": SecretStr("alices-secret-0123456789")}
    with bound(Settings(var=tmp_path, host=host, port=0, keys=keys)) as listener:
        port = listener.getsockname()[1]
        for other in others:
            family = socket.AF_INET6 if ":" in other else socket.AF_INET
            with pytest.raises(OSError, match="in use"), socket.create_server((other, port), family=family):
                pass


def test_nobody_else_listens_at_the_other_address_of_localhost(tmp_path: Path) -> None:
    """A program that is told `localhost` goes to ::1 first, and sends its key there."""
    with bound(Settings(var=tmp_path, port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"), socket.create_server(("::1", port), family=socket.AF_INET6):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("::1", port), SOON)
        with socket.create_connection(("localhost", port), SOON) as client:
            assert client.getpeername()[0] == "127.0.0.1"


# --- a unix socket


async def test_a_unix_socket_is_this_users_alone_and_our_commands_find_it(short_tmp: Path) -> None:
    var, path = short_tmp / "var", short_tmp / "proxy.sock"
    await asyncio.to_thread(fill, var, "ada")
    with served(var, "--uds", path) as said:
        assert f"listening on unix:{path}" in said[0]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert served_at(var) == Served("http://localhost", str(path))
        where = served_at(var)
        assert where is not None
        assert await alive(where)
        async with client_of(where, SOON) as http:
            assert [row["agent_id"] for row in (await http.get("/v1/chains")).json()["data"]] == ["ada"]
            assert (await http.get("/v1/chains", headers={"Host": "evil.example"})).status_code == 400
        await changing.delete(Settings(var=var), "ada")  # through the server: it holds the store
        async with client_of(where, SOON) as http:
            assert (await http.get("/v1/chains")).json()["data"] == []
    assert not path.exists()
    assert served_at(var) is None


def listening_on(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()
    return one


def test_a_socket_that_nobody_answers_on_is_replaced_and_nothing_else_is(short_tmp: Path) -> None:
    path = short_tmp / "proxy.sock"
    settings = Settings(var=short_tmp / "var", uds=path)
    listening_on(path).close()
    before = os.umask(0)
    try:
        with bound(settings):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(ConfigError, match=r"--uds .* is taken"), bound(settings):
                pass
            assert path.exists()
    finally:
        assert os.umask(before) == 0
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket: not touched"), bound(settings):
        pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize("path", ["/nowhere/x.sock", "/tmp/" + "x" * 200, "/proc/x.sock"])
def test_a_socket_that_cannot_be_made_is_one_line(path: str) -> None:
    with pytest.raises(ConfigError, match="--uds"), bound(Settings(uds=Path(path))):
        pass


def test_a_socket_of_another_server_is_left_alone_at_the_end(short_tmp: Path) -> None:
    path = short_tmp / "proxy.sock"
    with bound(Settings(var=short_tmp / "var", uds=path)):
        path.unlink()
        other = listening_on(path)
    assert path.exists()
    other.close()


# --- a key made at the first start


def test_the_first_start_makes_a_key_that_nobody_else_can_read(tmp_path: Path) -> None:
    var = tmp_path / "var"
    with served(var, "--port", "0", "--make-key", lines=5) as said:
        path = var / "key"
        assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(var.stat().st_mode)) == (0o600, 0o700)
        secret = path.read_text().strip()
        assert secret.startswith(PREFIX)
        assert len(secret) > 40
        assert str(path) in said[-1]
        assert secret not in "".join(said)
        where = served_at(var)
        assert where is not None
        with httpx.Client(base_url=where.url, trust_env=False) as http:
            assert http.get("/healthz").status_code == 200
            assert http.get("/v1/chains").status_code == 401
            assert http.get("/v1/chains", headers={"Authorization": f"Bearer {secret}"}).status_code == 200
    assert make_key(var).read_text().strip() == secret
    with served(var, "--port", "0"):  # once made it is asked for, whatever the flags are
        where = served_at(var)
        assert where is not None
        assert httpx.get(f"{where.url}/v1/chains", trust_env=False).status_code == 401


@asynccontextmanager
async def locked(var: Path) -> AsyncIterator[str]:
    settings = Settings(var=var, port=0, claude_config_dir=var.with_name("config"))
    make_key(var)
    async with started(NoCli(settings), settings) as url:
        yield url


async def test_our_own_commands_use_it_by_themselves(tmp_path: Path) -> None:
    var = tmp_path / "var"
    await asyncio.to_thread(fill, var, "ada")
    with served(var, "--port", "0", "--make-key"):
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "cli_session_proxy", "delete", "ada", "--yes", "--var", str(var)],
            check=False, capture_output=True, text=True, timeout=SOON,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "deleted ada\n")


async def test_its_owner_is_local_so_that_what_was_there_before_stays_in_sight(tmp_path: Path) -> None:
    var = tmp_path / "var"
    await asyncio.to_thread(fill, var, "ada")
    async with locked(var) as url:
        settings = Settings(var=var)
        async with httpx.AsyncClient(trust_env=False, headers=key_of(settings, "local")) as http:
            listed = (await http.get(f"{url}/chains")).json()["data"]
            assert [(row["agent_id"], row["owner"]) for row in listed] == [("ada", "local")]
    assert Keys(settings).owners == {"local"}


@pytest.mark.parametrize("wrong", ["readable", "link", "folder", "short"])
def test_a_key_that_others_may_know_is_refused(tmp_path: Path, wrong: str) -> None:
    var = tmp_path / "var"
    path = make_key(var)
    if wrong == "readable":
        path.chmod(0o640)
    elif wrong == "short":
        path.write_text("x\n")
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere") if wrong == "link" else path.mkdir()
    with pytest.raises(ConfigError, match="key") as caught:
        Keys(Settings(var=var))
    assert str(path) in caught.value.message


def test_a_made_key_lets_serve_listen_on_other_addresses(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match="--make-key"), bound(settings):
        pass
    make_key(settings.var)
    with bound(settings):
        pass


async def test_serve_asks_for_the_keys_that_it_found_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's start may take minutes: a key that is removed meanwhile must not leave the proxy open to all."""
    settings = Settings(var=tmp_path / "var", host="0.0.0.0", port=0)
    key = make_key(settings.var)
    apps: list[Starlette] = []

    class Starting(FakeEngine):
        async def start(self) -> None:
            key.unlink()

        async def stop(self) -> None:
            pass

    async def run(app: Starlette, *rest: object) -> None:
        apps.append(app)

    monkeypatch.setattr(http_server, "Engine", lambda *given: Starting())
    monkeypatch.setattr(http_server, "_run", run)
    monkeypatch.setattr(logs, "configure", lambda *given, **more: None)
    await http_server.serve(settings, print, Watchdog())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(apps[0]), base_url="http://127.0.0.1") as client:
        assert (await client.get("/v1/models")).status_code == 401


# --- what serve says


def told(settings: Settings) -> str:
    return "\n".join((*notices(settings, Keys(settings)), *shared_login(settings, Keys(settings))))


def test_loopback_without_a_key_is_said_to_be_open_to_everybody_here(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var")
    assert "every user and every program of this machine can use this proxy and read its chains" in told(settings)
    assert told(Settings(var=tmp_path / "var", uds=tmp_path / "s", forget_unnamed="never")) == ""
    make_key(settings.var)
    assert "every user" not in told(settings)


@pytest.mark.parametrize(("hours", "after"), [(720, "30 days"), (12, "12 hours")])
def test_what_is_forgotten_by_itself_is_said(tmp_path: Path, hours: float, after: str) -> None:
    assert f"are forgotten after {after}" in told(Settings(var=tmp_path / "var", forget_unnamed=hours))


def test_a_git_memory_that_agents_of_a_profile_can_write_is_said(tmp_path: Path) -> None:
    repo = tmp_path / "work" / "repo"
    repo.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "work")
    remembers = Profile(git_memory=GitMemory(repo=repo))

    def said(*folders: Path) -> bool:
        profiles = {"fixer": remembers, "coder": Profile(tools=("Bash",), confined=True, add_dirs=folders)}
        return "profile coder: its agents write" in told(Settings(var=tmp_path / "var", profiles=profiles))

    assert said(repo)
    assert said(tmp_path / "other", tmp_path / "link")
    assert not said(tmp_path / "other", repo / "inner")


def test_a_folder_that_a_server_without_a_boundary_names_and_confined_agents_write_is_said(tmp_path: Path) -> None:
    (tmp_path / "server" / "lib").mkdir(parents=True)
    config = tmp_path / "mcp.json"
    config.write_text(
        json.dumps({"mcpServers": {"one": {"command": "uv", "args": [f"--directory={tmp_path}/server"]}}})
    )

    def said(folder: Path) -> bool:
        coder = Profile(tools=("Bash",), confined=True, add_dirs=(folder,))
        profiles = {"free": Profile(mcp_config=config), "coder": coder}
        return f"{tmp_path}/server, which mcp_config of profile free names" in told(
            Settings(var=tmp_path / "var", profiles=profiles)
        )

    assert said(tmp_path / "server")
    assert said(tmp_path)
    assert not said(tmp_path / "other")


def test_several_keys_over_one_subscription_are_said_to_be_against_its_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = Settings(var=tmp_path / "var", keys=BOTH)  # type: ignore[arg-type]  # pydantic makes them SecretStr
    assert "2 keys name several people" in told(several)
    assert TERMS in told(several)
    monkeypatch.setenv("CLAUDE_CODE_OAUTH_TOKEN", FAKE_KEY)
    assert TERMS in told(several)
    monkeypatch.setenv("ANTHROPIC_API_KEY", FAKE_KEY)
    assert TERMS not in told(several)
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    assert TERMS not in told(several)
    monkeypatch.delenv("CLAUDE_CODE_USE_BEDROCK")
    assert TERMS not in told(several.model_copy(update={"i_am_the_only_user": True}))
    assert TERMS not in told(Settings(var=tmp_path / "var", keys={"alice": BOTH["alice"]}))  # type: ignore[dict-item]


def test_a_sandbox_is_said_to_be_no_boundary(tmp_path: Path) -> None:
    profiles = {"talker": Profile(), "coder": Profile(tools=("Read",)), "safe": Profile(tools=("Bash",), confined=True)}
    said = told(Settings(var=tmp_path / "var", profiles=profiles))
    assert "profile coder" in said
    assert "not a boundary" in said
    assert "talker" not in said
    assert "safe" not in said


def test_on_bsd_a_port_that_another_program_has_at_all_addresses_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the system itself would let both listen, and each client would reach the one that names its address."""
    with socket.create_server(("0.0.0.0", 0)) as other:
        settings = Settings(var=tmp_path / "var", port=other.getsockname()[1])
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(socket, "create_server", lambda *_, **__: pytest.fail("it was bound"))
        with pytest.raises(ConfigError, match="is taken by another program"):
            bind(settings)


def test_packages_that_are_hard_links_are_said_where_a_confined_agent_could_have_a_link_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, added = tmp_path / "uvicorn.py", tmp_path / "added"
    ours.touch()
    added.mkdir()
    monkeypatch.setattr(uvicorn, "__file__", str(ours))

    def said(folder: Path, *, confined: bool = True) -> bool:
        coder = Profile(tools=("Bash",), confined=confined, add_dirs=(folder,))
        return "are hard links" in told(Settings(var=tmp_path / "var", profiles={"coder": coder}))

    assert not said(added)
    (tmp_path / "cache.py").hardlink_to(ours)
    assert said(added)
    assert not said(added, confined=False)
    assert not said(tmp_path / "made later")
    assert not said(tmp_path / ("x" * 300))  # `stat` fails, `serve` does not
    assert not said(Path("/proc"))  # another file system
