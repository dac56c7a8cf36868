"""The words of every dump for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..domain import limits
from ..domain.models import Delivery, LinkReason

# The one word for what happened to a turn, on the page, in a dump and in a terminal: something was mended, the
# conversation parts, something was asked again, another model answered, the model refused, turns came from outside;
# or a note.
Kind = Literal["repair", "branch", "retry", "fallback", "refusal", "adopted", "note"]


class Brief(NamedTuple):
    kind: Kind
    says: str


# How a dump for people begins the sentence.
KINDS: Mapping[Kind, str] = {
    "repair": "repaired",
    "branch": "branch",
    "retry": "retried",
    "fallback": "fallback",
    "refusal": "refused",
    "adopted": "adopted",
    "note": "note",
}

# A link in a few words, where the whole sentence (`explain.link`) has no place.
WHY: Mapping[LinkReason, str] = {
    "started": "session started",
    "forked_by_cli": "the CLI answered with a new session id",
    "rebuilt": "repaired: the session was rebuilt from the chain",
    "branched": "a branch: the session was made from an earlier turn",
    "moved": "repaired: the transcript was moved back",
    "adopted": "turns made outside the proxy were adopted",
}


def mark_of(reason: LinkReason) -> str:
    """How a dump begins the line of a link. That of a branch begins as any other: nothing went wrong."""
    return {"rebuilt": "repaired", "moved": "repaired", "adopted": "adopted"}.get(reason, "link")


# Of an answer that may never have been read.
UNSURE: Mapping[Delivery, str] = {
    "undelivered": "undelivered: the client left before the answer reached it",
    "uncertain": "uncertain: the proxy ended before it was known whether the answer reached its client",
}


# Levels of a JSON value that a dump shows: all that a client or a model may send, with the block around it. What the
# CLI's own tools say may nest deeper, and so may rows of an older store.
SHOWN_DEPTH = limits.DEPTH + 8
TOO_DEEP = "[nested too deep to be shown here; the store and `export` have it whole]"


def shallow(value: Any) -> Any:
    """The value, with a note in place of what nests too deep to be walked through."""
    return _cut(value, SHOWN_DEPTH) if limits.is_deeper(value, SHOWN_DEPTH) else value


def _cut(value: Any, depth: int) -> Any:
    if not isinstance(value, (dict, list, tuple)):
        return value
    if depth == 0:
        return TOO_DEEP
    if isinstance(value, dict):
        return {name: _cut(item, depth - 1) for name, item in value.items()}
    return [_cut(item, depth - 1) for item in value]


def count(number: object, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def money(dollars: float) -> str:
    """Blank for nothing."""
    return f"${dollars:.{4 if dollars < 0.1 else 2}f}" if dollars else ""


# What steers a terminal, turns a line around or has no place in a page; joiners, which scripts and emoji need, stay.
UNSEEN = "\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
_UNSEEN = re.compile(f"[{UNSEEN}]")


def visible(text: str) -> str:
    """Text of any lines in which every control character is shown as one."""
    return text if text.replace("\n", "").isprintable() else _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)
