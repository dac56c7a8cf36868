"""Converts a path of the chain to OpenAI's messages, for LiteLLM. Pure.

Done for each request; the chain does not change. The same path always gives the same messages, and a longer path begins
with those of a shorter one, so that the provider's prompt cache is used. Thinking is left out: its signature is valid
for its own model only. Each call is followed by its result, under an id that all providers accept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...domain.blocks import contents
from ...domain.client_tools import NOT_ANSWERED, UNPARSED, calls_of, short_name
from ...domain.evidence import Note, NoteCode
from ...domain.lineage import answer_text
from ...domain.models import JSON, THINKING, Block, Message, Tool

EMPTY = "[This message was empty.]"
OPENED_BY_ASSISTANT = "[The assistant opened the conversation.]"
FAILED = "[The call failed.]\n"
# OpenAI accepts call ids of up to 40 characters, Anthropic these characters.
_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def call_id(known: str) -> str:
    """A call id that every provider accepts: the chain's own, or one derived from it."""
    if _ID.fullmatch(known):
        return known
    return f"call_{hashlib.sha256(known.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


@dataclass(slots=True)
class Rendering:
    """Renders a path for one model. `images`, `documents`: whether the model accepts them; `left_out` counts those that
    it does not."""

    images: bool = True
    documents: bool = True
    thinking_as_text: bool = False
    left_out: Counter[NoteCode] = field(default_factory=Counter)

    def messages(
        self, path: Iterable[tuple[Sequence[Message], Sequence[Block]]], new: Sequence[Message], added: Sequence[Block]
    ) -> list[JSON]:
        """The path's exchanges, then the new messages, then `added`, which only this request has."""
        out: list[JSON] = []
        open_calls: list[str] = []
        for messages, answer in path:
            out += self.user_messages(messages, open_calls)
            out.append(self.assistant_message(answer))
            open_calls = calls_of(answer)
        return [*out, *self.user_messages(new, open_calls, added)]

    def user_messages(
        self, messages: Sequence[Message], open_calls: Sequence[str], added: Sequence[Block] = ()
    ) -> list[JSON]:
        """A message for the result of each open call, then the user's message."""
        results: dict[str, Block] = {}
        rest: list[Block] = []
        for block in (block for message in messages for block in message.content):
            call = str(block.get("tool_use_id"))
            if block.get("type") != "tool_result":
                rest.append(block)
            elif call in open_calls and call not in results:
                results[call] = block
            else:  # a result without a call, of an imported history
                rest += contents(block)
        out: list[JSON] = []
        media: list[JSON] = []
        for call in open_calls:
            result, shown = self._result(results.get(call), call)
            out.append(result)
            media += shown
        parts = [*media, *(part for block in (*rest, *added) for part in self._parts(block))]
        if parts:
            texts = [part["text"] for part in parts if part["type"] == "text"]
            # Only texts: one string, because some servers accept nothing else.
            out.append({"role": "user", "content": "\n\n".join(texts) if len(texts) == len(parts) else parts})
        return out or [{"role": "user", "content": EMPTY if messages else OPENED_BY_ASSISTANT}]

    def _result(self, block: Block | None, call: str) -> tuple[JSON, list[JSON]]:
        """A result's message, which has only text, and its images and files, which go into the user's message."""
        reply: JSON = {"role": "tool", "tool_call_id": call_id(call)}
        if block is None:
            return {**reply, "content": NOT_ANSWERED}, []
        parts = [part for one in contents(block) for part in self._parts(one)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        media = [part for part in parts if part["type"] != "text"]
        if media:
            texts.append("[What this call shows follows in the next message of the user.]")
            media.insert(0, {"type": "text", "text": f"[This is what the call {call_id(call)} shows:]"})
        content = "\n".join(texts) or "(no content)"
        return {**reply, "content": f"{FAILED}{content}" if block.get("is_error") else content}, media

    def assistant_message(self, blocks: Sequence[Block]) -> JSON:
        """An answer with its calls. Thinking is left out, or comes first as text."""
        text = _unicode(answer_text(blocks))
        if self.thinking_as_text:
            thoughts = "\n".join(str(block["thinking"]) for block in blocks if block.get("thinking"))
            text = f"<thinking>\n{_unicode(thoughts)}\n</thinking>\n{text}" if thoughts else text
        calls: list[JSON] = []
        for block in blocks:
            if block.get("type") == "tool_use":
                asked = block.get("input") or {}
                if set(asked) == {UNPARSED}:
                    asked = {"text": asked[UNPARSED]}
                function = {
                    "name": short_name(str(block.get("name"))),
                    "arguments": _unicode(json.dumps(asked, ensure_ascii=False)),
                }
                calls.append({"id": call_id(str(block.get("id"))), "type": "function", "function": function})
        if calls:
            return {"role": "assistant", "content": text or None, "tool_calls": calls}
        return {"role": "assistant", "content": text or EMPTY}

    def _parts(self, block: Block) -> list[JSON]:
        kind, source = block.get("type"), block.get("source")
        if kind == "text":
            text = _unicode(str(block.get("text", "")))
            return [{"type": "text", "text": text}] if text.strip() else []
        if kind in THINKING:
            return []
        source = source if isinstance(source, dict) else {}
        if kind == "image" and self.images:
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            return [{"type": "image_url", "image_url": {"url": url}}]
        if kind == "document" and source.get("type") == "text":
            return [{"type": "text", "text": _unicode(f"{block.get('title') or 'Document'}:\n{source.get('data')}")}]
        if kind == "document" and source.get("type") == "content":
            inner = source.get("content")
            blocks = [{"type": "text", "text": inner}] if isinstance(inner, str) else inner or ()
            return [part for one in blocks for part in self._parts(one)]
        if kind == "document" and self.documents and source.get("type") == "base64":
            name = str(block.get("title") or "document.pdf")
            data = f"data:{source.get('media_type') or 'application/pdf'};base64,{source.get('data')}"
            return [{"type": "file", "file": {"filename": name, "file_data": data}}]
        if kind == "image":
            self.left_out["model_takes_no_images"] += 1
            return [{"type": "text", "text": "[An image stood here. This model takes none.]"}]
        if kind == "document":
            self.left_out["model_takes_no_documents"] += 1
            return [{"type": "text", "text": "[A document stood here. This model does not take it.]"}]
        return [{"type": "text", "text": _unicode(json.dumps(block, ensure_ascii=False))}]

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(Note(code, number) for code, number in self.left_out.items())


def offered(tools: Sequence[Tool], allowed: Sequence[str] | None) -> list[JSON]:
    """The client's tools, with names that every provider accepts. If several are `allowed`, only those; a single one is
    named in the request's tool choice instead."""
    return [
        {
            "type": "function",
            "function": {
                "name": short_name(tool.name),
                "description": tool.description,
                "parameters": {"type": "object", "properties": {}, **tool.schema},
            },
        }
        for tool in tools
        if allowed is None or len(allowed) == 1 or tool.name in allowed
    ]


def kinds_in(blocks: Iterable[Block]) -> set[str]:
    """The types of these blocks and of those within results."""
    found: set[str] = set()
    for block in blocks:
        found.add(str(block.get("type")))
        if block.get("type") == "tool_result":
            found |= kinds_in(contents(block))
    return found


def _unicode(text: str) -> str:
    """The text without unpaired surrogates, which providers refuse."""
    return _SURROGATE.sub("\ufffd", text)
