"""Writes transcripts from records, and makes records that the CLI did not write."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....domain import limits
from ....domain.models import JSON, FileMark, Message, Record
from ....domain.times import LAST_TIME
from .entries import mark_of, parse_records
from .files import checked, is_file, put_back, temporary
from .loading import Loading, is_of_unknown_kind

# The API needs a user message first: this one precedes a history that begins with the assistant.
OPENED_BY_ASSISTANT = "[The assistant opened the conversation.]"

# The content of an empty assistant message, which the API would refuse.
NO_CONTENT = "(no content)"

NEWEST = Loading()

_TOKENS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_SESSION_ID = re.compile(r'"sessionId":"([0-9a-fA-F-]{36})"')
_TIMESTAMP = re.compile(r'"timestamp":"([^"]+)"')


def with_session_id(line: str, session_id: str) -> str:
    """The record's line with another session id. Unchanged if the line has not exactly one field of that name: then one
    may be part of a message, and not the record's own."""
    if len(_SESSION_ID.findall(line)) != 1:
        return line
    return _SESSION_ID.sub(f'"sessionId":"{session_id}"', line, count=1)


def in_strict_order(lines: Iterable[str]) -> list[str]:
    """Make timestamps distinct and increasing: CLI 1.0.120 finds the leaf by its timestamp, and loses records with
    equal timestamps."""
    ordered: list[str] = []
    last_ms = 0
    for line in lines:
        match = _TIMESTAMP.search(line)
        # The first match may be part of a message: it has to be the record's own field.
        at = None if match is None or json.loads(line).get("timestamp") != match[1] else seconds(match[1])
        if match is None or at is None:  # without a valid time of its own: unchanged
            ordered.append(line)
            continue
        written_ms = round(at * 1000)
        last_ms = max(written_ms, last_ms + 1)
        moved = f"{line[: match.start(1)]}{timestamp(last_ms / 1000)}{line[match.end(1) :]}"
        ordered.append(line if written_ms == last_ms else moved)
    return ordered


def write(path: Path, records: Sequence[Record], session_id: str, form: Loading = NEWEST) -> FileMark:
    """Replace the transcript atomically by these records, under this session id, and restore the stored files beside.

    Returns the mark of the new file. `form`: how the CLI loads a transcript. No process may have the file open.
    """
    put_back(checked(path).parent, records)
    # A CLI loads a record without a parent, too: a line that is no record for us has to be none for it.
    records = [
        record
        for record in records
        if not is_file(record) and (record.uuid is not None or "uuid" not in json.loads(record.line))
    ]
    if form != NEWEST or any(record.uuid and is_of_unknown_kind(record.line) for record in records):
        records = [entry.record() for entry in form.form(parse_records(records).entries)]
    lines: Iterable[str] = (with_session_id(record.line, session_id) for record in records)
    if not form.whole_records:
        lines = in_strict_order(lines)
    read, size = hashlib.sha256(), 0
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=temporary(session_id))
    try:
        with os.fdopen(handle, "wb") as file:
            for line in lines:  # one by one: all of a long path at once would block the interpreter for seconds
                data = f"{line}\n".encode("utf-8", "surrogatepass")
                file.write(data)
                read.update(data)
                size += len(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(fresh, path)
            stat = os.fstat(file.fileno())  # after the rename, which changes the ctime
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    uuids = [
        record.uuid
        for record in records
        # Search the text first: few records have it, and parsing a whole long path is slow.
        if record.uuid and not ('"isSidechain":true' in record.line and json.loads(record.line).get("isSidechain"))
    ]
    return mark_of(stat, size, read.hexdigest(), uuids[-1] if uuids else None)


def timestamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(written: str) -> float | None:
    """A record's time; None if it is invalid, before 1970 or far in the future."""
    try:
        at = datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
    return at if 0 <= at < LAST_TIME else None


@dataclass(slots=True)
class Scribe:
    """Makes records of a client's history or a turn's frames.

    `at` (seconds) advances by a millisecond per record, so that timestamps are distinct.
    """

    session_id: str
    cwd: Path
    version: str
    at: float
    parent: str | None = None

    def record(self, message: Message, model: str, *, record_uuid: str | None = None) -> Record:
        body: dict[str, Any] = {"role": message.role, "content": list(message.content)}
        if message.role == "assistant":
            # The CLI merges equal message ids. It trusts the usage (990k triggered a compaction): write 0.
            body = {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "model": model,
                "content": list(message.content) or [{"type": "text", "text": NO_CONTENT}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 0, "output_tokens": 0},
            }
        return self._line({"type": message.role, "message": body}, record_uuid)

    def told(self, messages: Iterable[JSON], model: str) -> Iterator[Record]:
        """Records of the messages that a CLI reported in a turn, with only what the model is shown of them. A CLI joins
        pieces of one message by its id; an id of an earlier turn must not come again."""
        ids: dict[str, str] = {}
        for message in messages:
            body: JSON = {"role": message["role"], "content": message["content"]}
            if message["role"] == "assistant":
                told, named = message.get("usage"), message.get("model")
                usage = {name: limits.count((told if isinstance(told, dict) else {}).get(name)) for name in _TOKENS}
                body |= {
                    "id": ids.setdefault(str(message.get("id")), f"msg_{uuid.uuid4().hex}"),
                    "type": "message",
                    "model": named if limits.is_model(named) else model,
                    "stop_reason": "end_turn",
                    "stop_sequence": None,
                    "usage": usage,
                }
            yield replace(self._line({"type": message["role"], "message": body}), synthetic=False)

    def notice(self, words: str) -> Record:
        """A message that a CLI shows to a person who opens the session, never to the model (run on 2.1.71 and
        2.1.332)."""
        return self._line({"type": "system", "subtype": "informational", "content": words, "level": "warning"})

    def _line(self, said: dict[str, Any], record_uuid: str | None = None) -> Record:
        record_uuid = record_uuid or str(uuid.uuid4())
        line = {
            "parentUuid": self.parent,
            "isSidechain": False,
            "userType": "external",
            "cwd": str(self.cwd),
            "sessionId": self.session_id,
            "version": self.version,
            "gitBranch": "",
            **said,
            "uuid": record_uuid,
            "timestamp": timestamp(self.at),
        }
        self.parent = record_uuid
        self.at += 0.001
        return Record(json.dumps(line, separators=(",", ":")), record_uuid, synthetic=True)
