"""Makes records that the CLI did not write so: results of the client's tools, cut answers, partial texts. Pure.

**A path that ends with calls of the client's tools** is written for a CLI that continues from their results. That is
needed if no process waits for the results: it was killed or retired, the proxy was restarted, or the path is another
one. Run on 2.1.329 (messages as they reached the model, prefix 1.00, at the turn itself and after it):

- Every call in the records gets a result: the client's, or "no result".
- A CLI that loads a transcript ending with a user message adds the answer "No response requested.". An API error record
  also counts as an answer, but is never sent: so the path ends with one, the closing record. Only the request for a
  summary, at a compaction, includes it (2.1.332): so its text claims nothing.
- A CLI that compacts first keeps only the closing record of the turn, and the request ends with its text (2.1.332). So
  compaction is off in such a turn; if the context is full, the path is summarised without the last calls.
- A user frame with `content: []` then makes the model go on. It adds nothing to the request, and leaves no record, but
  the answer gets the frame's uuid as parent: so the closing record has that uuid.

**An answer that was cut** at a stop sequence or at the token limit is stored cut. A CLI that does not know the
sequences records more, and every CLI asks the model to go on after the token limit. So the records are shortened (run
on 2.1.329: the model then sees the short answer, and the prefix of the prompt cache holds).

**A stream that the provider cut** leaves a partial text, which a client may have received. The CLI asks again and keeps
nothing of an unfinished block. From the next turn on the model is shown that text, at its place among the texts of the
answer, but after the thinking before the next text: the signature of that thinking does not cover the added text. Cut
thinking has no signature, so the records never have it. Thinking that was finished before the cut stays in the chain.
If a CLI would send it before the next attempt's thinking, one of them is invalid, and is marked as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ....domain.client_tools import NOT_ANSWERED, calls_of
from ....domain.models import THINKING, Block, Message, Record, Turn
from .. import transcript
from ..process.turn_reader import SYNTHETIC_MODEL
from ..transcript import Entry, Scribe, mending
from .exchanges import is_interruption

CLOSING = "(continued)"


# --- results of the client's tools


def result_records(
    known: Sequence[Record],
    parent: Turn,
    results: Mapping[str, Block],
    scribe: Scribe,
    *,
    closed: bool,
    uuid: str | None,
) -> list[Record]:
    """The records after the path's: a result for each open call and, if `closed`, the closing record.

    CLI 1.0.120 sends the closing record to the model: there it is left out, and every turn needs a prompt.
    """
    path = transcript.parse_records(record for record in known if record.uuid).path
    open_ids = open_calls(path)
    recorded_ids = ids_in_records(parent, open_ids)
    by_recorded_id = {recorded_ids[call]: block for call, block in results.items() if call in recorded_ids}
    scribe.parent = path[-1].uuid if path else None
    out = []
    for call in open_ids:
        missing: Block = {"type": "tool_result", "tool_use_id": call, "content": NOT_ANSWERED, "is_error": True}
        result = {**by_recorded_id.get(call, missing), "tool_use_id": call}
        out.append(scribe.record(Message("user", (result,)), parent.model))
    if not open_ids:  # the calls are left out: the words of their results stay
        out += [scribe.record(Message("user", mending.without_call(block)), parent.model) for block in results.values()]
    return [*out, closing_record(scribe, uuid)] if closed else out


def closing_record(scribe: Scribe, record_uuid: str | None = None) -> Record:
    """An answer that the model never sees."""
    text: Block = {"type": "text", "text": CLOSING}
    record = scribe.record(Message("assistant", (text,)), SYNTHETIC_MODEL, record_uuid=record_uuid)
    line = json.dumps({**json.loads(record.line), "isApiErrorMessage": True}, separators=(",", ":"))
    return Record(line, record.uuid, synthetic=True)


def open_calls(path: Iterable[Entry]) -> list[str]:
    """The ids of calls without a result. In chains before 0.2 an id may occur twice: the newest call counts."""
    found: dict[str, None] = {}
    for block in (block for entry in path for block in entry.content):
        if block.get("type") == "tool_use":
            found[str(block.get("id"))] = None
        elif block.get("type") == "tool_result":
            found.pop(str(block.get("tool_use_id")), None)
    return list(found)


def ids_in_records(parent: Turn, open_ids: Sequence[str]) -> dict[str, str]:
    """The id in the records of each call of this turn. In chains before 0.2 those of an imported turn may differ."""
    calls = calls_of(parent.output)
    return dict(zip(calls, calls if set(calls) <= set(open_ids) else open_ids, strict=False))


# --- answers that were cut at a stop sequence or at the token limit


def cut_answer(
    entries: Sequence[Entry],
    output: Sequence[Block],
    scribe: Scribe,
    model: str,
    *,
    unseen: bool,
    no_prompt: bool = False,
) -> list[Record]:
    """The turn's records up to the end of the answer: whole ones, then one with the last text.

    `output`: the cut answer; only its last text may be shortened. `unseen`: the CLI accepts an answer that the model
    never sees, for an empty answer. `no_prompt`: the records have no prompt; else records before the prompt are no part
    of the answer.
    """
    ends_with_text = bool(output) and output[-1].get("type") == "text"
    whole = len(output) - ends_with_text
    prompts = (at for at, entry in enumerate(entries) if entry.in_conversation and entry.kind == "user")
    start = 0 if no_prompt else next(prompts, 0)
    shortened: list[Entry] = list(entries[:start])
    full = False
    for at, entry in enumerate(entries[start:]):
        interrupted = is_interruption(entry) and (no_prompt or at > 0)
        if entry.in_conversation and entry.kind == "user" and (full or interrupted):
            break  # the CLI's own messages: "go on", or "interrupted"
        if entry.in_conversation and entry.kind == "assistant":
            full = entry.data.get("message", {}).get("stop_reason") == "max_tokens"
            blocks = [block for block in entry.content if block.get("type") != "tool_use"]
            if blocks and len(blocks) > whole:
                break
            whole -= len(blocks)
            model = str(entry.data.get("message", {}).get("model") or model)
        shortened.append(entry)
    # A call without a result was cut, too: end before it.
    blocks = [block for entry in transcript.conversation_of(shortened) for block in entry.content]
    answered = {block.get("tool_use_id") for block in blocks if block.get("type") == "tool_result"}
    for at, entry in enumerate(shortened):
        calls = {block.get("id") for block in entry.content if block.get("type") == "tool_use"}
        if entry.in_conversation and not calls <= answered:
            del shortened[at:]
            break
    scribe.parent = next((entry.uuid for entry in reversed(shortened) if entry.in_conversation), scribe.parent)
    text = tuple(output[-1:]) if ends_with_text and _is_text(output[-1]) else ()
    last = scribe.record(Message("assistant", text), model) if text or not unseen else closing_record(scribe)
    return [*(entry.record() for entry in shortened), last]


# --- streams that the provider cut


def partial_texts(output: Sequence[Block], partial: frozenset[int]) -> list[tuple[int, Block]]:
    """The partial texts, each with the number of finished texts before it. Without blank ones, which the API
    refuses."""
    out: list[tuple[int, Block]] = []
    finished = 0
    for at, block in enumerate(output):
        if _is_text(block) and at in partial:
            out.append((finished, block))
        else:
            finished += _is_text(block)
    return out


def with_partial_texts(
    records: Sequence[Record], missing: Sequence[tuple[int, Block]], calls: frozenset[str], scribe: Scribe, model: str
) -> list[Record]:
    """The records of a turn with the `missing` texts, each before the text or client's call that it preceded."""
    left = list(missing)
    out: list[Record] = []
    finished = 0
    for record in records:
        entry = Entry(record.line, json.loads(record.line))
        scribe.parent = entry.uuid if entry.in_conversation else scribe.parent
        content: list[Block] = []
        is_answer = entry.in_conversation and entry.kind == "assistant" and not entry.data.get("isApiErrorMessage")
        if is_answer and entry.data["message"].get("model") != SYNTHETIC_MODEL:
            for block in entry.content:
                if _is_text(block) or block.get("id") in calls:
                    while left and left[0][0] <= finished:
                        content.append(left.pop(0)[1])
                finished += _is_text(block)
                content.append(block)
        if len(content) <= len(entry.content):
            out.append(record)
            continue
        data = entry.data | {"message": entry.data["message"] | {"content": content}}
        out.append(Record(json.dumps(data, separators=(",", ":")), record.uuid, synthetic=True))
    if left:
        out.append(scribe.record(Message("assistant", tuple(block for _, block in left)), model))
    return out


def without_invalid_thinking(records: Sequence[Record]) -> tuple[list[Record], int]:
    """The records of a turn with marks for thinking that is invalid because an attempt was cut, and its count.

    CLI 1.0.120 repeats the request, and keeps the attempt's finished blocks before the answer. The signatures in the
    answer do not cover those. If they are only thinking, they are left out; if there is a text among them, which a
    client may have, the answer's thinking is left out.
    """
    entries = [Entry(record.line, json.loads(record.line)) for record in records]
    out: list[Record] = []
    left_out = 0
    attempt: list[int] = []  # indices of the records of the attempt or answer
    invalid_since: str | None = None  # the first record of an answer with invalid thinking
    message_id: object = None  # of the attempt
    for at, entry in enumerate(entries):
        if entry.in_conversation and entry.kind in ("user", "assistant") and not records[at].synthetic:  # the CLI's own
            message = entry.data.get("message")
            own_id = message.get("id") if entry.kind == "assistant" and isinstance(message, dict) else None
            if attempt and own_id is not None and own_id != message_id:
                cut_off = [records[one] for one in attempt]
                if all(block.get("type") in THINKING for one in attempt for block in entries[one].content):
                    out.append(mending.leave_out("thinking", cut_off[0].uuid))
                    left_out += mending.count(cut_off, "thinking")
                else:
                    invalid_since = entry.uuid
            attempt = [] if own_id != message_id else attempt
            attempt += [at] if own_id is not None else []
            message_id = own_id
        out.append(records[at])
    if invalid_since is not None:
        start = next(at for at, record in enumerate(records) if record.uuid == invalid_since)
        if thoughts := mending.count(records[start:], "thinking"):
            out.append(mending.leave_out("thinking", invalid_since))
            left_out += thoughts
    return out, left_out


def _is_text(block: Block) -> bool:
    return block.get("type") == "text" and bool(str(block.get("text", "")).strip())
