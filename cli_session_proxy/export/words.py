"""Words that all dumps for people share; and what happened to a turn, in a few words each, for lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..domain import limits
from ..domain.evidence import OUTPUT_REFUSED
from ..domain.models import JSON, REPAIR_REASONS, Delivery, Link, LinkReason, Turn

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


# Characters that control a terminal, change the direction of a line or are invalid in a page. Joiners are not among
# them: scripts and emoji need them.
UNSAFE = "\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
_UNSAFE = re.compile(f"[{UNSAFE}]")


def visible(text: str) -> str:
    """The text with a visible character in place of each unsafe one. Lines stay."""
    return text if text.replace("\n", "").isprintable() else _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


# --- a turn in brief; `explain` has the sentences with paths, ids and evidence

_FOUND_IN_BRIEF: Mapping[str, str] = {
    "missing": "was missing",
    "unreadable": "could not be read",
    "different": "had been changed",
    "tail": "had foreign lines at its end",
}
_CODES_IN_BRIEF: Mapping[str, Brief] = {
    "client_history": Brief("note", "History taken from the client."),
    "open_calls": Brief("repair", "The CLI that waited for these results had ended; restored with the results."),
    "left_out": Brief("note", "The provider refused a part of the conversation; sent without it."),
}


def in_brief(turn: Turn, links: Sequence[Link]) -> list[Brief]:
    """Each kind of event once; empty for an ordinary turn. `links` are those made at this turn. Pure."""
    briefs = [link_in_brief(made) for made in links if made.reason != "started"]
    briefs += _of_evidence(turn, any(link.reason in REPAIR_REASONS for link in links))
    return list(dict.fromkeys(briefs))


def link_in_brief(made: Link) -> Brief:
    """What a link says, in a few words."""
    match made.reason:
        case "started":
            return Brief("note", "New session.")
        case "branched" if made.detail.get("code") == "taken_back":
            return Brief("branch", "Continues an earlier turn.")
        case "branched" if made.detail.get("code") != "open_calls":
            return Brief("branch", "Continues an earlier turn, in a new session.")
        case "adopted" if "source" in made.detail:
            return Brief("adopted", "A session from outside was adopted.")
        case "adopted":
            return Brief("adopted", "Turns made outside the proxy were adopted.")
        case "forked_by_cli":
            return Brief("note", "The CLI continued in a new session.")
        case "moved":
            return Brief("repair", "Session file had been moved; put back.")
    return _repaired(made.detail)


def _repaired(detail: JSON) -> Brief:
    if "found_at" in detail:
        return Brief("repair", "Session file had been moved; put back.")
    if detail.get("behind") == "ours":
        return Brief("repair", "Session file still held an attempt that was not kept; restored.")
    known = _CODES_IN_BRIEF.get(str(detail.get("code")))
    return known or Brief(
        "repair", f"Session file {_FOUND_IN_BRIEF.get(str(detail.get('found')), 'was another')}; restored."
    )


def _of_evidence(turn: Turn, has_repair: bool) -> Iterator[Brief]:
    evidence, fallback = turn.evidence, turn.fallback
    if fallback is not None and fallback.here:
        yield Brief("fallback", f"{fallback.asked} could not answer; {fallback.model} did.")
    if evidence.refusal is not None:
        yield Brief("refusal", "The model refused; the next turn starts from the one before.")
    if evidence.repaired is not None and not has_repair:
        yield _repaired(evidence.repaired.as_json())
    if evidence.exit_code is not None or evidence.reloaded:
        yield Brief("repair", "The CLI was started again.")
    if evidence.settled:
        yield Brief("repair", "The proxy stopped during this turn; the answer was saved.")
    if evidence.sandbox:
        yield Brief("repair", "The agent's folder was missing; made again.")
    if evidence.records in ("frames", "replaced", "unlinked"):
        yield Brief("repair", "Session file was lost during the turn; the turn was not.")
    before = [attempt for attempt in turn.attempts if "n" in attempt][:-1]
    if any(attempt.get("code") == OUTPUT_REFUSED for attempt in before):
        yield Brief("retry", "The answer did not fit the requested JSON; asked again.")
    elif before:
        yield Brief("retry", f"{count(len(before), 'attempt')} failed; asked again.")
    if evidence.retries or evidence.cuts:
        failures = len(evidence.retries) + len(evidence.cuts)
        times = "once" if failures == 1 else f"{failures} times"
        yield Brief("retry", f"The provider failed {times}; asked again.")
    if evidence.approvals:
        allowed = sum(one.outcome in ("allowed", "allowed_for_turn") for one in evidence.approvals)
        yield Brief("note", f"{count(len(evidence.approvals), 'tool')} waited for a person: {allowed} allowed.")
    if evidence.left_off:
        yield Brief("note", "An answer that never reached its client is left out.")
    if evidence.compacted:
        yield Brief("note", "The CLI compacted the conversation.")
    if evidence.unmet:
        yield Brief("note", "Not every parameter of the request applies.")
    if any(note.code != "outside_window" for note in evidence.notes):
        yield Brief("note", "The model was shown some content in another form.")
