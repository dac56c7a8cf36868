"""Words of an answer that the provider cut off and that a client was given: put into the turn's records. Pure.

The CLI asks again after a cut and keeps nothing of a block that was not finished. The client has its words, so the
model is shown them too, from the next turn on: where they were said among the texts of the answer, but behind the
thinking that the next text began with. A seal of thinking covers what came before it, and these words did not.
Thinking that was cut off has no seal: the records never hold it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ....domain.models import Block, Message, Record
from ..transcript import Entry, Scribe
from .reopening import SYNTHETIC_MODEL


def words(output: Sequence[Block], partial: frozenset[int]) -> list[tuple[int, Block]]:
    """The texts among these blocks, each with how many finished texts are before it. The API refuses blank ones."""
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


def placed(
    records: Sequence[Record], missing: Sequence[tuple[int, Block]], calls: frozenset[str], scribe: Scribe, model: str
) -> list[Record]:
    """The records of a turn with the `missing` texts, each in front of the text, or the client's call, it preceded."""
    left = list(missing)
    out: list[Record] = []
    finished = 0
    for record in records:
        entry = Entry(record.line, json.loads(record.line))
        scribe.parent = entry.uuid if entry.on_path else scribe.parent
        content: list[Block] = []
        said = entry.data.get("message", {})
        # The CLI notes its errors in the model's place.
        of_the_model = entry.kind == "assistant" and said.get("model") != SYNTHETIC_MODEL
        is_answer = entry.on_path and of_the_model and not entry.data.get("isApiErrorMessage")
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
