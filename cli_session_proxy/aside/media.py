"""Fits images and documents to the model's limits: one that it cannot read would fail every later request."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..domain.evidence import NoteCode
from ..domain.models import Block
from .attachments import Fitted, UnreadableImage, document_fault, fitted_image
from .pool import Aside, OutOfBoundsError

# How many results are cached. Each may have a smaller image of up to 5 MB.
CACHED = 16


@dataclass(frozen=True, slots=True)
class ReplacedBlock:
    """The replacement of a block, and the reason."""

    code: NoteCode
    block: Block


class Media:
    """One per history or prompt, with a cache of results. The work is done in a helper process."""

    def __init__(self, aside: Aside, *, accepted: bool = False) -> None:
        """`accepted`: see `Helpers.call`."""
        self._aside = aside
        self._accepted = accepted
        # By hash of the data: a smaller image, or why it cannot be read, or None if it can stay.
        self._cache: OrderedDict[str, Fitted | str | None] = OrderedDict()

    async def fitted(self, blocks: Sequence[Block], changed: Counter[NoteCode]) -> tuple[Block, ...]:
        """The blocks as the model accepts them. Adds to `changed` what is different."""
        out: list[Block] = []
        for block in blocks:
            if block.get("type") == "tool_result" and isinstance(block.get("content"), list):
                out.append({**block, "content": list(await self.fitted(block["content"], changed))})
                continue
            replaced = await self.replacement(block)
            if replaced is not None:
                changed[replaced.code] += 1
            out.append(block if replaced is None else replaced.block)
        return tuple(out)

    async def replacement(self, block: Block) -> ReplacedBlock | None:
        """The replacement of an image or document; None if it can stay."""
        source = block.get("source")
        kind = block.get("type")
        if kind not in ("image", "document") or not isinstance(source, dict) or source.get("type") != "base64":
            return None
        if kind == "document":
            why = await self.document_error(source)
            return None if why is None else ReplacedBlock("unreadable_documents_left_out", _left_out("A document", why))
        result = await self._checked(fitted_image, source)
        if result is None:
            return None
        if isinstance(result, str):
            return ReplacedBlock("unreadable_images_left_out", _left_out("An image", result))
        smaller = {"type": "base64", "media_type": result.media_type, "data": result.data}
        return ReplacedBlock("images_made_smaller", {**block, "source": smaller})

    async def document_error(self, source: Block) -> str | None:
        """Why a PDF cannot be read; None if it can."""
        result = await self._checked(document_fault, source)
        assert not isinstance(result, Fitted)
        return result

    async def _checked(self, check: Callable[[str], Fitted | str | None], source: Block) -> Fitted | str | None:
        """The result of `check`, cached; if it raises, the message of the error."""
        data = str(source.get("data", ""))
        key = await asyncio.to_thread(lambda: hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest())
        if key not in self._cache:
            try:
                self._cache[key] = await self._aside.reading.call(check, data, accepted=self._accepted)
            except (UnreadableImage, OutOfBoundsError) as exc:
                self._cache[key] = str(exc)
        result = self._cache[key]
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return result


def _left_out(what: str, why: str) -> Block:
    return {"type": "text", "text": f"[{what} was left out here: {why}.]"}
