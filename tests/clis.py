"""With which CLIs a test runs, where not with both (the fixture `claude`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process import capability
from cli_session_proxy.backends.claude.process.observed import NAMES, Observation

# For what is not about how the old CLI differs. It serves one turn a process, so each turn takes seconds of a processor
# there. The tests of its own ways, and a row of every breakage, run with it each time; these in `make full`.
old_cli_in_full = pytest.mark.parametrize(
    "claude", ["claude_2", pytest.param("claude_1", marks=pytest.mark.full)], indirect=True
)


async def seen_working(binary: Path, folder: Path) -> Path:
    """The same CLI under a name of its own, of which the self-check has seen all that it looks for."""
    link = folder / "claude-that-was-checked"
    link.symlink_to(binary)
    await checked(link, folder)
    return link


async def checked(binary: Path, folder: Path) -> None:
    """From now on the self-check has seen all that it looks for of this CLI."""
    found = await capability.probe(binary, {"PATH": os.environ["PATH"], "HOME": str(folder)}, folder)
    seen: dict[str, Observation] = {name: Observation.of(name, "ok") for name in NAMES}
    capability.observe(capability.identity_of(binary), found.version, seen)
