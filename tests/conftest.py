"""What every test stands on: an empty environment, a scripted upstream, real CLIs and settings under a temp folder.

The engine builds the CLI's environment from the process's own, so that is emptied first: no test can reach a
user's login, configuration or network proxy.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import pwd
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import settings as hypothesis_settings

from cli_session_proxy.backends.claude.process import capability, logged_in, process
from cli_session_proxy.backends.claude.sessions import sharing
from cli_session_proxy.settings import Settings
from cli_session_proxy.wires import answers
from turnfault.provider.upstream import Upstream

from . import failing, limits
from .forked import fork_server
from .macos import FULLFSYNC, like_macos
from .owned import owned_folder
from .postgres import Postgres, server
from .runtime import SHORT_LIVED
from .until import PATIENCE, POLL

ROOT = Path(__file__).parent.parent
# The folder of a distribution of its own, for the programs that tests start; pytest itself has it on its path.
CONFORMANCE = ROOT / "store_conformance"
FAKE_KEY = "sk-ant-fake-for-tests"
# What every CLI of the tests gets.
CLI_ENV = {
    "ANTHROPIC_API_KEY": FAKE_KEY,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    **SHORT_LIVED,
    # Of its Bash tool: else it takes zsh where there is one, which says and does some things in another way.
    "SHELL": "/bin/bash",
}
# What the CLI 1.0.120 says of itself when it is asked for --help.
CLAUDE_1_HELP = Path(__file__).parent / "data" / "claude-1.0.120-help.txt"
CI = bool(os.environ.get("CI"))
# Of the caller's environment these families never reach a test.
FORBIDDEN = ("PG", "ANTHROPIC_", "CLAUDE", "AWS_", "GOOGLE_", "CLI_SESSION_PROXY_", "LITELLM_", "OPENAI_", "GEMINI_")
MakeSettings = Callable[..., Settings]

# No test is about its time: a loaded machine is as good as a quiet one.
hypothesis_settings.register_profile("untimed", deadline=None)
hypothesis_settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The TMPDIR of the tests and of what they start is this process's own: CLIs and proxies that are killed leave
    folders and sockets there. The name is short, as a socket's path lies in it."""
    tmp_path_factory.getbasetemp()  # pytest keeps its own where somebody looks for it
    with owned_folder("csp-tmp-", Path(tempfile.gettempdir())) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        # Else multiprocessing makes one in it, and removes it when this one is gone.
        patch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))  # type: ignore[attr-defined]
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No keys, no network proxies, a HOME and a working directory of the test's own. No CLI gets the user's HOME, which
    one without the variable finds: it would leave its settings there."""
    settings_of_user = Path(pwd.getpwuid(os.getuid()).pw_dir, ".claude.json")
    existed = settings_of_user.exists()
    for name in list(os.environ):
        if name.startswith(FORBIDDEN) or name.upper() in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CLI_SESSION_PROXY_SELF_CHECK", "false")  # five seconds of a processor for each `serve`
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    yield
    assert existed or not settings_of_user.exists(), "a CLI was started with the user's own HOME"


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """To load the CAs takes each HTTP client 25 ms of a processor, and here they all talk to plain addresses. A context
    of nothing but a file of CAs is shared; one that is made otherwise may be given more to trust."""
    create = ssl.create_default_context
    shared = lru_cache(lambda cafile: create(cafile=cafile))

    def create_default_context(*purpose: Any, **options: Any) -> ssl.SSLContext:
        given = [name for name, value in options.items() if value is not None]
        return shared(options["cafile"]) if given == ["cafile"] and not purpose else create(*purpose, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_default_context)
        yield


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """httpx waits five seconds unless it is told otherwise: less than a loaded machine takes. The proxy's own clients
    each say how long they wait. Nor is a CLI given up that takes some seconds more to say what it is and whether it
    is logged in, to say a first word, to stop a turn, or to note that it went back; nor is a stream begun before it is
    known whether the answer is an error."""
    DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = 2 * PATIENCE
    DEFAULT_TIMEOUT_CONFIG.write = DEFAULT_TIMEOUT_CONFIG.pool = 2 * PATIENCE
    capability.PROBE_TIMEOUT = logged_in.STATUS_TIMEOUT = 2 * PATIENCE
    answers.FIRST_SIGN = PATIENCE
    process.SILENCE = 30.0
    process.STOP_WAIT = sharing.NOTE_WAIT = 10.0


@pytest.fixture(scope="session", autouse=True)
def no_process_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every process that the tests started is gone when they end, or soon after: a killed proxy's guardian looks for
    another second whether a CLI was left."""
    yield
    mark, give_up = os.fsencode(tmp_path_factory.getbasetemp()), time.monotonic() + PATIENCE
    parents = {os.getpid(), fork_server()}
    while (left := dict(processes(parents, mark=mark))) and time.monotonic() < give_up:
        time.sleep(POLL)
    assert not left, f"processes left behind: {left}"


def processes(of: Collection[int | None], mark: bytes) -> Iterator[tuple[int, str]]:
    """Children of processes (unreaped ones too), and orphans with the mark in their environment, such as a HOME of
    ours. Linux only: elsewhere there is no /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            ours = parent in of or mark in (entry / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or another user's
        if ours and int(entry.name) not in of and "multiprocessing.resource_tracker" not in command:
            yield int(entry.name), command or "(not reaped)"


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULLFSYNC, raising=False)  # so that it is gone again
    like_macos(monkeypatch.setattr, monkeypatch.delattr)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as server:
        yield server


def required(path: Path | None, how: str, *, what: str = "the real CLI") -> Path:
    if path is not None and path.exists():
        return path
    message = f"needs {what}: {how}"
    if CI:
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def claude_2() -> Path:
    """The CLI 2.1.x that the claude-agent-sdk wheel carries; never one from PATH."""
    spec = find_spec("claude_agent_sdk")
    found = None if spec is None or spec.origin is None else Path(spec.origin).parent / "_bundled" / "claude"
    return required(found, "pip install '.[claude]'")


@pytest.fixture(scope="session")
def claude_1_itself() -> Path:
    """The CLI 1.0.120 from npm, which answers every resume with a new id."""
    return required(ROOT / ".tools" / "claude-1.0.120" / "node_modules" / ".bin" / "claude", "make tools")


@pytest.fixture(scope="session")
def claude_1(claude_1_itself: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same behind a script that knows what it says of itself, for which it needs two seconds of a processor."""
    script = tmp_path_factory.mktemp("claude-1") / "claude"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in\n--version) echo "1.0.120 (Claude Code)" ;;\n--help) cat "{CLAUDE_1_HELP}" ;;\n'
        f'*) exec "{claude_1_itself}" "$@" ;;\nesac\n'
    )
    script.chmod(0o755)
    return script


@pytest.fixture(params=["claude_2", "claude_1"])
def claude(request: pytest.FixtureRequest) -> Path:
    """Either CLI: the test runs once with each."""
    binary: Path = request.getfixturevalue(request.param)
    return binary


@pytest.fixture
def claude_env(upstream: Upstream, tmp_path: Path) -> dict[str, str]:
    """What a CLI needs to talk to the scripted upstream and to nobody else."""
    return CLI_ENV | {
        "ANTHROPIC_BASE_URL": upstream.url,
        "HOME": str(tmp_path / "home"),
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }


@pytest.fixture
def make_settings(claude_env: dict[str, str], tmp_path: Path) -> MakeSettings:
    """Settings under the test's folder with bounds that end a broken test soon: `make_settings(claude_bin=claude)`."""

    def make(**overrides: Any) -> Settings:
        given: dict[str, Any] = {
            "port": 0,
            "var": tmp_path / "var",
            "claude_config_dir": tmp_path / "claude-config",
            "claude_env": claude_env,
            "turn_timeout": 120.0,
            "idle_timeout": 60.0,
            "spawn_timeout": 60.0,
            "stop_grace": 2.0,
            "drain_timeout": 10.0,
            "disconnect_grace": 2.0,
            "max_turns": 16,
            "max_processes": 16,
            "max_spawns": 2,
            "spares": 0,
        }
        return Settings(**{**given, **overrides})

    return make


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server of the tests' own. A test that stops it makes its own (`tests.postgres.server`)."""
    with server() as made:
        yield made


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """A new database, which is dropped behind the test."""
    with postgres.database() as url:
        yield url


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder with a short path, where a unix socket's name has to fit in."""
    with tempfile.TemporaryDirectory(prefix="csp-") as name:
        yield Path(name)


def pytest_configure(config: pytest.Config) -> None:
    """What is imported and collected stays to the end: looking through it for garbage took a third of the collection,
    and part of each test's time."""
    try:
        metadata.distribution("turnfault")
    except metadata.PackageNotFoundError:
        pytest.exit(f"run first: {sys.executable} -m pip install --no-deps -e {ROOT / 'benchmark'}", 4)
    config.pluginmanager.register(limits)
    config.pluginmanager.register(failing)
    # Some machines forbid it to all programs: then each process of a run compiles the tests and the package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m, what is marked `full` is deselected: left out on purpose, not skipped.

    Of a test that is marked `sample(n)`, all cases but `n` are marked so, too: those `n` are spread evenly.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("full"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in cases.values():
        mark = of_one[0].get_closest_marker("sample")
        assert mark is not None
        quick = {len(of_one) * place // mark.args[0] for place in range(mark.args[0])}
        for place, item in enumerate(of_one):
            if place not in quick:
                item.add_marker(pytest.mark.full)
    if config.option.markexpr:
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in set(full)]


# In CI nothing may be skipped: a skipped test is a part of the promise that nobody checked.
_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CI and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CI and _skipped:
        terminalreporter.write_line(f"skipped in CI, which counts as a failure: {', '.join(_skipped)}", red=True)
