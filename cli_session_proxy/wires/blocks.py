"""Shared by several wires: images, files, calls without ids, efforts, token estimates. Pure."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections import deque
from collections.abc import Iterable

from ..domain.models import Block, Message, Tool
from ..errors import InvalidRequest

# Image types of the Messages API (its documentation, "Vision").
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

# Files that the Messages API takes as documents, beside `text/*`.
PDF = "application/pdf"
TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml")
MAX_TITLE = 255  # characters of a file's name: no file system allows more
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


def from_base64(data: str, param: str) -> bytes:
    """The bytes of a text in standard base64. Raises `InvalidRequest`."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as exc:  # also for characters outside of ASCII
        raise InvalidRequest(f"{param} is not valid base64", param=param) from exc


def base64_image(media_type: str, data: str, param: str) -> Block:
    """An image block from standard base64. Raises `InvalidRequest`."""
    media_type = media_type.lower()
    if media_type not in IMAGE_TYPES:
        raise InvalidRequest(f"{param}: the image must be one of {', '.join(IMAGE_TYPES)}", param=param)
    if not from_base64(data, param):
        raise InvalidRequest(f"{param} holds no image", param=param)
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def base64_file(media_type: str, data: str, param: str, title: str | None = None) -> Block:
    """An image block, or a document block of a PDF or a text. Raises `InvalidRequest`."""
    kind = media_type.partition(";")[0].strip().lower()
    if kind in IMAGE_TYPES:
        return base64_image(kind, data, param)
    if kind != PDF and not kind.startswith("text/") and kind not in TEXT_TYPES:
        raise InvalidRequest(f"{param}: a file must be a PDF, a text or an image, not {media_type!r}", param=param)
    raw = from_base64(data, param)
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


def in_base64(source: Block) -> str:
    """The data of an image's or document's source, which may be a text."""
    data: str = source["data"]
    return data if source["type"] == "base64" else base64.b64encode(data.encode("utf-8", "surrogatepass")).decode()


def named_file(data: str, name: str | None, param: str) -> Block:
    """A file of OpenAI's wires: a data URL, or base64 whose type follows from its name. Raises `InvalidRequest`."""
    head = _DATA_URL.match(data)
    if head is not None and head[2].lower() == ";base64":
        return base64_file(head[1], data[head.end() :], param, name)
    if is_web_address(data):
        raise InvalidRequest(f"{param}: {BY_DATA}", param=param)
    return base64_file(mimetypes.guess_type(name or "")[0] or PDF, data, param, name)


def image_block(url: str, param: str) -> Block:
    """An image by http(s) URL or as a data URL; `param`: the name of its field. Raises `InvalidRequest`."""
    if is_web_address(url):
        return {"type": "image", "source": {"type": "url", "url": url}}
    head = _DATA_URL.match(url)
    if head is None or head[2].lower() != ";base64":
        raise InvalidRequest(f"{param} must be an http(s) URL or data:image/…;base64,…", param=param)
    return base64_image(head[1], url[head.end() :], param)


class OpenCalls:
    """Calls in a history without a result yet, for wires on which calls may have no ids."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        # Ids by function, and under None all of them, including answered ones.
        self._of: dict[str | None, deque[str]] = {None: deque()}
        self._count = 0

    def next_answer(self) -> None:
        """A new answer of the model begins: open calls of earlier answers were given up, and get no later results."""
        self._open.clear()

    def call(self, given: str | None, name: str) -> str:
        self._count += 1
        made = given or f"call_{self._count}"
        self._open.add(made)
        self._of.setdefault(name, deque()).append(made)
        self._of[None].append(made)
        return made

    def result(self, given: str | None, name: str | None) -> str:
        """The id of the call to which a result belongs: the named one, else the oldest open call (of that function)."""
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
            kind, source = block["type"], block.get("source")
            if kind == "image" or (kind == "document" and isinstance(source, dict) and source["type"] == "base64"):
                tokens += TOKENS_PER_IMAGE  # or one page of a PDF
                continue
            text = block.get(block["type"])
            tokens += _tokens(text if isinstance(text, str) else json.dumps(block, ensure_ascii=False))
    return max(1, round(tokens))


def _tokens(text: str) -> float:
    return len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN
