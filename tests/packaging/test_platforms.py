"""What is installed has wheels on every system that we name: nobody needs a compiler. Asked of the package index."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from ..conftest import ROOT, required

PLATFORMS = (
    "aarch64-apple-darwin", "x86_64-apple-darwin", "x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl",
)  # fmt: skip
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
INTEL = ("x86_64-apple-darwin",)
MUSL = PLATFORMS[2:]
# Where an extra has no wheels, and which package is missing there. Read November 2026; docs/troubleshooting.md says so,
# and has to be changed with this.
MISSING = {
    **{("claude", platform): "claude-agent-sdk" for platform in MUSL},
    **{("litellm", platform): "cryptography" for platform in INTEL},
    **{("litellm", platform): "pyroscope-io" for platform in MUSL},
}


def resolved(platform: str, python: str, extra: str | None, home: str) -> subprocess.CompletedProcess[str]:
    uv = required(ROOT / ".tools" / "uv" / "bin" / "uv", "make .tools/uv/.installed", what="a resolver")
    command: list[str | Path] = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--only-binary",
        ":all:",
        "--python-platform",
        platform,
    ]
    command += ["--python-version", python, *(["--extra", extra] if extra else []), ROOT / "pyproject.toml"]
    env = {**os.environ, "HOME": home}  # its cache, and where its index is said
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.full
@pytest.mark.parametrize("extra", [None, "claude", "litellm"])
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_everything_is_installed_without_a_compiler(platform: str, python: str, extra: str | None) -> None:
    done = resolved(platform, python, extra, pwd.getpwuid(os.getuid()).pw_dir)
    missing = MISSING.get((extra or "", platform))
    assert (done.returncode == 0) is (missing is None), done.stderr
    assert missing is None or missing in done.stderr


def test_what_is_missing_is_documented() -> None:
    told = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert {package for package in MISSING.values() if package not in told} == set()
