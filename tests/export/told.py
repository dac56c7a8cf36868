"""A chain that carries every kind of repair, with the evidence that the engine leaves, and what a person reads of it.

The same evidence from the real CLI is in tests/continuity, each row with the words that must come of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cli_session_proxy.domain.evidence import Evidence, Note, Repair, StreamCut
from cli_session_proxy.domain.models import JSON, Link, LinkReason, Turn

from ..fakes import SESSION, turn

OLDER = "aaaaaaaa-0000-4000-8000-000000000001"
ANOTHER = "5e550000-0000-4000-8000-000000000000"
ELSEWHERE = "99999999-0000-4000-8000-000000000009"
PATH = "/c/projects/-v-sandbox-agents-a/s1.jsonl"
KEPT = "/v/salvage/s1-1.jsonl"
DONE: JSON = {"code": "rewritten", "records": 22}
WRITTEN = "it was written again from the chain (22 lines)"
CHANGED = "The session's transcript differed from the chain"


@dataclass(frozen=True)
class Case:
    """One turn: its link, where it has one, or what its own fields hold, and the sentence that tells it."""

    name: str
    says: str
    reason: LinkReason | None = None
    detail: JSON = field(default_factory=dict)
    source: str | None = SESSION
    fields: dict[str, Any] = field(default_factory=dict)
    kind: str = "repaired"  # how a dump begins the sentence

    @property
    def is_repair(self) -> bool:
        return self.kind == "repaired"


def rebuilt(found: str, note: str, **more: Any) -> dict[str, Any]:
    return {"reason": "rebuilt", "detail": {"found": found, "note": note, **more, **DONE}}


def attempts(why: str, **more: str) -> tuple[JSON, ...]:
    first = {"n": 1, "session_id": SESSION, "frame_uuid": "f1", "status": "failed", "why": why, **more}
    return (first, {"n": 2, "session_id": SESSION, "frame_uuid": "f2", "status": "completed"})


CASES = (
    Case("started", "A new session was started.", "started", source=None, kind="link"),
    Case(
        "gone", f"The session's transcript was gone (no transcript at {PATH}): {WRITTEN}.",
        **rebuilt("missing", f"no transcript at {PATH}"),
    ),
    Case(
        "gone, with a wrong copy",
        f"The session's transcript was gone (no transcript at {PATH}); a copy at /c/projects/old/s1.jsonl differs,"
        f" too: {WRITTEN}.",
        **rebuilt("missing", f"no transcript at {PATH}", also_at=["/c/projects/old/s1.jsonl"]),
    ),
    Case(
        "changed",
        f"{CHANGED} (9 records instead of 10): {WRITTEN}; the old file is kept at {KEPT}.",
        **rebuilt("different", "9 records instead of 10", kept=KEPT),
    ),
    Case(
        "unreadable",
        f"The session's transcript could not be read ({PATH}: Is a directory): {WRITTEN}; the old file is kept at "
        f"{KEPT}.",
        **rebuilt("unreadable", f"{PATH}: Is a directory", kept=KEPT),
    ),
    Case(
        "a failed attempt's prompt",
        f"The session's transcript still held records of an attempt that was not kept: {WRITTEN}.",
        **rebuilt("tail", "all 10 records are the chain's; 2 unknown records follow", behind="ours"),
    ),
    Case(
        "somebody's open prompt",
        f"The session's transcript ended with another person's prompt, which has no complete answer: {WRITTEN}; "
        f"the old file is kept at {KEPT}.",
        **rebuilt("tail", "all 10 records are the chain's; 1 unknown record follows", behind="theirs", kept=KEPT),
    ),
    Case(
        "somebody's words behind a failed attempt",
        "The session's transcript still held records of an attempt that was not kept, and after them another "
        f"person's prompt: {WRITTEN}; the old file is kept at {KEPT}.",
        **rebuilt("tail", "what the last turn left is unchanged; 4 unknown records follow", behind="theirs_behind_ours",
                  kept=KEPT),
    ),
    Case(
        "a broken line", f"The session's transcript ended with a broken line: {WRITTEN}.",
        **rebuilt("tail", "what the last turn left is unchanged; 0 unknown records follow", behind="broken_line"),
    ),
    Case(
        "results that a CLI made up",
        "The session's transcript ended with tool results that a CLI invented after its proxy had ended: "
        f"{WRITTEN}.",
        **rebuilt("tail", "what the last turn left is unchanged; 3 unknown records follow", behind="made_up"),
    ),
    Case(
        "as older versions noted it",
        f"The session's transcript had more records than the chain (1 unknown records follow): {WRITTEN}.",
        **rebuilt("tail", "1 unknown records follow"),
    ),
    Case(
        "a client's history",
        "The client sent a history that no chain has: a session was written from it (6 lines).",
        "rebuilt", {"code": "client_history", "records": 6}, None,
    ),
    Case(
        "results that nobody waits for",
        "The CLI process that waited for these tool results was gone. The session was written again from the "
        "chain (9 lines), with the results, and a new process continued from them.",
        "rebuilt", {"code": "open_calls", "records": 9},
    ),
    Case(
        "results that nobody waits for, and somebody went on meanwhile",
        "The CLI process that waited for these tool results was gone. The session was written again from the "
        "chain (9 lines), with the results, and a new process continued from them; the old file is kept at "
        f"{KEPT}.",
        "rebuilt", {"code": "open_calls", "records": 9, "kept": KEPT},
    ),
    Case(
        "after a crash",
        f"The session's transcript was gone (no transcript at {PATH}): {WRITTEN}. The proxy died during this turn:"
        " the next proxy found this in the transcript.",
        "rebuilt", {"found": "missing", "note": f"no transcript at {PATH}", **DONE, "settled": True},
    ),
    Case(
        "moved",
        f"The session's transcript was not where the CLI looks ({PATH}): it was found at /c/projects/old/s1.jsonl and "
        "moved back.",
        "moved", {"looked_for": PATH, "found_at": "/c/projects/old/s1.jsonl", "code": "moved"},
    ),
    Case(
        "adopted by hand",
        "A person continued this session outside the proxy: 2 turns became part of the conversation.",
        "adopted", {"note": "9 unknown records follow", "turns": ["turn_13", "turn_14"]},
        fields={"origin": "adopted", "continuity": None},
        kind="adopted",
    ),
    Case(
        "adopted whole",
        "Session 99999999 was adopted from /home/x/e.jsonl and 3 files beside it: its 40 turns begin this chain, "
        "which continues as session 5e551011. 2 lines are not JSON and were left out.",
        "adopted",
        {"source": "/home/x/e.jsonl", "turns": 40, "records": 99, "files": 3,
         "notes": ["2 lines are not JSON and were left out"]},
        ELSEWHERE,
        {"origin": "adopted", "continuity": None},
        kind="adopted",
    ),
    Case(
        "another id",
        "CLI 1.0.120 was asked to resume session aaaaaaaa and answered as a new one, 5e551011: the conversation "
        "continues there.",
        "forked_by_cli", {"asked": OLDER, "answered": SESSION, "cli": "1.0.120"}, OLDER,
        kind="link",
    ),
    Case(
        "a branch",
        "This turn continues an earlier one, turn_2: the path to it was written as a new session, 5e551011 (8 "
        "lines); session 5e550000 did not change.",
        "branched", {"code": "left_path", "from_turn": "turn_2", "records": 8}, ANOTHER,
        kind="link",
    ),
    Case(
        "a branch, settled after a crash",
        "This turn continues an earlier one, turn_2: the path to it was written as a new session, 5e551011 (8 "
        "lines). The proxy died during this turn: the next proxy found this in the transcript.",
        "branched", {"from_turn": "turn_2", "records": 8, "settled": True}, None,
        kind="link",
    ),
    Case(
        "a process that was killed",
        "Attempt 1 failed (it ended with exit code -9 before the result); attempt 2 sent the prompt again, in a "
        "clean session.",
        fields={"attempts": attempts("it ended with exit code -9 before the result")},
        kind="retried",
    ),
    Case(
        "a process that was killed before it was asked",
        "Attempt 1 failed (it ended with exit code -9 before the result) before the prompt was sent; attempt 2 "
        "sent it.",
        fields={"attempts": ({"n": 1, "asked": False, "status": "failed",
                              "why": "it ended with exit code -9 before the result"}, {"n": 2, "status": "completed"})},
        kind="retried",
    ),
    Case(
        "a transcript that was swapped under a CLI that loaded it",
        "The session's transcript was changed 2 times while a CLI was loading it (it was replaced by another "
        "file; its content was changed). That CLI was ended before it got the prompt, and a new one loaded the "
        "chain's transcript.",
        fields={"evidence": Evidence(reloaded=("another_file", "content"))},
    ),
    Case(
        "an attempt that was interrupted",
        "Attempt 1 was cancelled (interrupted); attempt 2 sent the prompt again, in a clean session.",
        fields={"attempts": ({"n": 1, "status": "cancelled", "code": "interrupted"}, {"n": 1, "status": "completed"})},
        kind="retried",
    ),
    Case(
        "an answer that could not be kept",
        "Attempt 1 was answered, but that could not be stored; attempt 2 sent the prompt again, in a clean "
        "session.",
        fields={"attempts": ({"n": 1, "status": "completed"}, {"status": "failed", "code": "store_unavailable"},
                             {"n": 1, "status": "completed"})},
        kind="retried",
    ),
    Case(
        "an answer of the wrong shape",
        "Attempt 1 failed (its answer did not fit the requested JSON ('a' is missing)); attempt 2 sent the prompt"
        " again, in a clean session.",
        fields={"attempts": attempts("'a' is missing", code="output_refused")},
        kind="retried",
    ),
    Case(
        "a process that ended while idle",
        "The warm CLI process of this session had ended with exit code -9. The transcript was verified, and a new"
        " process resumed the session.",
        fields={"continuity": "resumed", "evidence": Evidence(exit_code=-9)},
    ),
    Case(
        "a sandbox that was gone",
        "The agent's sandbox directory was missing (nothing at /v/sandbox/agents/a): an empty one was made.",
        fields={"evidence": Evidence(sandbox="/v/sandbox/agents/a")},
    ),
    Case(
        "a provider that failed",
        "The provider failed 2 times (529 overloaded): the request was repeated.",
        fields={"evidence": Evidence(retries=({"error_status": None}, {"error_status": 529, "error": "overloaded"}))},
        kind="retried",
    ),
    Case(
        "a stream that was cut before any client had its words",
        "The provider's stream was cut, and the CLI asked for the rest. No client had received any of the "
        "unfinished text: it was dropped.",
        fields={"evidence": Evidence(cuts=(StreamCut(),))},
        kind="retried",
    ),
    Case(
        "a stream that was cut twice",
        "The provider's stream was cut 2 times, and the CLI asked for the rest. A client had received 24 "
        "characters of an unfinished text: they are part of the answer, and later requests show them to the "
        "model. A client had received 8 characters of unfinished thinking: they are part of the answer, but are "
        "not shown to the model again.",
        fields={"evidence": Evidence(cuts=(StreamCut(thinking=8), StreamCut(text=24)))},
        kind="retried",
    ),
    Case(
        "a proxy that died",
        "The proxy died after the CLI had finished this turn: the answer was read from the transcript.",
        fields={"evidence": Evidence(settled=True)},
    ),
    Case(
        "an answer that never arrived",
        "The answer of turn_4 never reached its client: that turn was left off.",
        fields={"evidence": Evidence(left_off="turn_4")},
        kind="note",
    ),
    Case(
        "a compaction",
        "The CLI compacted the conversation: the model is shown a summary of the earlier part.",
        fields={"evidence": Evidence(compacted={"trigger": "auto"})},
        kind="note",
    ),
    Case(
        "a transcript lost during the turn",
        "The transcript was gone when the turn ended: the turn's records were made from the CLI's frames.",
        fields={"evidence": Evidence(records="frames")},
    ),
    Case(
        "what the API would not take",
        "The provider refused a part of the conversation: the session was written without it (22 lines).",
        reason="rebuilt", detail={"code": "left_out", "records": 22},
    ),
    Case(
        "a new system prompt",
        "The system prompt had changed: the request begins with the new one.",
        fields={"evidence": Evidence(notes=(Note("system_prompt_replaced"),))},
        kind="note",
    ),
    Case(
        "what it cost",
        "The provider would have refused 2 thoughts of earlier answers, because the text before them had changed:"
        " left out of the request, kept in the chain.",
        fields={"evidence": Evidence(notes=(Note("thinking_left_out", 2),))},
        kind="note",
    ),
    Case(
        "mended, but then it failed", f"The session's transcript was gone (no transcript at {PATH}): {WRITTEN}.",
        fields={
            "status": "failed", "error": {"code": "upstream_error", "message": "no answer"},
            "evidence": Evidence(repaired=Repair("rewritten", 22, found="missing", note=f"no transcript at {PATH}")),
        },
    ),
)  # fmt: skip


def every_repair() -> tuple[list[Turn], list[Link]]:
    """A turn for each case, one after another, named `turn_1` and so on."""
    rows, links = [], []
    for number, case in enumerate(CASES, 1):
        rows.append(replace(turn(number), **case.fields))
        if case.reason is not None:
            links.append(Link(case.source, SESSION, f"turn_{number}", case.reason, case.detail, float(number)))
    return rows, links
