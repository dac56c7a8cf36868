"""What broke at a turn and how it was mended, in sentences: one table for every form that a person reads.

A link is told by its reason and evidence, a turn by its attempts and its reason. Both come in as a dump shows
them (`shown`), without secrets. Evidence that an older version left out is not guessed: the sentence is shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from ..models import JSON, Link, LinkReason
from .words import count

# Links that stand for a repair or for somebody else's doing: what a reader looks for.
REPAIRS: frozenset[LinkReason] = frozenset({"rebuilt", "moved", "adopted", "reset_by_cli"})

# What the verdict on a transcript (`transcript.comparing`) means to a person.
_FOUND: Mapping[str, str] = {
    "missing": "The session's transcript was gone",
    "unreadable": "The session's transcript could not be read",
    "different": "The session's transcript was not what the chain knows",
    "tail": "Records that the chain does not know followed in the session's transcript",
}
# What followed the path in a transcript (`Repairs._rebuild`).
_BEHIND: Mapping[str, str] = {
    "ours": "The session's transcript still held what an attempt that failed had left there",
    "theirs": "The session's transcript ended with a prompt of somebody else's that has no whole answer",
    "broken_line": "The session's transcript ended with a broken line",
    "notes": "The session's transcript ended with records that belong to no prompt",
}
# How a turn's records came to be (`Sessions.capture`), where they were not simply read.
_RECORDS: Mapping[str, str] = {
    "the transcript is gone; records made from the frames": (
        "The transcript was gone when the turn ended: its records were made from what the CLI had said."
    ),
    "the transcript was replaced during the turn": (
        "The transcript was replaced during the turn: it is verified before the next one."
    ),
    "the transcript does not continue the path": (
        "The transcript did not go on from the conversation when the turn ended: it is verified before the next one."
    ),
}


def link(reason: LinkReason, detail: JSON, source: str | None, target: str) -> str:
    """One or two sentences on why `target` follows `source`."""
    said = _LINKS[reason](detail, _short(source), _short(target))
    if "settled" in detail:
        said += " The proxy died in this turn: the next one to start found that out from the transcript."
    return said


def turn(reason: JSON, attempts: list[JSON], links: Sequence[Link] = ()) -> list[str]:
    """What happened to a turn beside what its links tell, in order; nothing for one that went as turns should."""
    return [*_before(reason, links), *_attempts(reason, attempts), *_after(reason)]


def _before(reason: JSON, links: Sequence[Link]) -> Iterator[str]:
    if "left_off" in reason:
        yield (f"The answer of {reason['left_off']} never reached its client: the conversation goes on from before it.")
    if "sandbox" in reason:
        yield f"The agent's sandbox directory was gone (nothing at {reason['sandbox']}): it was made again, empty."
    repaired = reason.get("repaired")
    if repaired and not any(link.reason in ("rebuilt", "moved") for link in links):
        # Links are committed with their attempt: one that failed leaves only the journal's entry.
        yield _moved(repaired, "", "") if "found_at" in repaired else _rebuilt(repaired, "", "")
    if "process" in reason:
        yield (
            f"The CLI process that was kept for this session {reason['process']}: a new one resumed the session, "
            "whose transcript was verified first."
        )


def _attempts(reason: JSON, attempts: list[JSON]) -> Iterator[str]:
    ran = [attempt for attempt in attempts if "n" in attempt]
    for attempt, following in pairwise(ran):
        if attempt.get("status") == "failed":
            why = str(attempt.get("why") or attempt.get("code") or "no reason is known")
            if why == reason.get("output_refused"):
                why = f"its answer was not the JSON that was asked for ({why})"
            yield (
                f"Attempt {attempt['n']} failed ({why}): the prompt was sent again as attempt {following['n']}, to a "
                "session that does not know of the first."
            )


def _after(reason: JSON) -> Iterator[str]:
    retries = reason.get("retries") or []
    if retries:
        last = retries[-1]
        named = [str(part) for part in (last.get("error_status"), last.get("error")) if part and part != "unknown"]
        what = " ".join(named) or "no whole answer"
        times = "" if len(retries) == 1 else f" {len(retries)} times"
        yield f"The provider failed{times} ({what}): the CLI asked it again."
    if "settled" in reason:
        yield "The proxy died after the CLI had finished this turn: the answer was read from the transcript."
    if "compacted" in reason:
        yield "The CLI compacted the conversation: of what is before, the model knows a summary."
    if reason.get("records") in _RECORDS:
        yield _RECORDS[reason["records"]]


# --- links, by reason


def _started(_detail: JSON, _source: str, _target: str) -> str:
    return "A new session was started."


def _forked(detail: JSON, source: str, target: str) -> str:
    cli = f"CLI {detail['cli']}" if "cli" in detail else "The CLI"
    return (
        f"{cli} was asked to resume session {source} and answered as a new one, {target}: the conversation goes on "
        "there."
    )


def _rebuilt(detail: JSON, _source: str, _target: str) -> str:
    why = str(detail.get("why", ""))
    lines = f" ({count(detail['records'], 'line')})" if "records" in detail else ""
    if why == "the client's history was imported":
        return f"The client brought a conversation that was new here: a session was written from it{lines}."
    if why == "nobody waits for these results any more":
        return (
            "The CLI process that waited for these tool results was gone: the session was written again from the "
            f"chain{lines}, results and all, and a new process goes on from them."
        )
    found = str(detail.get("found", ""))
    broke = _BEHIND.get(str(detail.get("behind"))) or _FOUND.get(found, "The session was not equal to the chain")
    evidence = f" ({why})" if why and "behind" not in detail else ""
    if detail.get("also_at"):
        evidence += f"; a copy at {', '.join(detail['also_at'])} is not the chain's either"
    kept = f"; what was there is kept at {detail['kept']}" if "kept" in detail else ""
    return f"{broke}{evidence}: it was written again from the chain{lines}{kept}."


def _branched(detail: JSON, source: str, target: str) -> str:
    lines = f" ({count(detail['records'], 'line')})" if "records" in detail else ""
    if detail.get("why") == "nobody waits for these results any more":
        return (
            f"The CLI process that waited for these tool results was gone: session {target} was written from the "
            f"chain{lines}, results and all, and a new process goes on from them."
        )
    where = f", {detail['from_turn']}" if "from_turn" in detail else ""
    return (
        f"This turn continues an earlier one{where}: the path to it was written as a new session, {target}{lines}, and "
        f"session {source} was left as it is."
    )


def _reset(_detail: JSON, source: str, target: str) -> str:
    return f"The CLI left session {source} for a new one, {target} (/clear): the chain goes on as before."


def _moved(detail: JSON, _source: str, _target: str) -> str:
    if "found_at" not in detail:
        return "The session's transcript was not where the CLI looks: it was moved back."
    return (
        f"The session's transcript was not where the CLI looks ({detail.get('looked_for')}): it was found at "
        f"{detail['found_at']} and moved back."
    )


def _adopted(detail: JSON, source: str, target: str) -> str:
    turns = detail.get("turns")
    if "source" in detail:
        files = f" and {count(detail['files'], 'file')} beside it" if detail.get("files") else ""
        notes = "".join(f" {_sentence(note)}" for note in detail.get("notes", ()))
        return (
            f"Session {source} was adopted from {detail['source']}{files}: {count(turns, 'turn')} of it begin this "
            f"chain, which goes on as session {target}.{notes}"
        )
    theirs = f"{count(len(turns), 'turn')} of theirs" if isinstance(turns, list) else "what they said"
    return f"Somebody went on in this session outside the proxy: {theirs} became part of the conversation."


_LINKS: Mapping[LinkReason, Callable[[JSON, str, str], str]] = {
    "started": _started,
    "forked_by_cli": _forked,
    "rebuilt": _rebuilt,
    "branched": _branched,
    "reset_by_cli": _reset,
    "moved": _moved,
    "adopted": _adopted,
}


def _short(session: str | None) -> str:
    return session[:8] if session else "none"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
