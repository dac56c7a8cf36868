"""Converts LiteLLM's chunks to a turn's events: texts and thinking as they arrive, complete calls at the end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...domain import limits
from ...domain.blocks import as_stream
from ...domain.client_tools import UNPARSED, CallIds, short_name
from ...domain.models import JSON, Block, BlockDelta, BlockStart, BlockStop, Tool, Usage
from ...errors import UpstreamError
from .messages import call_id

# LiteLLM appends Google's signature of a thought to the id of the call that follows it.
SIGNATURE = "__thought__"
# The most calls in one answer: a model that makes more is in a loop.
MOST_CALLS = 128
# The most characters of one answer with its calls, because a server may never end. Each piece counts A_PIECE more.
MOST, A_PIECE = 64 * 1024 * 1024, 64


@dataclass(slots=True)
class ModelAnswer:
    """An answer that is being received. `used_ids`: ids of the calls on the path, and of this answer's."""

    tools: Mapping[str, Tool]
    used_ids: CallIds
    blocks: list[Block] = field(default_factory=list)
    model: str | None = None
    finish: str | None = None
    usage: Usage | None = None
    _open: str | None = None
    _texts: list[str] = field(default_factory=list)  # of the open block
    _left: int = MOST
    _calls: dict[int, JSON] = field(default_factory=dict)

    def feed(self, chunk: Any) -> Iterator[BlockStart | BlockDelta | BlockStop]:
        """The events of this chunk. Raises `UpstreamError` for an answer beyond the bounds."""
        self.model = getattr(chunk, "model", None) or self.model
        if (used := getattr(chunk, "usage", None)) is not None:
            self.usage = usage(used)
        for choice in (getattr(chunk, "choices", None) or ())[:1]:
            self.finish = choice.finish_reason or self.finish
            delta = choice.delta
            if thought := getattr(delta, "reasoning_content", None):
                yield from self._piece("thinking", thought)
            if text := getattr(delta, "content", None):
                yield from self._piece("text", text)
            for call in getattr(delta, "tool_calls", None) or ():
                known = self._calls.setdefault(call.index or 0, {"id": None, "name": "", "arguments": []})
                if len(self._calls) > MOST_CALLS:
                    raise UpstreamError(f"the model made more than {MOST_CALLS} calls at once: send it again")
                known["id"] = known["id"] or call.id
                known["name"] = known["name"] or (call.function.name or "")
                known["arguments"].append(self._counted(call.function.arguments or ""))

    def _counted(self, piece: str) -> str:
        self._left -= len(piece) + A_PIECE
        if self._left < 0:
            raise UpstreamError(f"the model's answer has more than {MOST:,} characters: send it again")
        return piece

    def _piece(self, kind: str, text: str) -> Iterator[BlockStart | BlockDelta | BlockStop]:
        if self._open != kind:
            yield from self.close()
            self._open = kind
            opening: Block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            yield BlockStart(len(self.blocks), opening)
            self.blocks.append(dict(opening))
        self._texts.append(self._counted(text))  # joined at the end: 2 MB in 20,000 pieces took 30 s
        yield BlockDelta(len(self.blocks) - 1, {"type": f"{kind}_delta", kind: text})

    def close(self) -> Iterator[BlockStop]:
        """End the open block. Only now its text is set in `blocks`."""
        if self._open is not None:
            self.blocks[-1][self._open] = "".join(self._texts)
            self._texts.clear()
            self._open = None
            yield BlockStop(len(self.blocks) - 1)

    def calls(self) -> list[Block]:
        """The answer's calls, with the client's tool names. Raises `UpstreamError` for an unknown tool."""
        out: list[Block] = []
        for _, call in sorted(self._calls.items()):
            tool = self.tools.get(call["name"]) or self.tools.get(short_name(call["name"]))
            if tool is None:
                raise UpstreamError(
                    f"the model called {call['name'][:64]!r}, which is not among the tools: send it again"
                )
            known = call_id(str(call["id"]).partition(SIGNATURE)[0]) if call["id"] else ""
            if not known or known in self.used_ids:  # some servers number the calls of each answer from 0
                known = f"call_{uuid.uuid4().hex[:24]}"
            self.used_ids.add(known)
            out.append(
                {"type": "tool_use", "id": known, "name": tool.name, "input": _arguments("".join(call["arguments"]))}
            )
        return out


def shown(calls: list[Block], first: int) -> Iterator[BlockStart | BlockDelta | BlockStop]:
    """The events of complete calls."""
    for index, call in enumerate(calls, first):
        opening, deltas = as_stream(call)
        yield BlockStart(index, opening)
        yield from (BlockDelta(index, delta) for delta in deltas)
        yield BlockStop(index)


def usage(used: Any) -> Usage:
    """The chain's usage: tokens read from and written to the cache are counted separately."""
    prompt, answer = limits.count(used.prompt_tokens), limits.count(used.completion_tokens)
    of_prompt, of_answer = (getattr(used, f"{name}_tokens_details", None) for name in ("prompt", "completion"))
    read = limits.count(getattr(of_prompt, "cached_tokens", None))
    written = limits.count(getattr(used, "cache_creation_input_tokens", None))
    thought = limits.count(getattr(of_answer, "reasoning_tokens", None))
    return Usage(max(0, prompt - read - written), answer, read, written, thought)


def _arguments(text: str) -> JSON:
    try:
        value = limits.loads(text, strict=True) if text.strip() else {}
    except limits.TooDeep as exc:
        raise UpstreamError(
            f"the model called a tool with arguments that cannot be used: {exc}; send it again"
        ) from exc
    except ValueError:
        return {UNPARSED: text}
    return value if isinstance(value, dict) else {UNPARSED: text}
