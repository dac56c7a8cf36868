"""The words of every dump for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from ..models import LinkReason

# What a reader wants to know of a link; a session's first one is no repair.
WHY: Mapping[LinkReason, str] = {
    "started": "session started",
    "forked_by_cli": "the CLI answered with a new session id",
    "rebuilt": "repaired: the session was rebuilt from the chain",
    "branched": "a branch: the session was made from an earlier turn",
    "reset_by_cli": "the CLI reset its session (/clear)",
    "moved": "the session was moved",
    "adopted": "the session was adopted",
}

# Links that stand for a repair or for somebody else's doing: what a reader looks for.
REPAIRS: frozenset[LinkReason] = frozenset({"rebuilt", "moved", "adopted", "reset_by_cli"})


def time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
