"""What happened to a turn, in a few words each, for lists. `explain` has the sentences with paths, ids and evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..domain.evidence import OUTPUT_REFUSED
from ..domain.models import JSON, REPAIR_REASONS, Link, Turn
from .words import Brief, count

_FOUND: Mapping[str, str] = {
    "missing": "was missing",
    "unreadable": "could not be read",
    "different": "had been changed",
    "tail": "had foreign lines at its end",
}
_CODES: Mapping[str, Brief] = {
    "client_history": Brief("note", "History taken from the client."),
    "open_calls": Brief("repair", "The CLI that waited for these results had ended; restored with the results."),
    "left_out": Brief("note", "The provider refused a part of the conversation; sent without it."),
}


def events(turn: Turn, links: Sequence[Link]) -> list[Brief]:
    """Each kind of event once; empty for an ordinary turn. `links` are those made at this turn. Pure."""
    briefs = [link(made) for made in links if made.reason != "started"]
    briefs += _of_evidence(turn, any(link.reason in REPAIR_REASONS for link in links))
    return list(dict.fromkeys(briefs))


def link(made: Link) -> Brief:
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
    known = _CODES.get(str(detail.get("code")))
    return known or Brief("repair", f"Session file {_FOUND.get(str(detail.get('found')), 'was another')}; restored.")


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
