"""The CLI's own JSONL file of a session: its place, reading and writing it.

A line with a `uuid` is part of the conversation (user, assistant, attachment, system records, linked by `parentUuid`);
a line without one is a note of the CLI (queue, cost, request log). Sidechain records belong to sub-agents. Measured on
1.0.120 and 2.1.329.
"""

from .comparing import FileVerdict, Pair, check
from .entries import (
    REWOUND,
    Entry,
    Parsed,
    Reader,
    TranscriptChanged,
    conversation_of,
    end_of_copy,
    has_ended,
    is_complete,
    is_unchanged,
    parse,
    parse_records,
    reread,
    stored,
    total_cost,
    unbroken,
)
from .loading import Loading, is_of_unknown_kind, stops_at_unknown
from .projects import Projects, project_dir
from .writing import (
    NEWEST,
    OPENED_BY_ASSISTANT,
    Scribe,
    in_strict_order,
    seconds,
    timestamp,
    with_session_id,
    write,
)

__all__ = [
    "NEWEST",
    "OPENED_BY_ASSISTANT",
    "REWOUND",
    "Entry",
    "FileVerdict",
    "Loading",
    "Pair",
    "Parsed",
    "Projects",
    "Reader",
    "Scribe",
    "TranscriptChanged",
    "check",
    "conversation_of",
    "end_of_copy",
    "has_ended",
    "in_strict_order",
    "is_complete",
    "is_of_unknown_kind",
    "is_unchanged",
    "parse",
    "parse_records",
    "project_dir",
    "reread",
    "seconds",
    "stops_at_unknown",
    "stored",
    "timestamp",
    "total_cost",
    "unbroken",
    "with_session_id",
    "write",
]
