"""The words of every dump for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from ..domain.models import Delivery, LinkReason

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

# Of an answer that may never have been read.
UNSURE: Mapping[Delivery, str] = {
    "undelivered": "undelivered: the client left before the answer reached it",
    "uncertain": "uncertain: the proxy ended before it was known whether the answer reached its client",
}


def count(number: object, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


# What steers a terminal, turns a line around or has no place in a page; joiners, which scripts and emoji need, stay.
_UNSEEN = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """Text of any lines in which every control character is shown as one."""
    return text if text.replace("\n", "").isprintable() else _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


def printable(text: str) -> str:
    """One line in which nothing steers the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
