"""Turns codes into sentences: what broke at a turn, how it was repaired, and what a dump shows of the evidence.

The engine and the backends store only codes with data (`domain.evidence`); all sentences for people are made here.
Evidence that an older version did not store is not guessed: the sentence is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..domain import times
from ..domain.evidence import NOTHING, OUTPUT_REFUSED, Evidence, NoteCode, RecordsFrom, Repair, RepairCode, StreamCut
from ..domain.models import (
    JSON,
    REPAIR_REASONS,
    Continuity,
    Fallback,
    Link,
    LinkReason,
    Rule,
    Status,
    Turn,
    Usage,
)
from .words import Brief, Kind, count

if TYPE_CHECKING:
    from ..backends.base import LoginKind, Program
    from ..domain.approvals import Approval, Outcome
    from ..engine.live import Doing

NO_SESSION = "none"

# Why an agent needs attention: every turn fails, the last turn failed, the model refuses repeatedly, some turns of
# today failed, the client owes tool results, a turn takes long.
Attention = Literal["stuck", "failed", "refused", "failures", "results", "long"]

# The result of comparing a transcript (`transcript.comparing`) in words.
_FOUND: Mapping[str, str] = {
    "missing": "The session's transcript was gone",
    "unreadable": "The session's transcript could not be read",
    "different": "The session's transcript differed from the chain",
    "tail": "The session's transcript had more records than the chain",
}
# What a transcript had after the path (`Repairs._rebuild`).
_BEHIND: Mapping[str, str] = {
    "ours": "The session's transcript still held records of an attempt that was not kept",
    "theirs": "The session's transcript ended with another person's prompt, which has no complete answer",
    "theirs_behind_ours": (
        "The session's transcript still held records of an attempt that was not kept, and after them another person's "
        "prompt"
    ),
    "made_up": "The session's transcript ended with tool results that a CLI invented after its proxy had ended",
    "broken_line": "The session's transcript ended with a broken line",
    "notes": "The session's transcript ended with records that belong to no prompt",
}
# Changes of a transcript after a CLI had loaded it (`transcript.entries`).
_CHANGED: Mapping[str, str] = {
    "gone": "it was gone",
    "another_file": "it was replaced by another file",
    "content": "its content was changed",
    "records": "records were added",
    "touched": "it was written to or moved, although its content was the same",
}
# How an attempt ended that was followed by another.
_ENDED: Mapping[str, str] = {"failed": "failed ({why})", "cancelled": "was cancelled ({why})"}
# How a turn's records were made, if they were not simply read.
_NOT_READ: Mapping[RecordsFrom, str] = {
    "frames": "The transcript was gone when the turn ended: the turn's records were made from the CLI's frames.",
    "replaced": "The transcript was replaced during the turn: it is verified before the next turn.",
    "unlinked": (
        "The transcript did not continue the conversation when the turn ended: it is verified before the next turn."
    ),
}


def link(reason: LinkReason, detail: JSON, source: str | None, target: str) -> str:
    """One or two sentences on why the session `target` follows `source`. `detail`: the link's."""
    from_id, to_id = source[:8] if source else NO_SESSION, target[:8]
    match reason:
        case "started":
            sentence = "A new session was started."
        case "forked_by_cli":
            cli = f"CLI {detail['cli']}" if "cli" in detail else "The CLI"
            sentence = (
                f"{cli} was asked to resume session {from_id} and answered as a new one, {to_id}: the conversation "
                "continues there."
            )
        case "rebuilt":
            sentence = _rebuilt(detail)
        case "branched":
            sentence = _branched(detail, from_id, to_id)
        case "moved":
            sentence = _moved(detail)
        case "adopted":
            sentence = _adopted(detail, from_id, to_id)
        case _:  # from a newer version
            sentence = "This version does not know this reason."
    settled = " The proxy died during this turn: the next proxy found this in the transcript."
    return sentence + (settled if "settled" in detail else "")


def turn(evidence: Evidence, attempts: Sequence[JSON], links: Sequence[Link] = ()) -> list[Brief]:
    """What happened to a turn, in order, without what its links explain; empty for an ordinary turn."""
    before_the_last = [attempt for attempt in attempts if "n" in attempt][:-1] if len(attempts) > 1 else []
    briefs: list[Brief] = []
    if evidence is NOTHING and not before_the_last:  # nearly all turns of a long chain
        return briefs

    def add(kind: Kind, sentence: str) -> None:
        briefs.append(Brief(kind, sentence))

    if evidence.left_off:
        add("note", f"The answer of {evidence.left_off} never reached its client: that turn was left off.")
    if evidence.sandbox:
        missing = f"(nothing at {evidence.sandbox})"
        add("repair", f"The agent's sandbox directory was missing {missing}: an empty one was made.")
    if evidence.files_at is not None:
        add("note", _NOTES["files_elsewhere"][1].format(evidence.files_at))
    if evidence.repaired is not None:
        # Its link explains it, which is stored with the successful attempt or with a failed one after it.
        is_explained = any(link.reason in REPAIR_REASONS for link in links) or any(
            Repair.from_json(attempt["repaired"]) == evidence.repaired
            for attempt in before_the_last
            if "repaired" in attempt
        )
        if not is_explained:
            add("repair", _repaired(evidence.repaired.as_json()))
    if evidence.recalled is not None:
        commits = evidence.recalled.commits
        add(
            "note",
            f"The model was shown {count(len(commits), 'earlier attempt')} at {evidence.recalled.fix_id}, from commits "
            f"{', '.join(dict.fromkeys(commit[:12] for commit in commits))}.",
        )
    if evidence.exit_code is not None:
        add(
            "repair",
            f"The warm CLI process of this session had ended with exit code {evidence.exit_code}. The transcript was "
            "verified, and a new process resumed the session.",
        )
    if evidence.reloaded:
        times_changed = "" if len(evidence.reloaded) == 1 else f" {len(evidence.reloaded)} times"
        changes = "; ".join(dict.fromkeys(_CHANGED.get(code, code) for code in evidence.reloaded))
        add(
            "repair",
            f"The session's transcript was changed{times_changed} while a CLI was loading it ({changes}). That CLI was "
            "ended before it got the prompt, and a new one loaded the chain's transcript.",
        )
    if evidence.unmet:
        names = ", ".join(evidence.unmet)
        add("note", f"The model or this CLI does not support these parameters of the request: {names}.")
    briefs += _attempts(before_the_last)
    if evidence.retries:
        last = evidence.retries[-1]
        named = [str(part) for part in (last.get("error_status"), last.get("error")) if part and part != "unknown"]
        what = " ".join(named) or "no complete answer"
        times = "" if len(evidence.retries) == 1 else f" {len(evidence.retries)} times"
        add("retry", f"The provider failed{times} ({what}): the request was repeated.")
    if evidence.cuts:
        add("retry", _cuts(evidence.cuts))
    if evidence.refusal is not None:
        add("refusal", f"{evidence.refusal.words} The next turn continues the turn before this one.")
    for sentence in _approvals(evidence.approvals):
        add("note", sentence)
    if evidence.settled:
        add("repair", "The proxy died after the CLI had finished this turn: the answer was read from the transcript.")
    if evidence.cache_miss is not None:
        tokens = "" if evidence.cache_miss.tokens is None else f", about {count(evidence.cache_miss.tokens, 'token')}"
        reason = evidence.cache_miss.reason.replace("_", " ")
        add("note", f"The provider used only part of its prompt cache ({reason}{tokens}).")
    if evidence.compacted:
        add("note", "The CLI compacted the conversation: the model is shown a summary of the earlier part.")
    for note in evidence.notes:  # unknown codes: from a newer version
        if note.code == "outside_window":  # the client asked for it: see `beside`
            continue
        noun, sentence = _NOTES.get(note.code, ("", "This version does not know what else was left out."))
        add("note", sentence.format(count(note.count, noun)))
    if evidence.records is not None and evidence.records in _NOT_READ:
        add("repair", _NOT_READ[evidence.records])
    return briefs


def context(turns: int, missing: int, summarised: int, usage: Usage, *, extends: bool | None) -> str:
    """How much of its path a turn's request had, in one line."""
    sent = f"{turns - missing - summarised} of {count(turns, 'turn')} {'was' if turns == 1 else 'were'} sent"
    if summarised:
        sent += f", {summarised} as a summary"
    line = f"nothing forgotten: {sent}" if not missing else f"forgotten: {missing} of {count(turns, 'turn')} not sent"
    if usage.cache_share is not None:
        line += f"; {100 * usage.cache_read_tokens // usage.prompt_tokens} % of it was read from the cache"
    if extends is False:
        line += "; this request does not begin with the one before it"
    return line


def cache_in_words(usage: Usage) -> str:
    """The use of the provider's prompt cache in a few words; "" if there was no prompt."""
    if usage.cache_share is None:
        return ""
    read, written = usage.cache_read_tokens, usage.cache_write_tokens
    return f"cache {read:,} read, {written:,} written ({100 * read // usage.prompt_tokens} % of the prompt read)"


def placed(turn: Turn) -> list[str]:
    """Why the turn continues its parent, and how its session was obtained, in sentences; `reason` has the codes."""
    where, evidence = turn.placed, turn.evidence
    sentences = []
    if where.rule is not None and where.rule in _RULES:
        sentences.append(_RULES[where.rule])
    if where.messages is not None and where.delta:
        sentences.append(f"The client sent only what was new ({count(where.messages, 'message')}).")
    elif where.messages is not None:
        known = f", of which {where.matched} were known" if where.matched else ""
        brought = f", {where.imported} were taken into the chain" if where.imported else ""
        sentences.append(f"The client sent {count(where.messages, 'message')}{known}{brought}.")
    if where.diverged_at is not None:
        sentences.append(f"They leave the agent's path after message {where.diverged_at}.")
    if where.side:
        sentences.append("It looks like a side call (a title, a tag, a ping): it ran separately from the conversation.")
    if turn.continuity is not None and turn.continuity in _CONTINUITY:  # an imported file may have any other word
        written = None if evidence.written is None else evidence.written.code
        sentences.append(_SHARED if evidence.shared else _INSTEAD.get(written, _CONTINUITY[turn.continuity]))
    if evidence.verified:
        sentences.append("The transcript was compared with the chain before it was used.")
    return sentences


_RULES: Mapping[Rule, str] = {
    "id": "The client named the turn to continue.",
    "fresh": "The client asked for a new start (X-Chain: new).",
    "head": "The client named the agent: this turn continues its last answer.",
    "new": "This turn begins the conversation.",
    "history": "This turn continues the last turn that matches the client's history.",
    "unknown": "The client's history matches no chain: this turn begins a new conversation.",
    "adopted": "A person used the session outside the proxy, and the chain took the turn in.",
}
_CONTINUITY: Mapping[Continuity, str] = {
    "started": "It ran in a new session.",
    "warm": "The warm process of the turn before answered.",
    "resumed": "A new process read the session's transcript.",
    "rebuilt": "The session was written again from the chain, and a new process read it.",
    "branched": "The path was written as a new session, and a new process read it.",
}
_INSTEAD: Mapping[RepairCode | None, str] = {
    "taken_back": "The warm process was rewound to the turn before, and answered.",
    "first_written": "The first turn ran in a shared process: the session was written now, and a process read it.",
}
_SHARED = "It ran in a shared process, which answers single questions and forgets each."


def program(known: Program) -> str:
    """The CLI's version, and the result of its self-check."""
    cli = f"Claude CLI {known.version}"
    passed = sum(check.outcome == "ok" for check in known.observed)
    failures = [check.name for check in known.observed if check.outcome == "failed" and check.surprising]
    failed = f" failed its self-check ({', '.join(failures)})"
    if known.runs != known.version:
        return f"{cli}{failed if failures else ' is being checked'}: turns go on with {known.runs}"
    if not known.observed:
        return f"{cli}, not checked yet"
    summary = f"{passed} of {len(known.observed)} checks passed"
    return f"{cli}{failed}; {summary}" if failures else f"{cli}, {summary}"


def login(kind: LoginKind) -> str | None:
    """How the program is logged in, in a few words; None if unknown."""
    return {
        "subscription": "logged in with a subscription",
        "by use": "logged in, billed by use",
        "none": "not logged in",
    }.get(kind)


def attention(code: Attention, detail: JSON) -> str:
    """Why an agent needs attention, in a few words."""
    match code:
        case "stuck":
            return f"its last {detail['turns']} turns failed: {failed(detail['why'])}"
        case "failed":
            return f"its last turn failed: {failed(detail['why'])}"
        case "refused":
            return f"the model refused its last {detail['turns']} turns: rewind the agent, or ask for something else"
        case "failures":
            return f"{count(detail['turns'], 'turn')} failed within a day, but not the last: {failed(detail['why'])}"
        case "results":
            return "waits for tool results from its client"
    return "its turn takes unusually long"


def failed(code: str | None) -> str:
    """Why a turn failed, in a few words."""
    return _FAILED.get(code or "", (code or "unknown reason").replace("_", " "))


def why(error: JSON) -> str:
    """The message of a turn's error. Without one: what its code means."""
    return str(error.get("message") or failed(error.get("code")))


# By the error's code (`errors`).
_FAILED: Mapping[str, str] = {
    "invalid_request": "the request was refused",
    "context_too_long": "the conversation is too long for the model",
    "claude_not_logged_in": "the CLI is not logged in",
    "session_busy": "another program was writing its session",
    "request_too_large": "the request was too large",
    "queue_full": "too many turns were waiting",
    "rate_limited": "the provider's limit was reached",
    "budget_exceeded": "the budget was used up",
    "turn_cancelled": "it was cancelled",
    "upstream_error": "the provider or the CLI failed",
    "claude_unavailable": "the CLI could not be run",
    "store_unavailable": "the store could not be written",
    "interrupted": "the proxy stopped during the turn",
    "lease_lost": "another proxy took the agent over",
    "turn_timeout": "no answer came in time",
    "overloaded": "the provider was overloaded",
    "sandbox_error": "the agent's folder could not be made",
    "config_error": "a setting is wrong",
    "damaged_row": "its row in the store cannot be read",
}


def doing(what: Doing, detail: JSON) -> str:
    """What a running turn does, or waits for, in a few words."""
    match what:
        case "slot":
            return f"waits for a free slot: {detail.get('slots')} turns are running"
        case "approval":
            return f"waits for a person's approval: may {detail.get('name') or 'a tool'} run?"
        case "tool":
            return f"runs {detail.get('name') or 'a tool'}"
        case "retry":  # of the request to the provider, with the fields that the backend reported
            delay, attempt, most = (detail.get(name) for name in ("retry_delay_ms", "attempt", "max_retries"))
            status, error = detail.get("error_status"), detail.get("error")
            sentence = "the request is repeated"
            if isinstance(delay, int | float):
                asks = "asks to wait" if status in (429, 529) else "failed: the request is repeated in"
                sentence = f"the provider {asks} {delay / 1000:.3g} s"
            if attempt is not None:
                sentence += f", retry {attempt}" + (f" of {most}" if most is not None else "")
            why = " ".join(str(part) for part in (status, error) if part and part != "unknown")
            return f"{sentence} ({why})" if why else sentence
        case "limit":
            return f"waits for the end of the provider's limit, until {times.written(detail['until'])}"
    return _DOING[what]


def elsewhere(status: Status, host: str | None) -> str:
    """The same for a turn in another proxy, of which only the status is known. `host` None: it does not respond."""
    what = "runs" if status == "running" else "waits"
    return f"{what} on {host}" if host is not None else f"{what} at a proxy that does not respond"


_DOING: Mapping[Doing, str] = {
    "lane": "waits for an earlier turn",
    "lease": "waits for another proxy to hand the agent over",
    "preparing": "prepares the session",
    "thinking": "waits for the model's first words",
    "answering": "answers",
    "storing": "stores the answer",
}


def _attempts(attempts: Sequence[JSON]) -> Iterator[Brief]:
    """Attempts that were followed by others. They are counted here, because each run numbers its attempts from 1."""
    for number, attempt in enumerate(attempts, 1):
        if "repaired" in attempt:
            yield Brief("repair", _repaired(attempt["repaired"]))
        why = str(attempt.get("why") or attempt.get("code") or "unknown reason")
        if attempt.get("code") == OUTPUT_REFUSED:
            why = f"its answer did not fit the requested JSON ({why})"
        ended = _ENDED.get(str(attempt.get("status")), "was answered, but that could not be stored").format(why=why)
        if attempt.get("asked") is False:
            went_on = f" before the prompt was sent; attempt {number + 1} sent it."
        else:
            went_on = f"; attempt {number + 1} sent the prompt again, in a clean session."
        yield Brief("retry", f"Attempt {number} {ended}{went_on}")


def _approvals(asked: Sequence[Approval]) -> Iterator[str]:
    """One sentence per request; of many only the last ones."""
    left_out = len(asked) - MOST_APPROVALS
    if left_out > 0:
        yield f"{count(left_out, 'earlier request')} for a person's approval."
    for one in asked[-MOST_APPROVALS:]:
        sentence = f"{one.tool} ({one.asked}) waited for approval: {_OUTCOMES.get(one.outcome, _NOT_KNOWN)}"
        sentence += f" by {one.by}" if one.by is not None else ""
        yield f"{sentence}, who said: {one.word}" if one.by is not None and one.word else f"{sentence}."


MOST_APPROVALS = 10
_NOT_KNOWN = "this version does not know the outcome"
_OUTCOMES: Mapping[Outcome | None, str] = {
    None: "nobody has answered",
    "allowed": "it was allowed once",
    "allowed_for_turn": "it was allowed for the turn",
    "denied": "it was refused",
    "timed_out": "nobody answered in time, and it was refused",
    "withdrawn": "the answer was no longer needed, and it was not run",
}


def _repaired(detail: JSON) -> str:
    return _moved(detail) if "found_at" in detail else _rebuilt(detail)


def _cuts(cuts: Sequence[StreamCut]) -> str:
    times = "" if len(cuts) == 1 else f" {len(cuts)} times"
    sentences = f"The provider's stream was cut{times}, and the CLI asked for the rest."
    shown_text = sum(cut.text for cut in cuts)
    thinking = sum(cut.thinking for cut in cuts)
    if shown_text:
        sentences += (
            f" A client had received {count(shown_text, 'character')} of an unfinished text: they are part of the "
            "answer, and later requests show them to the model."
        )
    if thinking:
        sentences += (
            f" A client had received {count(thinking, 'character')} of unfinished thinking: they are part of the "
            "answer, but are not shown to the model again."
        )
    if not shown_text and not thinking:
        sentences += " No client had received any of the unfinished text: it was dropped."
    return sentences


# Differences between messages and what the model was shown (`domain.evidence`), by code; {0} is a count with its noun.
_NOTES: Mapping[NoteCode, tuple[str, str]] = {
    "system_prompt_in_newest_turn": (
        "",
        "The system prompt had new values: they were sent with the prompt, and the beginning of the request did not "
        "change.",
    ),
    "system_prompt_replaced": ("", "The system prompt had changed: the request begins with the new one."),
    "thinking_left_out": (
        "thought",
        "The provider would have refused {0} of earlier answers, because the text before them had changed: left out of "
        "the request, kept in the chain.",
    ),
    "cut_thinking_left_out": (
        "thought",
        "The provider would refuse {0} of this answer in later requests, because its stream was cut there: left out of "
        "those, kept in the chain.",
    ),
    "images_left_out": ("image", "The provider refused the request: it was sent without {0} of earlier turns."),
    "documents_left_out": ("document", "The provider refused the request: it was sent without {0} of earlier turns."),
    "calls_left_out": (
        "part",
        "The provider refused the request because of tools' calls: it was sent without {0} of earlier calls. The words "
        "of their results stay.",
    ),
    "summarised": (
        "exchange",
        "The conversation was too long for one request: the model is shown a summary of its first {0}.",
    ),
    "not_summarised": (
        "exchange",
        "{0} before those could not be summarised: the model is not shown them.",
    ),
    "cli_left_out_thinking": (
        "thought",
        "The provider refused the request, and the CLI asked again without {0} of earlier answers: they are kept in "
        "the chain, but are no longer shown to the model.",
    ),
    "other_models_thinking": (
        "thought",
        "The model had changed: the request was sent without {0} of the other model.",
    ),
    "cli_left_out_images": ("image", "The provider refused the request, and the CLI asked again without {0}."),
    "cli_left_out_documents": ("document", "The provider refused the request, and the CLI asked again without {0}."),
    "cli_left_out_tool_results": ("time", "The CLI shortened results of tools by itself, {0}."),
    "files_elsewhere": (
        "",
        "The agent's files are on {0}, which could not be reached. Its tools saw the files of this host, and write "
        "here from now on.",
    ),
    "said_beside": (
        "prompt",
        "While this turn ran, a person sent {0} in its session. That is not part of this conversation. The next turn "
        "that reads the session's file keeps a copy in <var>/salvage.",
    ),
    "session_not_written": (
        "",
        "The CLI said at its end that it could not write the whole transcript (the log has its reason; the disk may "
        "have been full). The transcript was compared with the chain, and written again if it was not complete.",
    ),
    "cli_changed_images": ("image", "The CLI made {0} of the prompt smaller before the model saw it."),
    "foreign_thinking_left_out": (
        "thought",
        "{0} in the client's history: left out, because the signature cannot be checked.",
    ),
    "ids_rewritten": ("id", "The provider would have refused {0} of tool calls in the client's history: replaced."),
    "calls_without_result": ("call", "{0} in the client's history had no result: one was added that says so."),
    "results_without_call": ("result", "{0} in the client's history had no call: shown as text."),
    "empty_messages": ("message", "{0} in the client's history was empty: marked as such."),
    "characters_replaced": ("half character", "{0} in the client's history: replaced."),
    "arguments_kept_as_text": ("call", "The arguments of {0} in the client's history were not JSON: kept as text."),
    "images_made_smaller": (
        "image",
        "{0} of the prompt or the history would have been too large: made smaller for the model.",
    ),
    "unreadable_images_left_out": (
        "image",
        "{0} of the prompt or the history could not be read: the model gets a line that says why.",
    ),
    "model_takes_no_images": (
        "image",
        "The model takes no images: it gets a line in place of {0}, kept in the chain.",
    ),
    "model_takes_no_documents": (
        "document",
        "The model does not take {0}: it gets a line instead, and the chain keeps the document.",
    ),
    "outside_window": (
        "turn",
        "The request shows a window of the conversation, without its first {0}, which the chain keeps.",
    ),
    "unreadable_documents_left_out": (
        "document",
        "{0} of the prompt or the history could not be read: the model gets a line that says why.",
    ),
}


def beside(evidence: Evidence, fallback: Fallback | None) -> Iterator[Brief]:
    """Remarks on a turn without problems: which model answered instead, and what the model was not shown."""
    if fallback is not None and fallback.here:
        until = times.written(fallback.until)
        yield Brief(
            "fallback",
            f"{fallback.asked} could not answer ({failed(fallback.why)}): {fallback.model} did. {fallback.asked} is "
            f"asked again from {until} on.",
        )
    if evidence.written is not None and evidence.written.code == "other_model":
        yield Brief(
            "note", "Another model had answered since the session was last used: its turns were added to the session."
        )
    for note in evidence.notes:
        if note.code == "outside_window":
            noun, sentence = _NOTES[note.code]
            yield Brief("note", sentence.format(count(note.count, noun)))
    if evidence.window_summary is not None:
        summary = evidence.window_summary
        yield Brief("note", f"The model was shown its own summary of them instead: {summary}")


def _rebuilt(detail: JSON) -> str:
    lines = f" ({count(detail['records'], 'line')})" if "records" in detail else ""
    if detail.get("code") == "client_history":
        return f"The client sent a history that no chain has: a session was written from it{lines}."
    backup = f"; the old file is kept at {detail['kept']}" if "kept" in detail else ""
    if detail.get("code") == "left_out":
        return f"The provider refused a part of the conversation: the session was written without it{lines}."
    if detail.get("code") == "open_calls":
        return (
            "The CLI process that waited for these tool results was gone. The session was written again from the "
            f"chain{lines}, with the results, and a new process continued from them{backup}."
        )
    comparison = str(detail.get("found", ""))
    cause = _BEHIND.get(str(detail.get("behind"))) or _FOUND.get(comparison, "The session was not equal to the chain")
    evidence = f" ({detail['note']})" if detail.get("note") and "behind" not in detail else ""
    if detail.get("also_at"):
        evidence += f"; a copy at {', '.join(detail['also_at'])} differs, too"
    return f"{cause}{evidence}: it was written again from the chain{lines}{backup}."


def _branched(detail: JSON, source: str, target: str) -> str:
    lines = f" ({count(detail['records'], 'line')})" if "records" in detail else ""
    if detail.get("code") == "open_calls":
        return (
            f"The CLI process that waited for these tool results was gone. Session {target} was written from the "
            f"chain{lines}, with the results, and a new process continued from them."
        )
    where = f", {detail['from_turn']}" if "from_turn" in detail else ""
    if detail.get("code") == "taken_back":
        before = f"an earlier one{where}" if where else "no turn, like the first one"
        turns = f", without the {count(detail['turns'], 'turn')} after it" if "turns" in detail else ""
        return f"This turn continues {before}: the warm process was rewound to there{turns}. The session is the same."
    left = "" if source == NO_SESSION else f"; session {source} did not change"
    made = f"written as a new session, {target}{lines}"
    return f"This turn continues an earlier one{where}: the path to it was {made}{left}."


def _moved(detail: JSON) -> str:
    if "found_at" not in detail:
        return "The session's transcript was not where the CLI looks: it was moved back."
    return (
        f"The session's transcript was not where the CLI looks ({detail.get('looked_for')}): it was found at "
        f"{detail['found_at']} and moved back."
    )


def _adopted(detail: JSON, source: str, target: str) -> str:
    turns = detail.get("turns")
    if "source" not in detail:
        adopted = count(len(turns), "turn") if isinstance(turns, list) else "their turns"
        return f"A person continued this session outside the proxy: {adopted} became part of the conversation."
    files = f" and {count(detail['files'], 'file')} beside it" if detail.get("files") else ""
    notes = "".join(f" {note[:1].upper()}{note[1:]}." for note in detail.get("notes", ()))
    return (
        f"Session {source} was adopted from {detail['source']}{files}: its {count(turns, 'turn')} begin this "
        f"chain, which continues as session {target}.{notes}"
    )
