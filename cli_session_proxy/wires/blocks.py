"""What several wires read and count alike: images, the end of a conversation, effort, estimates. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import mimetypes
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..domain import limits
from ..domain.client_tools import UNPARSED
from ..domain.models import JSON, Block, Message, Tool
from ..domain.reminders import reminder
from ..errors import InvalidRequest
from .common import required, wrong_type

# A part of a content as the wire sent it, and what reads one of its type, at its place in the body.
Part = Mapping[str, Any]
Reader = Callable[[Part, str], "Block | None"]

# What the Messages API takes as an image (its documentation, "Vision").
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

# Files that the Messages API takes as documents, beside `text/*`.
PDF = "application/pdf"
TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml")
MAX_TITLE = 255  # characters of a file's name: more no file system has
BY_DATA = "files are taken by their data, not by URL or id: send the content in base64"

# The CLI has no option for a thinking budget, only efforts. No vendor publishes a table: below the first bound is
# `low`, below the second `medium`, the rest `high` (LiteLLM's own table starts high at 4096).
LOW_BUDGET, MEDIUM_BUDGET = 2048, 4096

# Bytes of English text a token, and tokens of a message's frame and of an image of full size (1568 px a side), as
# Anthropic's documentation gives them ("Token counting", "Vision"). An estimate: a real count needs the provider.
BYTES_PER_TOKEN, TOKENS_PER_MESSAGE, TOKENS_PER_IMAGE = 3.5, 4, 1600

_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.I)


def is_web_address(url: str) -> bool:
    return url[:7].lower() == "http://" or url[:8].lower() == "https://"


def base64_image(media_type: str, data: str, param: str) -> Block:
    """An image block of standard base64. Raises `InvalidRequest`."""
    media_type = media_type.lower()
    if media_type not in IMAGE_TYPES:
        raise InvalidRequest(f"{param}: the image must be one of {', '.join(IMAGE_TYPES)}", param=param)
    try:
        empty = not base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as exc:  # ValueError: letters beyond ASCII
        raise InvalidRequest(f"{param} is not valid base64", param=param) from exc
    if empty:
        raise InvalidRequest(f"{param} holds no image", param=param)
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def base64_file(media_type: str, data: str, param: str, title: str | None = None) -> Block:
    """An image, or a document block of a PDF or of a text. Raises `InvalidRequest`."""
    kind = media_type.partition(";")[0].strip().lower()
    if kind in IMAGE_TYPES:
        return base64_image(kind, data, param)
    if kind != PDF and not kind.startswith("text/") and kind not in TEXT_TYPES:
        raise InvalidRequest(f"{param}: a file must be a PDF, a text or an image, not {media_type!r}", param=param)
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest(f"{param} is not valid base64", param=param) from exc
    if not raw:
        raise InvalidRequest(f"{param} holds nothing", param=param)
    if kind == PDF:
        return document({"type": "base64", "media_type": PDF, "data": data}, title)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"{param}: a text must be UTF-8", param=param) from exc
    if not text.strip():
        raise InvalidRequest(f"{param} holds no words", param=param)
    return document({"type": "text", "media_type": "text/plain", "data": text}, title)


def document(source: Block, title: str | None) -> Block:
    named = {} if not title else {"title": title[:MAX_TITLE]}
    return {"type": "document", "source": source, **named}


def named_file(data: str, name: str | None, param: str) -> Block:
    """A file as OpenAI's wires bring it: a data URL, or base64 whose type its name tells. Raises `InvalidRequest`."""
    head = _DATA_URL.match(data)
    if head is not None and head[2].lower() == ";base64":
        return base64_file(head[1], data[head.end() :], param, name)
    if is_web_address(data):
        raise InvalidRequest(f"{param}: {BY_DATA}", param=param)
    return base64_file(mimetypes.guess_type(name or "")[0] or PDF, data, param, name)


def image_block(url: str, param: str) -> Block:
    """An image by http(s) URL or as a data URL; `param` is the field it stood in. Raises `InvalidRequest`."""
    if is_web_address(url):
        return {"type": "image", "source": {"type": "url", "url": url}}
    head = _DATA_URL.match(url)
    if head is None or head[2].lower() != ";base64":
        raise InvalidRequest(f"{param} must be an http(s) URL or data:image/…;base64,…", param=param)
    return base64_image(head[1], url[head.end() :], param)


def typed_blocks(parts: Iterable[object], where: str, kinds: Mapping[str, Reader]) -> list[Block]:
    """What `kinds` make of parts by their `type`; those that say nothing are left out. Raises `InvalidRequest`."""
    read: list[Block] = []
    for index, part in enumerate(parts):
        here = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise wrong_type(here, "an object")
        kind = required(part, "type", str, "a string", where=f"{here}.")
        if kind not in kinds:
            raise InvalidRequest(f"{here}: {kind!r} is not supported here; send {' or '.join(kinds)}", param=here)
        if (block := kinds[kind](part, here)) is not None:
            read.append(block)
    return read


def read_content(message: Part, where: str, kinds: Mapping[str, Reader], parts: str) -> tuple[Block, ...]:
    """The `content` of a message: a text, or a list of `parts` (as the wire calls them). Raises `InvalidRequest`."""
    content = message.get("content")
    if isinstance(content, str):
        return ({"type": "text", "text": content},) if content else ()
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", f"a string or a list of {parts}")
    return tuple(typed_blocks(content, f"{where}.content", kinds))


def read_text(part: Part, where: str) -> Block | None:
    """A part of type `text`; None where it says nothing."""
    text = required(part, "text", str, "a string", where=f"{where}.")
    return {"type": "text", "text": text} if text else None


def telling(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Without white text blocks, which the Messages API refuses, where another block says something."""
    return tuple(block for block in blocks if block["type"] != "text" or block["text"].strip()) or blocks


@dataclass(slots=True)
class Instructions:
    """The system and developer messages of one body: those before the conversation are its system prompt, a later one
    stays where it is (`reminders`)."""

    system: list[str] = field(default_factory=list)

    def place(self, text: str, where: str, conversation: list[tuple[str, Message]]) -> None:
        if not text.strip():
            return
        if conversation:
            conversation.append((where, reminder(text)))
        else:
            self.system.append(text)

    def alone(self, where: str, conversation: list[tuple[str, Message]]) -> None:
        """Nothing else was said: the last of them is what is asked."""
        if not conversation and self.system:
            conversation.append((where, reminder(self.system.pop())))


def checked_conversation(conversation: Sequence[tuple[str, Message]]) -> tuple[Message, ...]:
    """The messages, each with its place in the body, where the last one asks something. Raises `InvalidRequest`."""
    if not conversation:
        raise InvalidRequest("messages must hold a user message", param="messages")
    where, last = conversation[-1]
    if last.role != "user":
        raise InvalidRequest("the last message must be the user's or a tool's", param=f"{where}.role")
    if not any(block["type"] != "text" or block["text"].strip() for block in last.content):
        raise InvalidRequest(f"{where}.content is empty: send a text or an image", param=f"{where}.content")
    # A program that resumes may send the results of its last calls again: equal ones count once.
    out: list[Message] = []
    told: dict[str, Block] = {}  # since the last message of the model's
    for _, message in conversation:
        if message.role == "assistant":
            told = {}
        kept: list[Block] = []
        for block in message.content:
            if block["type"] == "tool_result":
                call = str(block["tool_use_id"])
                if told.get(call) == block:
                    continue
                told.setdefault(call, block)
            kept.append(block)
        if len(kept) == len(message.content):
            out.append(message)
        elif kept:
            out.append(Message(message.role, tuple(kept)))
    return tuple(out)


def stop_texts(given: object, where: str) -> tuple[str, ...]:
    """The texts before which the answer ends; empty ones say nothing. Raises `InvalidRequest`."""
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise wrong_type(where, "a list of strings")
    limits.at_most(given, limits.STOPS, where)
    if any(len(stop) > limits.STOP_LENGTH for stop in given):
        raise InvalidRequest(f"{where}: a stop text has at most {limits.STOP_LENGTH} characters", param=where)
    return tuple(stop for stop in given if stop)


def arguments(text: str | None, where: str) -> JSON:
    """The arguments of a call in a client's history. What is no JSON object (a call that was cut off) is kept as text:
    refused, it would make every later request of that client fail. Raises `InvalidRequest`."""
    try:
        given = limits.loads(text or "{}")
    except limits.TooDeep as exc:
        raise InvalidRequest(f"{where} cannot be used: {exc}; send it flatter", param=where) from exc
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {UNPARSED: text}


def checked_arguments(conversation: Iterable[Message], where: str) -> None:
    """Arguments that came as text are JSON, and of all calls together as large as a body. Raises `InvalidRequest`."""
    arguments = [block["input"] for message in conversation for block in message.content if block["type"] == "tool_use"]
    if not arguments:
        return
    if limits.holds_more(arguments, limits.VALUES):
        raise InvalidRequest(
            f"{where}: the arguments of the calls have more than {limits.VALUES:,} JSON values: send less", param=where
        )
    try:  # the fingerprint has seen them as a text; half a character in one stays: a model may have said it
        json.dumps(arguments, allow_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"{where}: the arguments of a call hold a number that is not JSON", param=where) from exc


class OpenCalls:
    """The calls of a history that wait for a result, on wires whose clients may give them no ids."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        # Ids by function, and under None all of them; those that are answered are still among them.
        self._of: dict[str | None, deque[str]] = {None: deque()}
        self._count = 0

    def call(self, given: str | None, name: str) -> str:
        self._count += 1
        made = given or f"call_{self._count}"
        self._open.add(made)
        self._of.setdefault(name, deque()).append(made)
        self._of[None].append(made)
        return made

    def result(self, given: str | None, name: str | None) -> str:
        """The id of the call this answers: the one it names, else the oldest open call (of that function)."""
        if given is not None:
            self._open.discard(given)
            return given
        waiting = self._of.get(name, deque())
        while waiting:
            if (oldest := waiting.popleft()) in self._open:
                self._open.discard(oldest)
                return oldest
        self._count += 1
        return f"call_{self._count}"


def effort_of_budget(tokens: int) -> str:
    """The CLI's effort for a thinking budget in tokens."""
    if tokens < LOW_BUDGET:
        return "low"
    return "medium" if tokens < MEDIUM_BUDGET else "high"


def estimated_tokens(system: str | None, messages: Iterable[Message], tools: Iterable[Tool] = ()) -> int:
    """About how many tokens these are; no count, as only the provider can count."""
    tokens = _tokens(system) if system else 0.0
    tokens += sum(_tokens(json.dumps(tool.as_json(), ensure_ascii=False)) for tool in tools)
    for message in messages:
        tokens += TOKENS_PER_MESSAGE
        for block in message.content:
            if block["type"] == "image" or block.get("source", {}).get("type") == "base64":
                tokens += TOKENS_PER_IMAGE  # of a PDF, a page
                continue
            text = block.get(block["type"])
            tokens += _tokens(text if isinstance(text, str) else json.dumps(block, ensure_ascii=False))
    return max(1, round(tokens))


def _tokens(text: str) -> float:
    return len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN


def opened(block: Block) -> tuple[Block, list[Block]]:
    """A whole block as a stream tells it: what it starts as, and its deltas."""
    kind = block["type"]
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if kind == "thinking":
        signed = [{"type": "signature_delta", "signature": block["signature"]}] if block.get("signature") else []
        told = {"type": "thinking_delta", "thinking": block.get("thinking", "")}
        return {**block, "thinking": "", "signature": ""}, [told, *signed]
    if kind == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return dict(block), []
