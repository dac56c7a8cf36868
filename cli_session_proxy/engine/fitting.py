"""Fits images and documents of a client's history to the model's limits: one that is too large would fail every later
request.

The chain keeps the originals, by which it recognises the history; only the copy for the model is smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..aside.media import Media
from ..aside.pool import Aside
from ..domain.lineage import Past
from ..domain.models import Block, Message
from ..domain.notes import Code, Note
from ..errors import InvalidRequest


@dataclass
class RequestFitting:
    """One per request, so that equal data is checked once."""

    aside: Aside
    _changed: Counter[Code] = field(init=False)  # in the current exchange

    @cached_property
    def _media(self) -> Media:
        return Media(self.aside)

    async def check(self, document: Block) -> None:
        """Raises `InvalidRequest` for an unreadable PDF in the newest message, before it becomes part of the chain."""
        source = document.get("source")
        if not isinstance(source, dict) or source.get("type") != "base64":
            return
        why = await self._media.fault(source)
        if why is not None:
            raise InvalidRequest(
                f"the PDF in the newest message cannot be read: {why}. Nothing was sent to the model; send the "
                "message without it, or a PDF that can be read",
                param="messages",
            )

    async def fit(self, past: Past) -> Past:
        """The exchange as the model accepts it, with notes of what was changed."""
        self._changed = Counter()
        asked = tuple([Message(one.role, await self._blocks(one.content)) for one in past.input])
        notes = tuple(Note(code, number) for code, number in self._changed.items())
        return replace(past, input=asked, notes=(*past.notes, *notes)) if notes else past

    async def _blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        out: list[Block] = []
        for block in blocks:
            if block.get("type") == "tool_result" and isinstance(block.get("content"), list):
                out.append({**block, "content": list(await self._blocks(block["content"]))})
                continue
            changed = await self._media.changed(block)
            if changed is not None:
                self._changed[changed.code] += 1
            out.append(block if changed is None else changed.block)
        return tuple(out)
