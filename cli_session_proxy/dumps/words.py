"""The words of every dump for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from ..models import LinkReason

# A link in a few words, where the whole sentence (`telling.link`) has no place.
WHY: Mapping[LinkReason, str] = {
    "started": "session started",
    "forked_by_cli": "the CLI answered with a new session id",
    "rebuilt": "repaired: the session was rebuilt from the chain",
    "branched": "a branch: the session was made from an earlier turn",
    "reset_by_cli": "the CLI reset its session (/clear)",
    "moved": "repaired: the transcript was moved back",
    "adopted": "turns made outside the proxy were adopted",
}


def count(number: object, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def printable(text: str) -> str:
    """One line in which nothing steers the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
