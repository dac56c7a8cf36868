"""What a client's history shows, as the model takes it: one image that is too large would fail every later request.

The chain keeps what the client sent, and knows the history again by it; only what is made for the model is smaller.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..aside.pictures import Fitted, Unreadable, fitted
from ..aside.pool import Aside, OutOfBoundsError
from ..domain.lineage import Past
from ..domain.models import Block, Message
from ..domain.notes import Code, Note

# A PDF says what it is among its first bytes; readers allow for some before it.
_PDF_HEAD = 1024


class Fitting:
    """One for each history: the same image is decoded once."""

    def __init__(self, aside: Aside) -> None:
        self._aside = aside
        self._known: dict[str, Fitted | str | None] = {}
        self._changed: Counter[Code] = Counter()

    async def fit(self, past: Past) -> Past:
        """The exchange as the model takes it, with notes of what was changed in it."""
        self._changed.clear()
        asked = tuple([Message(one.role, await self._blocks(one.content)) for one in past.input])
        notes = tuple(Note(code, number) for code, number in self._changed.items())
        return replace(past, input=asked, notes=notes) if notes else past

    async def _blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple([await self._block(block) for block in blocks])

    async def _block(self, block: Block) -> Block:
        kind, source = block.get("type"), block.get("source")
        if kind == "tool_result" and isinstance(block.get("content"), list):
            return {**block, "content": list(await self._blocks(block["content"]))}
        if not isinstance(source, dict) or source.get("type") != "base64":
            return block
        if kind == "document":
            try:
                head = base64.b64decode(source["data"][: 4 * _PDF_HEAD // 3 // 4 * 4 + 4])
            except binascii.Error:
                head = b""
            if b"%PDF-" in head:
                return block
            return self._left_out("unreadable_documents_left_out", "A document", "it is no PDF")
        if kind != "image":
            return block
        key = hashlib.sha256(source["data"].encode()).hexdigest()
        if key not in self._known:
            try:
                self._known[key] = await self._aside.reading.call(fitted, source["data"])
            except (Unreadable, OutOfBoundsError) as exc:
                self._known[key] = str(exc)
        found = self._known[key]
        if found is None:
            return block
        if isinstance(found, str):
            return self._left_out("unreadable_images_left_out", "An image", found)
        self._changed["images_made_smaller"] += 1
        return {**block, "source": {"type": "base64", "media_type": found.media_type, "data": found.data}}

    def _left_out(self, code: Code, what: str, why: str) -> Block:
        self._changed[code] += 1
        return {"type": "text", "text": f"[{what} was left out here: {why}.]"}
