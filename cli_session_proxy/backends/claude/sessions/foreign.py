"""Reads a transcript from elsewhere: finds the records that the CLI would load, and yields them one by one.

A real session's file is a tree: an edited prompt or a second try leaves a dead branch, and results of parallel tools
are beside the path. Two passes over the file, so that only an index is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ....domain.limits import is_session_id, is_version
from ....errors import InvalidRequest
from .. import transcript
from ..transcript import Entry
from ..transcript.entries import opened
from .exchanges import began, is_compaction, is_prompt

# (bytes done, bytes in all)
Progress = Callable[[int, int], None]

# Lines that are read before a file without records is refused.
LOOK = 200


@dataclass(slots=True)
class _Node:
    """The index entry of one record of the conversation. `before`: the record before it in the file."""

    parent: str | None
    before: str | None
    message: str | None
    prompt: bool
    compaction: bool


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """The result of the first pass. `kept`: the uuids of the path. `mended`: new parents for records without one."""

    path: Path
    session_id: str
    version: str
    started: float | None
    size: int
    broken: int
    dropped: int
    kept: frozenset[str] = field(repr=False)
    mended: dict[str, str | None] = field(repr=False)

    def entries(self, progress: Progress) -> Iterator[Entry]:
        """The path's records with sub-agents' and notes between them, in the order of the file."""
        for entry, done in _lines(self.path, self.size):
            progress(done, self.size)
            if entry is None or (entry.on_path and entry.uuid not in self.kept):
                continue
            if entry.on_path and entry.uuid in self.mended:
                yield entry.hung_on(self.mended[entry.uuid])
            else:
                yield entry

    def notes(self) -> Iterator[str]:
        """Notes for a person on what was left out."""
        if self.dropped:
            yield f"{self.dropped} records of branches that nobody continued (edited prompts) were left out"
        if self.broken:
            yield f"{self.broken} lines are no JSON or no record of a CLI's (a cut last line is one) and were left out"
        if self.mended:
            yield f"{len(self.mended)} records named a parent that is missing: linked to the record before"


def survey(path: Path) -> ForeignFile:
    """Read the file once. Raises `InvalidRequest` if it is no transcript with a message."""
    try:
        scan = _Scan(path)
        scan.read()
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be read ({exc.strerror}): give a file that this user may read") from exc
    if not scan.spoken:
        raise InvalidRequest(
            f"{path} is not a transcript of the Claude CLI: none of its {scan.lines} lines is a message "
            f"({scan.broken} are not JSON)"
        )
    if scan.session_id is None:
        raise InvalidRequest(
            f"{path} names no session: neither its records nor its name hold a UUID; rename it to <UUID>.jsonl"
        )
    return scan.found()


class _Scan:
    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self.size = os.fstat(file.fileno()).st_size
        self.nodes: dict[str, _Node] = {}
        self.last: str | None = None
        # Not trusted: its ids become parts of file names and command lines.
        self.session_id = path.stem if is_session_id(path.stem) else None
        self.version = ""
        self.started: float | None = None
        self.lines = self.broken = self.spoken = 0

    def read(self) -> None:
        for entry, _ in _lines(self.path, self.size):
            self.lines += 1
            if entry is None:
                self.broken += 1
                if not self.spoken and self.broken > LOOK:
                    return
            elif entry.on_path:
                self._take(entry)

    def _take(self, entry: Entry) -> None:
        assert entry.uuid is not None
        message = entry.data.get("message")
        if entry.kind in ("user", "assistant") and isinstance(message, dict):
            self.spoken += 1
        if is_session_id(entry.data.get("sessionId")):
            self.session_id = entry.data["sessionId"]
        if is_version(entry.data.get("version")):
            self.version = entry.data["version"]
        self.started = self.started or began(entry)
        parent = entry.parent
        if parent is None and is_compaction(entry):
            parent = entry.data.get("logicalParentUuid")
        named = message.get("id") if isinstance(message, dict) and entry.kind == "assistant" else None
        self.nodes[entry.uuid] = _Node(parent, self.last, named, is_prompt(entry), is_compaction(entry))
        self.last = entry.uuid

    def found(self) -> ForeignFile:
        path, mended = self._walk()
        said = {node.message for uuid in path if (node := self.nodes[uuid]).message}
        for uuid, node in self.nodes.items():
            # Parallel tools: calls of one message and their results are beside the path.
            beside = node.message in said if node.message else node.parent in path and not node.prompt
            if beside:
                path.add(uuid)
        dropped = len(self.nodes) - len(path)
        assert self.session_id is not None  # `survey` has looked
        return ForeignFile(
            self.path, self.session_id, self.version, self.started, self.size, self.broken, dropped,
            frozenset(path), mended,
        )  # fmt: skip

    def _walk(self) -> tuple[set[str], dict[str, str | None]]:
        """Walk from the leaf (the last record) to the root. If a parent is missing, go to the record before it in the
        file."""
        path: set[str] = set()
        mended: dict[str, str | None] = {}
        at = self.last
        while at is not None and at not in path:
            path.add(at)
            node = self.nodes[at]
            if node.parent is None and not node.compaction:
                break
            if node.parent in self.nodes and node.parent not in path:
                at = node.parent
                continue
            if not node.compaction:
                mended[at] = node.before
            at = node.before
        return path, mended


def _lines(path: Path, size: int) -> Iterator[tuple[Entry | None, int]]:
    """Each line of the first `size` bytes (the file may grow), parsed, with the bytes read; None: broken."""
    done = 0
    with opened(path) as file:
        while done < size and (raw := file.readline(size - done)):
            done += len(raw)
            if raw.strip():
                parsed = transcript.parse(raw)
                yield parsed.entries[0] if parsed.entries else None, done
