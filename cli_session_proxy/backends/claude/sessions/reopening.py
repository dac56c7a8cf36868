"""A path that ends with calls of the client's tools, written so that a CLI goes on from their results.

Used where no process waits for them any more: it was killed or retired, the proxy was restarted, the path is
another one's. Run on 2.1.329 (messages as they reached the model, prefix 1.00, at the turn itself and after it):

- Every call in the records gets a result: the client's, or that there is none.
- A CLI that loads a transcript which ends with the user puts "No response requested." behind it. The CLI's own
  records of API errors are answers to it, but are never sent: one of them at the end, and nothing is invented. Only
  the request for a summary, at a compaction, does show it (2.1.332): so its words claim nothing.
- A CLI that compacts before it goes on keeps only that record of the turn, and the request ends in its words (2.1.332).
  So it may not compact in such a turn: where the context is full, the path is summarised without the last calls.
- A user frame with `content: []` then makes the model go on, adds nothing to what it sees, and leaves no record
  but hangs the answer on the frame's uuid: so that is the uuid of the closing record.
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
    """The records that follow the path's: a result for each open call, and, with `closed`, the closing one.

    CLI 1.0.120 shows the model the closing one too: there it is left out, and no turn goes on without a prompt.
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
    """An answer for the CLI that the model never sees."""
    said: tuple[Block, ...] = ({"type": "text", "text": CLOSING},)
    record = scribe.record(Message("assistant", said), SYNTHETIC_MODEL, record_uuid=record_uuid)
    line = json.dumps({**json.loads(record.line), "isApiErrorMessage": True}, separators=(",", ":"))
    return Record(line, record.uuid, synthetic=True)


def open_calls(path: Iterable[Entry]) -> list[str]:
    """The calls that no result follows. Chains before 0.2 may hold an id twice: the newest call of it counts."""
    found: dict[str, None] = {}
    for block in (block for entry in path for block in entry.content):
        if block.get("type") == "tool_use":
            found[str(block.get("id"))] = None
        elif block.get("type") == "tool_result":
            found.pop(str(block.get("tool_use_id")), None)
    return list(found)


def in_records(parent: Turn, dangling: Sequence[str]) -> dict[str, str]:
    """The ids in the records of the turn's calls. In chains before 0.2 those of an imported turn may be others."""
    calls = calls_of(parent.output)
    return dict(zip(calls, calls if set(calls) <= set(dangling) else dangling, strict=False))
