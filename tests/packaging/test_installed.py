"""What an index would get: the wheel and the sdist are made, checked, installed into an empty environment and run.

Offline: the build backend and the dependencies are those of the environment that runs the tests, lent to the empty one
by a .pth file, so `pip install` takes the package alone. That the dependencies can be had is tried by `make` itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from ..conftest import ROOT

# Each time, test_dockerfile.py builds the wheel and installs it.
pytestmark = pytest.mark.full

# A cold start of pip or of the CLI on a busy machine takes many seconds.
SLOW = 300

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEM = f"cli_session_proxy-{PROJECT['version']}"


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """Its output, when it ends well. It gets no more of the environment than is named here."""
    env = {"PATH": os.defpath, "HOME": str(cwd), "LANG": "C.UTF-8", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, check=False, capture_output=True, text=True, timeout=SLOW
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both: the sdist of a copy of the checkout, and the wheel out of that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", ".tools", "var", ".*_cache", ".hypothesis", "__pycache__", "*.sqlite3*"
    )
    shutil.copytree(ROOT, source, ignore=ignore)
    for project in (source / "benchmark", source):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, project, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def venv(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and nothing else of its own."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    Path(own, "lent_by_the_tests.pth").write_text("\n".join(lent))
    wheels = dist.glob("*.whl")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", *wheels, cwd=folder)
    return folder / "venv"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """An empty folder, in which the checkout cannot be imported by accident."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_an_index_would_take_both(dist: Path) -> None:
    files = [dist / f"{STEM}-py3-none-any.whl", dist / f"{STEM}.tar.gz"]
    assert "FAILED" not in run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=dist)


def test_the_wheel_holds_the_package_alone_and_the_sdist_its_tests_too(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names} == {"cli_session_proxy", f"{STEM}.dist-info"}
    assert {"cli_session_proxy/py.typed", "cli_session_proxy/http/ui/static/index.html"} <= names
    with tarfile.open(dist / f"{STEM}.tar.gz") as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"tests/packaging/test_installed.py", "docs/contract/settings.md", "Makefile", "LICENSE"} <= inside
    assert not [name for name in inside if name.startswith((".venv", ".tools", "var/sandbox"))]


def test_the_installed_program_is_the_wheels(venv: Path, elsewhere: Path) -> None:
    where = run(venv / "bin" / "python", "-c", "import cli_session_proxy as c; print(c.__file__)", cwd=elsewhere)
    assert Path(where).is_relative_to(venv)
    told = run(venv / "bin" / "cli-session-proxy", "--version", cwd=elsewhere)
    assert told == f"cli-session-proxy {PROJECT['version']}\n"


def test_the_installed_program_holds_its_promise_in_the_demo(venv: Path, elsewhere: Path, claude_2: Path) -> None:
    """`claude` is on no PATH: the CLI is the one that the [claude] extra brings along."""
    assert claude_2.exists()
    told = run(venv / "bin" / "cli-session-proxy", "demo", cwd=elsewhere, PATH=str(venv / "bin"))
    assert "Everything was recalled." in told
    assert list(elsewhere.iterdir()) == []  # it leaves nothing where it is run


# Their own types are read through ours: what else is installed has nothing to do with it, and takes ten times as long.
ONLY_OURS = """[mypy]
follow_imports = skip
[mypy-cli_session_proxy.*]
follow_imports = silent
[mypy-pydantic.*]
follow_imports = silent
"""


def test_the_types_of_ask_reach_whoever_installs_it(venv: Path, elsewhere: Path) -> None:
    (elsewhere / "theirs.py").write_text("""
from pydantic import BaseModel
from cli_session_proxy import Episode, ask

class City(BaseModel):
    name: str

async def main() -> None:
    episode, city = await ask("a city", schema=City)
    reveal_type(city)
    episode, text = await ask("and now?", episode=episode)
    reveal_type(text)
""")
    (elsewhere / "mypy.ini").write_text(ONLY_OURS)
    told = run(venv / "bin" / "python", "-m", "mypy", "--cache-dir", elsewhere / "cache", "theirs.py", cwd=elsewhere)
    assert 'Revealed type is "theirs.City"' in told
    assert 'Revealed type is "str"' in told or 'Revealed type is "builtins.str"' in told


# What the author of a store does with the suite: install it beside the proxy, and run its contracts.
ONE_CONTRACT = """
import asyncio, sys
from pathlib import Path
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance import CONTRACTS

asyncio.run(CONTRACTS[0](lambda: SqliteStore(Path("store.sqlite3"))))
print(sys.modules["cli_session_proxy_store_conformance"].__file__)
"""


def test_the_suite_for_stores_is_a_distribution_of_its_own(venv: Path, dist: Path, elsewhere: Path) -> None:
    suite = tomllib.loads((ROOT / "store_conformance" / "pyproject.toml").read_text())["project"]
    assert (suite["version"], suite["dependencies"]) == (
        PROJECT["version"],
        [f"{PROJECT['name']}=={PROJECT['version']}"],
    )
    folder = dist / "source" / "store_conformance"
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", elsewhere, folder, cwd=elsewhere)
    (wheel,) = elsewhere.glob("*.whl")
    with zipfile.ZipFile(wheel) as names:
        inside = {name.partition("/")[0] for name in names.namelist()}
    package = "cli_session_proxy_store_conformance"
    assert inside == {package, f"{package}-{PROJECT['version']}.dist-info"}
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=elsewhere)
    assert run(python, "-c", ONE_CONTRACT, cwd=elsewhere).startswith(str(venv))
    run(python, "-m", "pip", "uninstall", "--yes", suite["name"], cwd=elsewhere)


def test_the_sdist_installs_too_and_uninstalling_leaves_only_the_chains(
    venv: Path, dist: Path, elsewhere: Path
) -> None:
    python = venv / "bin" / "python"
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall")
    run(python, "-m", "pip", "install", *offline, dist / f"{STEM}.tar.gz", cwd=elsewhere)
    run(venv / "bin" / "cli-session-proxy", "chains", cwd=elsewhere)
    run(python, "-m", "pip", "uninstall", "--yes", "cli-session-proxy", cwd=elsewhere)
    assert not (venv / "bin" / "cli-session-proxy").exists()
    left = [path for path in venv.rglob("cli_session_proxy*") if "pip" not in path.parts]
    assert left == []
