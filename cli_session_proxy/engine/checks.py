"""Validates answers and arguments by the client's JSON Schemas, and fits its images to the model's limits. This runs in
helper processes, which can be killed: a hostile schema or image can take for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..aside.media import Media
from ..aside.pool import Aside, OutOfBoundsError
from ..domain import structured
from ..domain.evidence import NoteCode
from ..domain.models import JSON, Block
from ..errors import InvalidRequest


class Checks:
    """One per engine."""

    def __init__(self, aside: Aside) -> None:
        self._aside = aside
        self._helpers = aside.checking

    def expect(self) -> None:
        """Start the validating process early, while the model thinks."""
        self._helpers.expect()

    async def answer(self, format: JSON, output: Sequence[Block]) -> list[Block]:
        """The answer with one text block that is the JSON. Raises `InvalidOutput`, `InvalidRequest`."""
        text = "".join(block["text"] for block in output if block.get("type") == "text")
        try:
            text = await self._helpers.call(structured.checked, format, text)
        except OutOfBoundsError as exc:
            raise _too_much("the answer", exc) from exc
        return [*(block for block in output if block.get("type") != "text"), {"type": "text", "text": text}]

    async def arguments(self, value: object, schema: JSON) -> str | None:
        """The error in a call's arguments, if any (`client_tools.Check`). Raises `InvalidRequest`."""
        try:
            return await self._helpers.call(structured.fault_of, value, schema)
        except OutOfBoundsError as exc:
            raise _too_much("the arguments of a call", exc) from exc

    async def media(self, blocks: Sequence[Block], changed: Counter[NoteCode]) -> tuple[Block, ...]:
        """See `Media.fitted`."""
        return await Media(self._aside, accepted=True).fitted(blocks, changed)


def _too_much(what: str, why: OutOfBoundsError) -> InvalidRequest:
    return InvalidRequest(f"{what} cannot be held against the JSON Schema: {why}; send a simpler one", param="schema")
