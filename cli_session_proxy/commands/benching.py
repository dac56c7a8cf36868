"""`bench-continuity`: `turnfault run`, with the CLI that this proxy would run."""

from __future__ import annotations

from collections.abc import Sequence

from turnfault import bench, cli

from ..backends.claude.process import capability
from ..settings import Settings


def run(settings: Settings, args: Sequence[str]) -> None:
    """Run `turnfault` with these arguments, and exit with its code; 2 if it cannot be run."""
    claude = ["--claude", str(capability.find(settings))] if bench.BARE in args else []
    cli.main(["run", *args, *claude])
