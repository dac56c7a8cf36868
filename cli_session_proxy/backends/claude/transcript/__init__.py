"""The CLI's own JSONL file of a session: where it lies, what it says, how to write it again.

A line with a `uuid` is part of the conversation (user, assistant, attachment, system records, chained by
`parentUuid`); a line without one is a note of the CLI's own (queue, cost, request log). Sidechain records
belong to sub-agents. Source: facts measured on 1.0.120 and 2.1.329, section "Transcripts".
"""

from .comparing import Found, Pair, Verdict, check
from .entries import Entry, Parsed, copied_up_to, has_ended, is_complete, parse, parse_records, unbroken
from .files import gather, is_file, is_sound
from .mending import (
    SUMMARY,
    Head,
    LeftOut,
    count,
    head_of,
    imported,
    is_mark,
    is_sound_mark,
    leave_out,
    mended_at_import,
    shown,
    since_first,
    summary,
    was_refused,
    weight,
)
from .opening import is_unchanged
from .places import beside, copy_beside, find_elsewhere, in_folder, path_of, project_dir, remove, remove_project
from .tailing import Changed, Reader, reread, total_cost
from .writing import NO_CONTENT, OPENED_BY_ASSISTANT, Scribe, in_strict_order, timestamp, with_session_id, write

__all__ = [
    "NO_CONTENT",
    "OPENED_BY_ASSISTANT",
    "SUMMARY",
    "Changed",
    "Entry",
    "Found",
    "Head",
    "LeftOut",
    "Pair",
    "Parsed",
    "Reader",
    "Scribe",
    "Verdict",
    "beside",
    "check",
    "copied_up_to",
    "copy_beside",
    "count",
    "find_elsewhere",
    "gather",
    "has_ended",
    "head_of",
    "imported",
    "in_folder",
    "in_strict_order",
    "is_complete",
    "is_file",
    "is_mark",
    "is_sound",
    "is_sound_mark",
    "is_unchanged",
    "leave_out",
    "mended_at_import",
    "parse",
    "parse_records",
    "path_of",
    "project_dir",
    "remove",
    "remove_project",
    "reread",
    "shown",
    "since_first",
    "summary",
    "timestamp",
    "total_cost",
    "unbroken",
    "was_refused",
    "weight",
    "with_session_id",
    "write",
]
