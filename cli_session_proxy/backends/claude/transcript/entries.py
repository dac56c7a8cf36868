"""What a transcript says: its lines as data, and whether they hang together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....domain import limits
from ....domain.models import Block, Record


@dataclass(slots=True)
class Entry:
    """One line, parsed as far as the chain needs it. `data` is the whole object. Never changed after it is made.

    `on_path`: part of the conversation, and not of a sub-agent's. A record of a sub-agent has a `uuid`, too.
    """

    line: str
    data: dict[str, Any] = field(repr=False)
    uuid: str | None = field(init=False, compare=False)
    parent: str | None = field(init=False, compare=False)
    kind: str = field(init=False, compare=False)
    on_path: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        data = self.data
        named = data.get("uuid")
        self.uuid = named if isinstance(named, str) and "parentUuid" in data else None
        self.parent = data.get("parentUuid")
        self.kind = str(data.get("type", ""))
        self.on_path = self.uuid is not None and not data.get("isSidechain")

    @property
    def content(self) -> list[Block]:
        """The message's blocks; the CLI writes a lone text as a string and rewrites it as a list."""
        message = self.data.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []

    def says(self) -> tuple[Any, ...]:
        """What must be equal for two records to be the same to the model, whoever copied the file."""
        what = self.content if "message" in self.data else self.data.get("attachment")
        return (self.uuid, self.parent, self.kind, json.dumps(what, sort_keys=True))

    def spoken(self) -> list[tuple[str, Block]]:
        """Its blocks as the model reads them, each with its role; none for what is no message."""
        if not self.on_path or self.kind not in ("user", "assistant") or self.data.get("isMeta"):
            return []
        return [(self.kind, block) for block in self.content]

    def hung_on(self, parent: str | None) -> Entry:
        """The same record behind another one."""
        data = self.data | {"parentUuid": parent}
        return Entry(json.dumps(data, separators=(",", ":")), data)

    def record(self) -> Record:
        return Record(self.line, self.uuid)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A transcript, or its tail. `broken` counts lines that are not JSON, or too deep (a cut last line among them)."""

    entries: tuple[Entry, ...]
    broken: int = 0

    @property
    def path(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.on_path]

    @property
    def leaf(self) -> str | None:
        path = self.path
        return path[-1].uuid if path else None


def parse(data: bytes) -> Parsed:
    entries: list[Entry] = []
    broken = 0
    for raw in data.split(b"\n"):
        if not raw.strip():
            continue
        try:
            line = raw.decode("utf-8").rstrip("\r")
            value = limits.loads(line, limits.CLI_DEPTH)
        except ValueError:
            broken += 1
            continue
        if isinstance(value, dict):
            entries.append(Entry(line, value))
        else:
            broken += 1
    return Parsed(tuple(entries), broken)


def parse_records(records: Iterable[Record]) -> Parsed:
    return Parsed(tuple(Entry(record.line, json.loads(record.line)) for record in records))


def unbroken(entries: Sequence[Entry], start: str | None) -> bool:
    """Does each record on the path hang on the one before it, the first one on `start`?

    A compaction boundary starts anew (`parentUuid` null) by the CLI's own will, and the results of parallel calls
    each hang on the record of their call (run on 2.1.329).
    """
    at = start
    for entry in entries:
        anew = entry.parent is None and entry.data.get("subtype") == "compact_boundary"
        answers_its_call = entry.parent is not None and entry.data.get("sourceToolAssistantUUID") == entry.parent
        if entry.parent != at and not anew and not answers_its_call:
            return False
        at = entry.uuid
    return True


def is_complete(entries: Sequence[Entry]) -> bool:
    """Do these records end with an answer, and not in the middle of an exchange?"""
    spoken = [entry for entry in entries if entry.kind in ("user", "assistant")]
    if not spoken or spoken[-1].kind != "assistant":
        return False
    called = {block.get("id") for entry in spoken for block in entry.content if block.get("type") == "tool_use"}
    answered = {
        block.get("tool_use_id") for entry in spoken for block in entry.content if block.get("type") == "tool_result"
    }
    return called <= answered


def has_ended(entries: Sequence[Entry]) -> bool:
    """Did the last answer come to its own end? Without a reason to stop, more of it was to follow (run on 1.0.120)."""
    answers = [entry for entry in entries if entry.on_path and entry.kind == "assistant"]
    if not answers or answers[-1].data.get("isApiErrorMessage"):
        return False
    return answers[-1].data.get("message", {}).get("stop_reason") not in (None, "tool_use", "max_tokens", "refusal")


def copied_up_to(known: Sequence[Entry], copy: Sequence[Entry]) -> int | None:
    """Where in a copy of these records what is not theirs begins; None when it is no copy of them.

    Compared is what they say to the model, block by block: CLI 1.0.120 copies the session at every resume, and
    where a prompt has several blocks it makes a record of each and gives new uuids to it and to all that follow.
    """
    wanted = [said for entry in known for said in entry.spoken()]
    at = 0
    for index, entry in enumerate(copy):
        said = entry.spoken()
        if at == len(wanted) and said:
            return index
        if wanted[at : at + len(said)] != said:
            return None
        at += len(said)
    return len(copy) if at == len(wanted) else None
