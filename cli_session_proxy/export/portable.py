"""Exports a chain as one file, for another machine: `cli-session-proxy/export/3`, JSON lines.

    {"schema": "cli-session-proxy/export/3", "program": …, "exported_at": …, "agent": {…}, "head": …, "sandbox": …}
    {"image": sha256, "data": base64}         each image once, before the first line that uses it
    {"turn": {…}}                             in the order of acceptance
    {"record": line, "uuid": …, "synthetic": …}   the records of the turn above, verbatim
    {"session": {…}} {"link": {…}}
    {"conversation": {…}} {"item": {…}}       what OpenAI's Conversations keep beside the chain, where there is some
    {"end": {"lines": n, "turns": n, "records": n, "sha256": …}}   of every byte before this line

A turn or record with images has `"images": [[offset, sha256], …]`: where they were in its text. Everything is
streamed, so memory is bounded by one turn. Unfinished turns, fingerprints and idempotency keys are not exported. A file
without its end, or with a wrong checksum, is refused before anything is written. Version 1 had no conversations, and
version 2 one `reason` instead of `placed`, `options` and `evidence`; both are still read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiofiles

from ..domain.forms import ImageCutter, Recorded
from ..domain.models import FINISHED, JSON, Agent, Turn
from ..errors import DamagedRow, InvalidRequest, NotFound, SessionBusy, from_dict
from ..locks import to_drive
from ..sandbox import Sandboxes
from ..settings import Settings
from ..stores.base import Store

SCHEMA = "cli-session-proxy/export/3"
# Versions with one `reason`, which `domain.legacy` splits.
LEGACY = frozenset({"cli-session-proxy/export/1", "cli-session-proxy/export/2"})
READ = LEGACY | {SCHEMA}

# Gets (done, total), in bytes or turns.
Progress = Callable[[int, int], None]
# Takes a block of bytes.
Out = Callable[[bytearray], Awaitable[object]]

# The longest line: a turn whose input has `limits.INPUT_BYTES`, or three times that with all of it escaped, and its
# answer.
MAX_LINE = 512 * 1024 * 1024
# Lines are written in blocks of at least so many bytes, because each write runs on a thread.
BLOCK = 256 * 1024


@dataclass(frozen=True, slots=True)
class MovedChain:
    """The result of an export or import. `renamed`: ids existed here already, so turns and sessions got new ones."""

    agent_id: str
    path: Path
    turns: int
    records: int
    renamed: bool = False


async def export(settings: Settings, store: Store, agent: Agent, path: Path, progress: Progress) -> MovedChain:
    """Write the present chain to a file for this user only (0600). A failure leaves no file. Raises
    `InvalidRequest`."""
    try:
        file = await aiofiles.open(path, "xb", opener=partial(os.open, mode=0o600))
    except FileExistsError:
        raise InvalidRequest(f"{path} is there already: move it away, or choose another file with -o") from None
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be written ({exc.strerror}): choose another file with -o") from exc
    try:
        end = await write(settings, store, agent, file.write, progress)
        await file.flush()
        await asyncio.to_thread(to_drive, file.fileno())
    except BaseException as exc:
        await asyncio.to_thread(path.unlink, missing_ok=True)
        if isinstance(exc, OSError):
            raise InvalidRequest(f"{path} cannot be written ({exc.strerror}): free space, or choose -o") from exc
        raise
    finally:
        await file.close()
    return MovedChain(agent.agent_id, path, end["turns"], end["records"])


async def write(
    settings: Settings, store: Store, agent: Agent, to: Out | None, progress: Progress, *, whole_at: float | None = None
) -> JSON:
    """Write the lines to `to` in blocks, and return the last line: counts and a checksum. `to` None: write nothing.
    Raises `NotFound`.

    With `whole_at`, the time of the export, an unfinished turn raises `SessionBusy` instead of being left out: equal
    chains and times give equal bytes.
    """
    out = _Writer(to)
    async for line in _lines_of(settings, store, agent, out, progress, whole_at):
        await out.line(line)
    return await out.end()


async def _lines_of(
    settings: Settings, store: Store, agent: Agent, out: _Writer, progress: Progress, whole_at: float | None
) -> AsyncIterator[JSON]:
    chain = await store.chain(agent.key)
    if chain is None:
        raise NotFound(f"there is no agent {agent.agent_id!r}")
    # Links and head are read first: turns that finish later are not part of this export.
    now = time.time() if whole_at is None else whole_at
    yield {
        "schema": SCHEMA,
        "exported_at": now,
        "agent": {"agent_id": chain.agent.agent_id, "named": chain.agent.named, "created_at": chain.agent.created_at},
        "head": chain.agent.head,
        "sandbox": str(Sandboxes(settings).path(chain.agent.dir)),
    }
    tips = {session.tip_turn_id for session in chain.sessions} | {chain.agent.head}
    async for turn in store.turns(agent.key):
        if turn.error is not None and turn.error.get("code") == DamagedRow.code:
            raise from_dict(turn.error)
        if whole_at is not None:
            if turn.status not in FINISHED:
                raise SessionBusy(f"turn {turn.id} of agent {agent.agent_id!r} waits or runs: wait for its end")
        elif turn.id not in tips and (turn.status not in FINISHED or (turn.finished_at or 0.0) > now):
            continue
        async for line in _turn_lines(store, turn, out):
            yield line
        progress(out.turns, out.turns)
    if await store.agent_by_key(agent.key) is None:
        raise NotFound(f"agent {agent.agent_id!r} was deleted while it was exported")
    exported_ids = out.turn_ids
    for session in chain.sessions:
        yield {"session": _without(session, "agent_key", "mark", "transcript")}
    for link in chain.links:
        exported_link = link if link.turn_id in exported_ids else dataclasses.replace(link, turn_id=None)
        yield {"link": exported_link.as_json()}
    conversation = await store.conversation(agent.key)
    if conversation is not None:
        yield {"conversation": conversation.as_json()}
    for item in await store.items(agent.key):
        exported_item = item if item.turn_id in exported_ids else dataclasses.replace(item, turn_id=None)
        yield {"item": exported_item.as_json()}


async def _turn_lines(store: Store, turn: Turn, out: _Writer) -> AsyncIterator[JSON]:
    parent = turn.parent_id
    if parent is not None and parent not in out.turn_ids:
        above = await store.turn(parent)
        if above is None or above.status not in FINISHED:  # its parent never ended
            turn = dataclasses.replace(turn, parent_id=None)
    cutter = ImageCutter()
    shortened, places = cutter.cut(as_text(_without(turn, "seq", "agent_key", "instance", "fingerprint", "limit_wait")))
    line: JSON = {"turn": json.loads(shortened)} | ({"images": places} if places else {})
    lines: list[JSON] = []
    for record in await store.own_records(turn.id):
        shortened, places = cutter.cut(record.line)
        fields: JSON = {"record": shortened, "uuid": record.uuid, "synthetic": record.synthetic}
        lines.append(fields | ({"images": places} if places else {}))
    for sha256, data in cutter.images.items():
        if sha256 not in out.image_hashes:
            out.image_hashes.add(sha256)
            yield {"image": sha256, "data": data}
    out.turn_ids.add(turn.id)
    yield line
    for line in lines:
        yield line


def _without(row: Recorded, *names: str) -> JSON:
    return {name: value for name, value in row.as_json().items() if name not in names}


def as_text(value: Any) -> str:
    # ASCII: half a surrogate pair in an answer survives, and the offsets of images refer to this text
    return json.dumps(value, separators=(",", ":"))


class _Writer:
    """Writes lines in blocks, and computes the checksum. `write_block` None: computes only.

    `turns`, `records`: how many lines are turns or records. `turn_ids`, `image_hashes`: turns and images in the lines.
    """

    def __init__(self, write_block: Out | None) -> None:
        self._write_block = write_block
        self._block = bytearray()
        self._hash = hashlib.sha256()
        self._lines = 0
        self.turns = 0
        self.records = 0
        self.turn_ids: set[str] = set()
        self.image_hashes: set[str] = set()

    async def line(self, value: JSON) -> None:
        data = as_text(value).encode() + b"\n"
        self._hash.update(data)
        self._block += data
        if len(self._block) >= BLOCK:
            if self._write_block is not None:
                await self._write_block(self._block)
            self._block = bytearray()
        self._lines += 1
        # A line's key says what it is.
        self.turns += "turn" in value
        self.records += "record" in value

    async def end(self) -> JSON:
        """Write the last line. Returns its content: counts and the checksum."""
        summary: JSON = {"lines": self._lines, "turns": self.turns, "records": self.records}
        summary["sha256"] = self._hash.hexdigest()
        if self._write_block is not None:
            await self._write_block(self._block + as_text({"end": summary}).encode() + b"\n")
        return summary
