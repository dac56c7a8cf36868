"""What lies beside a transcript (large tool results, sub-agents' own transcripts), kept as records of the turn.

Such a record is no line of the transcript: it has no uuid, and is written back as the file it was, where the
model was told that it is.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ....domain.models import Record
from .places import files_beside, is_place, write_below

KIND = "cli-session-proxy/file"
_OPENING = f'{{"type":"{KIND}"'

# A larger one stays on disk only; a tool's output of this size is no reading matter.
MAX_FILE = 64 * 1024 * 1024


def gather(path: Path, after: int | None) -> list[Record]:
    """The files beside this transcript that were written after that time (ns; None: all of them), as records.

    A file that vanishes or cannot be read while we look is left out: it is the CLI's to remove.
    """
    records: list[Record] = []
    for file in files_beside(path):
        try:
            opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(opened, "rb") as source:
                state = os.fstat(opened)
                new = after is None or state.st_mtime_ns > after
                if not stat.S_ISREG(state.st_mode) or not new or state.st_size > MAX_FILE:
                    continue
                data = base64.b64encode(source.read(MAX_FILE)).decode("ascii")
        except OSError:
            continue
        name = file.relative_to(path.parent).as_posix()
        records.append(Record(json.dumps({"type": KIND, "name": name, "data": data}, separators=(",", ":"))))
    return records


def is_file(record: Record) -> bool:
    return record.line.startswith(_OPENING)


def is_sound(record: Record) -> bool:
    """Whether a kept file of a stranger's is one that we could have kept: its place, and its content."""
    try:
        kept = json.loads(record.line)
        base64.b64decode(kept["data"], validate=True)
        return is_place(kept["name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def put_back(project: Path, records: Iterable[Record]) -> int:
    """Write the kept files that are not there as they were. Returns how many. Raises `SandboxError`, OSError."""
    kept = (json.loads(record.line) for record in records if is_file(record))
    latest = {file["name"]: file["data"] for file in kept}
    return sum(write_below(project, name, base64.b64decode(data)) for name, data in latest.items())
