"""What lies beside a transcript (large tool results, sub-agents' own transcripts), kept as records of the turn.

Such a record is no line of the transcript: it has no uuid, and is written back as the file it was, where the
model was told that it is.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from ....domain.models import Record
from .places import beside

KIND = "cli-session-proxy/file"
_OPENING = f'{{"type":"{KIND}"'

# A larger one stays on disk only; a tool's output of this size is no reading matter.
MAX_FILE = 64 * 1024 * 1024


def gather(path: Path, after: int | None) -> list[Record]:
    """The files beside this transcript that were written after that time (ns; None: all of them), as records.

    A file that vanishes or cannot be read while we look is left out: it is the CLI's to remove.
    """
    folder = beside(path)
    if not folder.is_dir():
        return []
    records: list[Record] = []
    for file in sorted(folder.rglob("*")):
        try:
            stat = file.lstat()
            new = after is None or stat.st_mtime_ns > after
            if not file.is_file() or file.is_symlink() or not new or stat.st_size > MAX_FILE:
                continue
            data = base64.b64encode(file.read_bytes()).decode("ascii")
        except OSError:
            continue
        name = file.relative_to(path.parent).as_posix()
        records.append(Record(json.dumps({"type": KIND, "name": name, "data": data}, separators=(",", ":"))))
    return records


def is_file(record: Record) -> bool:
    return record.line.startswith(_OPENING)


def put_back(project: Path, records: Iterable[Record]) -> int:
    """Write the kept files that are not there as they were. Returns how many."""
    latest = dict(_files(records))
    written = 0
    for name, data in latest.items():
        place = project.joinpath(*PurePosixPath(name).parts)
        if place.is_file() and place.stat().st_size == len(data):
            continue
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = place.with_name(f".{place.name}.{os.getpid()}")
        fresh.write_bytes(data)
        os.replace(fresh, place)
        written += 1
    return written


def _files(records: Iterable[Record]) -> Iterator[tuple[str, bytes]]:
    for record in records:
        if not is_file(record):
            continue
        kept = json.loads(record.line)
        parts = PurePosixPath(kept["name"]).parts
        if len(parts) > 1 and ".." not in parts and not PurePosixPath(kept["name"]).is_absolute():
            yield kept["name"], base64.b64decode(kept["data"])
