"""Which session a living CLI has open, by its own register: `<config dir>/sessions/<pid>.json` (2.1.329).

Older CLIs keep no such register; then nothing is known.
"""

from __future__ import annotations

import json
from pathlib import Path

from .proc import start_time


async def holder(config_dir: Path, session_id: str) -> int | None:
    """The pid of a living CLI that says it has this session open; None when none says so."""
    for file in sorted((config_dir / "sessions").glob("*.json")):
        try:
            entry = json.loads(file.read_bytes())
        except (OSError, ValueError):  # just being written, or its CLI has just ended
            continue
        if not isinstance(entry, dict) or entry.get("sessionId") != session_id or not isinstance(entry.get("pid"), int):
            continue
        started = await start_time(entry["pid"])
        if started is not None and _same(started, entry.get("procStart")):
            return int(entry["pid"])
    return None


def has_register(config_dir: Path) -> bool:
    return (config_dir / "sessions").is_dir()


def _same(started: str, said: object) -> bool:
    """Both are clock ticks on Linux; where the forms differ (macOS), the pid alone has to do."""
    return started == said if started.isdigit() and isinstance(said, str) and said.isdigit() else True
