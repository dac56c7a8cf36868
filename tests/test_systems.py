"""Systems that keep something back, made of namespaces of our own: a turn is answered, and the next one remembers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from turnfault.provider.upstream import Upstream

from .conftest import CLI_ENV, ROOT
from .matrix import rest_in_full

NOBODY = 65534
PRIVATE = ("unshare", "--mount", "--propagation", "private")
# It may read what is root's, such as a Python below /root; it is not shown others' processes for that.
READS = "+dac_read_search"
AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps", READS, "--ambient-caps", READS,
)  # fmt: skip
USER = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

# What is done before the program starts, in a shell: `$1` is the home, `$2` the directory of its tools; the rest is the
# program.
READ_ONLY_HOME = 'mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"'
NO_PROGRAMS_IN_TMP = "mount --bind /tmp /tmp; mount -o remount,bind,noexec /tmp"
NO_PS = 'PATH="$2"; export PATH; ! command -v ps >/dev/null'
SYSTEMS = {
    "a home that is read-only, a /tmp from which nothing is run, no ps": (
        PRIVATE, f"{NO_PROGRAMS_IN_TMP}; {READ_ONLY_HOME}; {NO_PS}"
    ),
    "processes of others that are hidden": (
        (*PRIVATE, "sh", "-ec", 'mount -t proc -o hidepid=2 proc /proc; exec "$@"', "sh", *AS_NOBODY),
        "! test -e /proc/1/status",
    ),
    "a rootless container": (USER, 'test "$$" = 1'),
    "a home that is read-only": (PRIVATE, READ_ONLY_HOME),
    "a /tmp from which nothing is run": (PRIVATE, NO_PROGRAMS_IN_TMP),
    "no ps": ((), NO_PS),
}  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that nobody can reach, too: pytest's own are root's alone."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("namespaces are made by root on Linux")
    folder = Path(tempfile.mkdtemp(prefix="csp-system-"))
    try:
        (folder / "home").mkdir()
        (folder / "tools").mkdir()
        for name in ("sh", "bash", "env", "node", "git", "id", "test", "cat", "rg"):
            if (found := shutil.which(name)) is not None:
                (folder / "tools" / name).symlink_to(found)
        yield folder
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def serving(system: str, place: Path, claude: Path, upstream: Upstream) -> AsyncIterator[httpx.AsyncClient]:
    around, before = SYSTEMS[system]
    for path in (place, place / "home") if AS_NOBODY[0] in around else ():
        os.chown(path, NOBODY, NOBODY)
    home = str(place / "home")
    named = {
        "var": place / "var", "claude_bin": claude, "spares": 0, "self_check": False,
        "claude_env": json.dumps(CLI_ENV | {"ANTHROPIC_BASE_URL": upstream.url, "HOME": home}),
    }  # fmt: skip
    # The home is the CLI's own only where it can be written: what is in it belongs to the user.
    if "read-only" in system:
        named["claude_config_dir"] = place / "config"
    env = {"PATH": os.environ["PATH"], "HOME": home, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {f"CLI_SESSION_PROXY_{name.upper()}": str(value) for name, value in named.items()}
    shell = f'{before}; home=$1 tools=$2; shift 2; exec "$@"'
    process = await asyncio.create_subprocess_exec(
        *around, "sh", "-ec", shell, "sh", home, place / "tools",
        sys.executable, "-m", "cli_session_proxy", "serve", "--port", "0",
        env=env, cwd=place, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = b""
    reading = None
    try:
        async with asyncio.timeout(60):
            while b"listening on" not in (line := await process.stdout.readline()):
                said += line
                assert line, said.decode()
        reading = asyncio.create_task(process.stdout.read())
        url = line.decode().split("listening on ")[1].split()[0]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield http
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
            if reading is not None:
                await reading


@pytest.mark.parametrize("system", rest_in_full(*SYSTEMS, quick=3))
async def test_a_turn_is_answered_and_remembered_on(
    system: str, place: Path, claude_2: Path, upstream: Upstream
) -> None:
    async with serving(system, place, claude_2, upstream) as http:
        for said, answer, continuity in (
            ("Remember: the colour is teal", "Noted: colour is teal.", "started"),
            ("What is the colour?", "colour is teal.", "warm"),
        ):
            got = await http.post(
                "/v1/chat/completions", headers={"X-Agent-Id": "ada"},
                json={"model": "sonnet", "messages": [{"role": "user", "content": said}]},
            )  # fmt: skip
            assert got.status_code == 200, got.text
            assert answer in got.json()["choices"][0]["message"]["content"]
            assert got.headers["X-Continuity"] == continuity
