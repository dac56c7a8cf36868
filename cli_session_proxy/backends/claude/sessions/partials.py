"""Repairs a turn's records after the provider cut its stream. Pure.

Text that a client has received is added to the records.

The CLI asks again after a cut and keeps nothing of an unfinished block. The client has its text, so the model is shown
it, too, from the next turn on: at its place among the texts of the answer, but after the thinking before the next text,
because the signature of that thinking does not cover the added text.
Cut thinking has no signature, so the records never have it. Thinking that was finished before the cut stays in the
chain. If a CLI would send it before the next attempt's thinking, one of them is invalid, and is marked as such.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ....domain.models import THINKING, Block, Message, Record
from .. import transcript
from ..transcript import Entry, Scribe
from .reopening import SYNTHETIC_MODEL


def words(output: Sequence[Block], partial: frozenset[int]) -> list[tuple[int, Block]]:
    """The partial texts, each with the number of finished texts before it. Without blank ones, which the API
    refuses."""
    out: list[tuple[int, Block]] = []
    finished = 0
    for at, block in enumerate(output):
        if not _is_text(block):
            continue
        if at in partial:
            out.append((finished, block))
        else:
            finished += 1
    return out


def without_void(records: Sequence[Record]) -> tuple[list[Record], int]:
    """The records of a turn with marks for thinking that is invalid because an attempt was cut, and its count.

    CLI 1.0.120 repeats the request, and keeps the attempt's finished blocks before the answer. The signatures in the
    answer do not cover those. If they are only thinking, they are left out; if there is a text among them, which a
    client may have, the answer's thinking is left out.
    """
    entries = [Entry(record.line, json.loads(record.line)) for record in records]
    out: list[Record] = []
    left_out = 0
    attempt: list[int] = []  # indices of the records of the attempt or answer
    void_since: str | None = None  # the first record of an answer with invalid thinking
    message: object = None
    for at, entry in enumerate(entries):
        if entry.on_path and entry.kind in ("user", "assistant") and not records[at].synthetic:  # the CLI's own
            said = entry.data.get("message")
            now = said.get("id") if entry.kind == "assistant" and isinstance(said, dict) else None
            if attempt and now is not None and now != message:
                cut_off = [records[one] for one in attempt]
                if all(block.get("type") in THINKING for one in attempt for block in entries[one].content):
                    out.append(transcript.leave_out("thinking", cut_off[0].uuid))
                    left_out += transcript.count(cut_off, "thinking")
                else:
                    void_since = entry.uuid
            attempt = [] if now != message else attempt
            attempt += [at] if now is not None else []
            message = now
        out.append(records[at])
    if void_since is not None:
        behind = next(at for at, record in enumerate(records) if record.uuid == void_since)
        if thoughts := transcript.count(records[behind:], "thinking"):
            out.append(transcript.leave_out("thinking", void_since))
            left_out += thoughts
    return out, left_out


def placed(
    records: Sequence[Record], missing: Sequence[tuple[int, Block]], calls: frozenset[str], scribe: Scribe, model: str
) -> list[Record]:
    """The records of a turn with the `missing` texts, each before the text or client's call that it preceded."""
    left = list(missing)
    out: list[Record] = []
    finished = 0
    for record in records:
        entry = Entry(record.line, json.loads(record.line))
        scribe.parent = entry.uuid if entry.on_path else scribe.parent
        content: list[Block] = []
        said = entry.on_path and entry.kind == "assistant" and not entry.data.get("isApiErrorMessage")
        # Error messages of the CLI in the model's place.
        is_answer = said and entry.data["message"].get("model") != SYNTHETIC_MODEL
        for block in entry.content if is_answer else ():
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


def _is_text(block: Block) -> bool:
    return block.get("type") == "text" and bool(str(block.get("text", "")).strip())
