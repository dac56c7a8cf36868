"""A measurement as a process of its own, which does not outlive its test."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path

from ..conftest import ROOT
from ..until import PATIENCE


async def run(module: str, *arguments: str, folder: Path, env: Mapping[str, str] | None = None) -> str:
    """What it prints. `folder` is its TMPDIR. It has to end without an error; a test that is cancelled interrupts it,
    so that it ends what it started itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments,
        cwd=ROOT, env={**os.environ, "TMPDIR": str(folder), **(env or {})}, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    try:
        said, failed = await process.communicate()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(process.communicate(), PATIENCE)
            except TimeoutError:
                process.kill()
                await process.communicate()
    assert process.returncode == 0, failed.decode()
    return said.decode()
