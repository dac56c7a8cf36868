"""Writes a path that ends with calls of the client's tools, so that a CLI continues from their results.

Used if no process waits for the results any more: it was killed or retired, the proxy was restarted, or the path is
another one. Run on 2.1.329 (messages as they reached the model, prefix 1.00, at the turn itself and after it):

- Every call in the records gets a result: the client's, or "no result".
- A CLI that loads a transcript ending with a user message adds the answer "No response requested.". An API error record
also counts as an answer, but is never sent: so one of these is written at the end. Only the request for a summary, at a
compaction, includes it (2.1.332): so its text claims nothing.
- A CLI that compacts first keeps only that record of the turn, and the request ends with its text (2.1.332). So
compaction is off in such a turn; if the context is full, the path is summarised without the last calls.
- A user frame with `content: []` then makes the model go on. It adds nothing to the request, and leaves no record, but
the answer gets the frame's uuid as parent: so the closing record has that uuid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ....domain.client_tools import NOT_ANSWERED, calls_of
from ....domain.models import Block, Message, Record, Turn
from ..transcript import Entry, Scribe, parse_records

CLOSING = "(continued)"
SYNTHETIC_MODEL = "<synthetic>"


def result_records(
    known: Sequence[Record],
    parent: Turn,
    brought: Mapping[str, Block],
    scribe: Scribe,
    *,
    closed: bool,
    uuid: str | None,
) -> list[Record]:
    """The records after the path's: a result for each open call and, if `closed`, the closing record.

    CLI 1.0.120 sends the closing record to the model: there it is left out, and every turn needs a prompt.
    """
    path = parse_records(record for record in known if record.uuid).path
    dangling = open_calls(path)
    known_as = in_records(parent, dangling)
    results = {known_as[call]: block for call, block in brought.items() if call in known_as}
    scribe.parent = path[-1].uuid if path else None
    out = []
    for call in dangling:
        missing: Block = {"type": "tool_result", "tool_use_id": call, "content": NOT_ANSWERED, "is_error": True}
        result = {**results.get(call, missing), "tool_use_id": call}
        out.append(scribe.record(Message("user", (result,)), parent.model))
    return [*out, closing(scribe, uuid)] if closed else out


def closing(scribe: Scribe, record_uuid: str | None = None) -> Record:
    """The closing record: an answer that the model never sees."""
    said: tuple[Block, ...] = ({"type": "text", "text": CLOSING},)
    record = scribe.record(Message("assistant", said), SYNTHETIC_MODEL, record_uuid=record_uuid)
    line = json.dumps({**json.loads(record.line), "isApiErrorMessage": True}, separators=(",", ":"))
    return Record(line, record.uuid, synthetic=True)


def open_calls(path: Iterable[Entry]) -> list[str]:
    """The calls without a result. In chains before 0.2 an id may occur twice: the newest call counts."""
    found: dict[str, None] = {}
    for block in (block for entry in path for block in entry.content):
        if block.get("type") == "tool_use":
            found[str(block.get("id"))] = None
        elif block.get("type") == "tool_result":
            found.pop(str(block.get("tool_use_id")), None)
    return list(found)


def in_records(parent: Turn, dangling: Sequence[str]) -> dict[str, str]:
    """The ids of the turn's calls in its records. In chains before 0.2 those of an imported turn may differ."""
    calls = calls_of(parent.output)
    return dict(zip(calls, calls if set(calls) <= set(dangling) else dangling, strict=False))
