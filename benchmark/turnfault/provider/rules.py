"""What the Messages API refuses, as far as a conversation can be made of it: checked before a request is answered.

The texts are the API's own, as far as they are known: the CLI goes by their words. `Rules` are the limits of one
model; a test may set smaller ones. Thinking is sealed: the signature of a block covers the model, the tools, the system
prompt and everything before the block, as newer models do it (documentation of the API, "prefix checks").
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .script import Block, Fail
from .seen import marked_lines, parts

JSON = dict[str, Any]

BYTES_PER_TOKEN = 4  # the usual rule of thumb for English
# The field of a block of thinking that holds its seal.
SEALS = {"thinking": "signature", "redacted_thinking": "data"}

_TOOL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# The types of blocks in messages; the API takes more results of tools that it runs itself (`…_tool_result`).
_TYPES = frozenset(
    ("text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result",
     "tool_reference", "server_tool_use", "mcp_tool_use", "container_upload")
)  # fmt: skip
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_PDF_PAGE = re.compile(rb"/Type\s*/Page\b")


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of a model and of the API. Sizes in bytes, lengths in pixels; `context` in tokens, None: any length."""

    context: int | None = None
    request_bytes: int = 32 * 1024 * 1024
    image_bytes: int = 5 * 1024 * 1024  # of its base64
    image_side: int = 8000
    many_images: int = 20  # with more than so many in a request …
    many_images_side: int = 2000  # … none may be longer than this
    pdf_pages: int = 100
    breakpoints: int = 4


class _Refused(Exception):
    pass


def refusal(rules: Rules, raw: bytes, body: JSON) -> Fail | None:
    """The error that the API answers this request with; None where it takes it."""
    if len(raw) > rules.request_bytes:
        return Fail(413, message="Request exceeds the maximum size")
    if b"\\ud" in raw.lower() and _HALF_A_PAIR.search(json.dumps(body, ensure_ascii=False)):
        return Fail(400, message="The request body is not valid JSON: no low surrogate in string")
    try:
        _check(rules, body)
    except _Refused as refused:
        return Fail(400, message=str(refused))
    return None


def _check(rules: Rules, body: JSON) -> None:
    messages = [message for message in body.get("messages") or () if isinstance(message, dict)]
    _check_blocks(rules, messages)
    _check_pairs([message for message in messages if message.get("role") != "system"])
    marked = sum(line.marked for line in marked_lines(body))
    if marked > rules.breakpoints:
        raise _Refused(f"A maximum of {rules.breakpoints} blocks with cache_control may be provided. Found {marked}.")
    _check_images(rules, messages)
    _check_seals(body)
    if rules.context is not None:
        tokens = sum(len(line.text) for line in marked_lines(body)) // BYTES_PER_TOKEN
        if tokens > rules.context:
            raise _Refused(f"prompt is too long: {tokens} tokens > {rules.context} maximum")


def _check_blocks(rules: Rules, messages: list[JSON]) -> None:
    spoken = [message for message in messages if message.get("role") != "system"]
    if not spoken:
        raise _Refused("messages: at least one message is required")
    if spoken[0].get("role") != "user":
        raise _Refused('messages: first message must use the "user" role')
    for at, message in enumerate(messages):
        blocks = parts(message.get("content"))
        if not blocks and message.get("role") != "system":  # the CLI sends empty ones of its own
            raise _Refused(f"messages.{at}: all messages must have non-empty content")
        for where, block in _walk(blocks, f"messages.{at}.content"):
            kind = str(block.get("type"))
            if kind not in _TYPES and not kind.endswith("_tool_result"):
                tags = ", ".join(map(repr, sorted(_TYPES)))
                raise _Refused(
                    f"{where}: Input tag {kind!r} found using 'type' does not match any of the expected tags: {tags}"
                )
            if kind == "text" and not str(block.get("text", "")).strip():
                words = "be non-empty" if not block.get("text") else "contain non-whitespace text"
                if "cache_control" in block:
                    raise _Refused(f"{where}.cache_control: cache_control cannot be set for empty text blocks")
                raise _Refused(f"messages: text content blocks must {words}")
            if kind == "tool_use":
                _check_id(block.get("id"), f"{where}.tool_use.id")
                if not isinstance(name := block.get("name"), str) or not _TOOL_NAME.fullmatch(name):
                    raise _Refused(f"{where}.tool_use.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
                if not isinstance(block.get("input"), dict):
                    raise _Refused(f"{where}.tool_use.input: Input should be a valid dictionary")
            if kind == "tool_result":
                _check_id(block.get("tool_use_id"), f"{where}.tool_result.tool_use_id")
                if not isinstance(block.get("is_error", False), bool):
                    raise _Refused(f"{where}.tool_result.is_error: Input should be a valid boolean")
            if kind == "document":
                _check_document(rules, block.get("source") or {}, where)


def _walk(blocks: Iterable[Block], where: str) -> Iterator[tuple[str, Block]]:
    """Every block, and those inside the results of tools."""
    for at, block in enumerate(blocks):
        here = f"{where}.{at}"
        yield here, block
        if block.get("type") == "tool_result" and isinstance(block.get("content"), list):
            yield from _walk(block["content"], f"{here}.content")


def _check_id(value: object, where: str) -> None:
    if not isinstance(value, str) or not _TOOL_ID.fullmatch(value):
        raise _Refused(f"{where}: String should match pattern '^[a-zA-Z0-9_-]+$'")


def _check_pairs(messages: list[JSON]) -> None:
    seen: set[str] = set()
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        blocks = parts(message.get("content"))
        results = [str(block["tool_use_id"]) for block in blocks if block.get("type") == "tool_result"]
        if missing := [call for call in open_calls if call not in results]:
            raise _Refused(
                f"messages.{at - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: "
                f"{', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in the "
                "next message."
            )
        if foreign := [call for call in results if call not in open_calls]:
            raise _Refused(
                f"messages.{at}.content: unexpected `tool_use_id` found in `tool_result` blocks: "
                f"{', '.join(foreign)}. Each `tool_result` block must have a corresponding `tool_use` block in the "
                "previous message."
            )
        if len(set(results)) < len(results):
            raise _Refused(f"messages.{at}.content: each tool_use must have a single result")
        open_calls = [str(block["id"]) for block in blocks if block.get("type") == "tool_use"]
        if twice := [call for call in open_calls if call in seen or open_calls.count(call) > 1]:
            raise _Refused(f"messages.{at}.content: `tool_use` ids must be unique: {twice[0]}")
        seen.update(open_calls)
    if open_calls:
        raise _Refused(
            f"messages.{len(messages) - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(open_calls)}."
        )


def _check_images(rules: Rules, messages: list[JSON]) -> None:
    images = [
        (where, block.get("source") or {})
        for at, message in enumerate(messages)
        for where, block in _walk(parts(message.get("content")), f"messages.{at}.content")
        if block.get("type") == "image"
    ]
    many = len(images) > rules.many_images
    for where, source in images:
        if source.get("type") != "base64":
            continue
        data = str(source.get("data", ""))
        if len(data) > rules.image_bytes:
            raise _Refused(
                f"{where}.image.source.base64: image exceeds {rules.image_bytes // (1024 * 1024)} MB maximum: "
                f"{len(data)} bytes > {rules.image_bytes} bytes"
            )
        longest = max(_sides(data))
        if longest > rules.image_side:
            raise _Refused(
                f"{where}.image.source.base64.data: At least one of the image dimensions exceed max allowed size: "
                f"{rules.image_side} pixels"
            )
        if many and longest > rules.many_images_side:
            raise _Refused(
                f"{where}.image.source.base64.data: At least one of the image dimensions exceed max allowed size for "
                f"many-image requests: {rules.many_images_side} pixels"
            )


def _sides(data: str) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only for a request with an image

    try:
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            return image.size
    except (binascii.Error, UnidentifiedImageError, OSError) as exc:
        raise _Refused("Could not process image") from exc


def _check_document(rules: Rules, source: JSON, where: str) -> None:
    if source.get("type") != "base64":
        return
    try:
        data = base64.b64decode(str(source.get("data", "")), validate=True)
    except binascii.Error:
        data = b""
    if not data.startswith(b"%PDF-") or b"%%EOF" not in data:
        raise _Refused(f"{where}.document.source.base64: The PDF specified was not valid.")
    if b"/Encrypt" in data:
        raise _Refused(f"{where}.document.source.base64: The PDF specified is password protected.")
    if (pages := len(_PDF_PAGE.findall(data))) > rules.pdf_pages:
        raise _Refused(f"{where}.document.source.base64: A maximum of {rules.pdf_pages} PDF pages may be provided.")
    if not pages:
        raise _Refused(f"{where}.document.source.base64: Could not process PDF")


# --- sealed thinking --------------------------------------------------------------------------------------


def sealed(body: JSON, blocks: Iterable[Block]) -> list[Block]:
    """The blocks of an answer to this request, with a seal on each thought that the script gave none."""
    seal = _Seal(body)
    for line in marked_lines(body):
        seal.add(line.text)
    out: list[Block] = []
    seal.add(next(_lines({"role": "assistant", "content": ()})))
    for block in blocks:
        field = SEALS.get(str(block.get("type")))
        signed = block if field is None or field in block else {**block, field: seal.of(block)}
        seal.add(next(_lines(signed)))
        out.append(signed)
    return out


def _check_seals(body: JSON) -> None:
    messages = body["messages"]
    if not any(block.get("type") in SEALS for message in messages for block in parts(message.get("content"))):
        return
    seal = _Seal(body)
    for head in marked_lines({name: body.get(name) for name in ("tools", "system")}):
        seal.add(head.text)
    for at, message in enumerate(messages):
        role, *lines = _lines(message)
        seal.add(role)
        for number, (block, line) in enumerate(zip(parts(message.get("content")), lines, strict=True)):
            kind = str(block.get("type"))
            if kind in SEALS and block.get(SEALS[kind]) != seal.of(block):
                raise _Refused(
                    f"messages.{at}.content.{number}: Invalid `{SEALS[kind]}` in `{kind}` block. The block is bound to "
                    "a different conversation"
                )
            seal.add(line)


class _Seal:
    """The running hash of a request, from its first tool on."""

    def __init__(self, body: JSON) -> None:
        self._hash = hashlib.sha256(str(body.get("model")).encode())

    def add(self, line: bytes) -> None:
        self._hash.update(line)

    def of(self, block: Block) -> str:
        """The seal of a block that stands here."""
        here = self._hash.copy()
        here.update(str(block.get("thinking", "")).encode("utf-8", "surrogatepass"))
        return base64.b64encode(here.digest()).decode("ascii")


def _lines(data: JSON) -> Iterator[bytes]:
    """The canonical lines of one message, its role first; or of one block."""
    whole = {"messages": [data]} if "role" in data else {"system": [data]}
    return (line.text for line in marked_lines(whole))
