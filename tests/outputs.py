"""A program that is run to its end."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from typing import Any

from .until import PATIENCE


async def output_of(*command: str, within: float = PATIENCE, stdin: Any = DEVNULL, **options: Any) -> str:
    """What it prints. It has to end in this time, and without an error."""
    process = await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=PIPE, stderr=PIPE, **options)
    try:
        async with asyncio.timeout(within):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{out.decode()}\n{err.decode()}"
    return out.decode()
