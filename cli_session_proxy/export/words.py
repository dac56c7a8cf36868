"""Words that all dumps for people share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..domain import limits
from ..domain.models import Delivery, LinkReason

# One word for each kind of event of a turn, on the page, in dumps and in the terminal: a repair, a branch, a retry,
# another model, a refusal, adopted turns, or a note.
Kind = Literal["repair", "branch", "retry", "fallback", "refusal", "adopted", "note"]


class Brief(NamedTuple):
    kind: Kind
    says: str


# How a sentence of this kind begins.
KINDS: Mapping[Kind, str] = {
    "repair": "repaired",
    "branch": "branch",
    "retry": "retried",
    "fallback": "fallback",
    "refusal": "refused",
    "adopted": "adopted",
    "note": "note",
}

# A link in a few words, where the sentence of `explain.link` is too long.
WHY: Mapping[LinkReason, str] = {
    "started": "session started",
    "forked_by_cli": "the CLI answered with a new session id",
    "rebuilt": "repaired: the session was rebuilt from the chain",
    "branched": "a branch: the session was made from an earlier turn",
    "moved": "repaired: the transcript was moved back",
    "adopted": "turns made outside the proxy were adopted",
}


def mark_of(reason: LinkReason) -> str:
    """How a dump begins the line of a link. A branch has no special word: nothing went wrong."""
    return {"rebuilt": "repaired", "moved": "repaired", "adopted": "adopted"}.get(reason, "link")


# For answers that may not have arrived.
UNSURE: Mapping[Delivery, str] = {
    "undelivered": "undelivered: the client left before the answer reached it",
    "uncertain": "uncertain: the proxy ended before it was known whether the answer reached its client",
}


# Levels of JSON that a dump shows: as many as clients and models may send, and the block around. Output of the CLI's
# tools and rows of older stores may nest deeper.
SHOWN_DEPTH = limits.DEPTH + 8
TOO_DEEP = "[nested too deep to be shown here; the store and `export` have it whole]"


def shallow(value: Any) -> Any:
    """The value, with a note in place of parts that nest too deep."""
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
    """An amount; blank for zero."""
    return f"${dollars:.{4 if dollars < 0.1 else 2}f}" if dollars else ""


# What steers a terminal, turns a line around or has no place in a page; joiners, which scripts and emoji need, stay.
UNSEEN = "\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
_UNSEEN = re.compile(f"[{UNSEEN}]")


def visible(text: str) -> str:
    """Text of any lines in which every control character is shown as one."""
    return text if text.replace("\n", "").isprintable() else _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)
