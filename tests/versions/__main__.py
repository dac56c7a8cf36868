"""The matrix over npm's versions: `make versions`, or `python -m tests.versions --only 1.0.120 2.0.5`.

Each is installed below .tools/versions by npm, one at a time, and removed again: a native one has 230 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cli_session_proxy.backends.claude.process.capability import PACKAGE
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..conftest import CLI_ENV, FORBIDDEN, ROOT
from ..remembering import remembering
from .life import Found, Life
from .report import write

FOLDER = ROOT / ".tools" / "versions"
OLDEST, EVERY, NEWEST = "1.0.60", 20, 10
INSTALL_SECONDS, LIFE_SECONDS = 300, 900


def chosen(every: Sequence[str]) -> list[str]:
    """Every 20th since 1.0.60, and all of the last ten."""
    since = list(every[every.index(OLDEST) :])
    return sorted({*since[::EVERY], *since[-NEWEST:]}, key=since.index)


def published() -> list[str]:
    told = subprocess.run(
        ["npm", "view", PACKAGE, "versions", "--json"], capture_output=True, text=True, check=True, timeout=120
    )
    return [str(one) for one in json.loads(told.stdout)]


def installed(version: str) -> Path:
    """Its binary. Raises CalledProcessError, TimeoutExpired."""
    folder = FOLDER / version
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ["--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
    command = ["npm", "install", "--prefix", str(folder), *quiet, f"{PACKAGE}@{version}"]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS, stdout=subprocess.DEVNULL)
    return folder / "node_modules" / ".bin" / "claude"


async def lived(version: str, binary: Path, folder: Path, *, short: bool = False) -> Found:
    async with Upstream(answer=remembering) as upstream:
        home = folder / "home"
        home.mkdir()
        env = CLI_ENV | {"ANTHROPIC_BASE_URL": upstream.url, "HOME": str(home), "CLAUDE_CODE_MAX_RETRIES": "2"}
        settings = Settings(
            port=0, var=folder / "var", claude_bin=binary, claude_config_dir=folder / "config", claude_env=env,
            spares=0, stop_grace=5.0,
        )  # fmt: skip
        async with asyncio.timeout(LIFE_SECONDS):
            return await Life(settings, upstream, version, short=short).run()


def one(version: str) -> Found:
    try:
        with tempfile.TemporaryDirectory(prefix="csp-versions-") as folder:
            return asyncio.run(lived(version, installed(version), Path(folder)))
    except (subprocess.SubprocessError, TimeoutError) as exc:
        return Found(version, faults=[f"it could not be run: {exc}"])
    finally:
        shutil.rmtree(FOLDER / version, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="VERSION")
    parser.add_argument("--docs", type=Path, default=None, help="write the table to this file")
    given = parser.parse_args()
    for name in [name for name in os.environ if name.startswith(FORBIDDEN)]:
        del os.environ[name]
    every: list[Found] = []
    for version in given.only or chosen(published()):
        found = one(version)
        every.append(found)
        print(
            f"{version:10} {found.whole:2}/{found.answered} whole, {found.seconds:5.0f} s", *found.errors, *found.faults
        )
        sys.stdout.flush()
        if given.docs is not None:
            write(given.docs, every)
    return 0 if all(found.sound for found in every) else 1


if __name__ == "__main__":
    sys.exit(main())
