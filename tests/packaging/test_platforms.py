"""What is installed is there for every system that we name: nobody needs a compiler. Asked of the package index."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ..conftest import ROOT, required

PLATFORMS = (
    "aarch64-apple-darwin", "x86_64-apple-darwin", "x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl",
)  # fmt: skip
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
INTEL = ("x86_64-apple-darwin",)
MUSL = PLATFORMS[2:]
# Extras of users; the others are for who works on this.
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]) - {
    "dev", "bench", "clients",
}  # fmt: skip
# Has wheels with the CLI in them, and on musl its source: Python alone, without the CLI.
SOURCE = "claude-agent-sdk"
# Where an extra needs a compiler, and for which package (November 2026). docs/troubleshooting.md says so, too.
MISSING = {
    **{("litellm", platform): "cryptography" for platform in INTEL},
    **{("litellm", platform): "pyroscope-io" for platform in MUSL},
    **{("archive", platform): "pyrage" for platform in MUSL},
}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    # pip's and uv's cache, and where their index is said
    env = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.full
@pytest.mark.parametrize("extra", [None, *sorted(EXTRAS)])
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_everything_is_installed_without_a_compiler(platform: str, python: str, extra: str | None) -> None:
    uv = required(ROOT / ".tools" / "uv" / "bin" / "uv", "make .tools/uv/.installed", what="a resolver")
    wheels = ("--only-binary", ":all:", *(("--no-binary", SOURCE) if platform in MUSL else ()))
    chosen = ("--python-platform", platform, "--python-version", python, *(("--extra", extra) if extra else ()))
    done = run(uv, "pip", "compile", "--quiet", *wheels, *chosen, ROOT / "pyproject.toml")
    missing = MISSING.get((extra or "", platform))
    assert (done.returncode == 0) is (missing is None), done.stderr
    assert missing is None or missing in done.stderr


@pytest.mark.full
def test_the_source_that_musl_takes_needs_no_compiler(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    done = run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-binary", SOURCE, "-w", wheels, SOURCE
    )
    assert done.returncode == 0, done.stderr
    (built,) = wheels.iterdir()
    assert built.name.endswith("-py3-none-any.whl")


def test_what_is_missing_is_documented() -> None:
    told = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert {package for package in MISSING.values() if package not in told} == set()
