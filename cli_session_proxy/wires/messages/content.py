"""The `system` and `messages` of Anthropic's Messages API, field by field. Pure.

Blocks are converted to the chain's form: without `cache_control`, `citations` and other fields for the provider only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...domain.models import Block, Message
from ...errors import InvalidRequest
from ..blocks import BY_DATA, base64_file, base64_image, document, is_web_address
from ..conversation import (
    Instructions,
    Reader,
    by_role,
    checked_conversation,
    read_content,
    read_text,
    tool_result,
    typed_blocks,
    without_blank_texts,
)
from ..fields import Part, optional, required, wrong_type

# Claude Code begins its system prompt with this header, in a block of its own. If it were joined with the next block,
# the CLI would take the whole prompt for the header, and send it without a cache mark.
BILLING = "x-anthropic-billing-header:"


def read(
    body: Part, *, answered: bool = True, ignored: list[str] | None = None
) -> tuple[str | None, tuple[Message, ...]]:
    """(system, conversation). With `answered`, the last message must ask something. Raises `InvalidRequest`.

    Names of fields without effect are added to `ignored`. System messages at the start of `messages` are appended to
    `system`; later ones stay where they are.
    """
    system = body.get("system")
    if isinstance(system, list):
        system_blocks = typed_blocks(system, "system", {"text": read_text})
        system = "\n\n".join(block["text"] for block in system_blocks if not block["text"].startswith(BILLING))
    elif not (system is None or isinstance(system, str)):
        raise wrong_type("system", "a string or a list of text blocks")
    instructions = Instructions()
    ignored = [] if ignored is None else ignored
    document, found = partial(_document, ignored=ignored), partial(_search_result, ignored=ignored)
    kinds: dict[str, Reader] = {"text": read_text, "image": _image, "document": document, "search_result": found}
    readers: dict[str, Reader] = {**kinds, "tool_result": partial(_tool_result, kinds=kinds)}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    conversation: list[tuple[str, Message]] = []
    for where, role, message in by_role(messages):
        if role == "system":
            texts = read_content(message, where, {"text": read_text}, parts="blocks")
            instructions.place("".join(block["text"] for block in texts), where, conversation)
        elif role == "user":
            blocks = without_blank_texts(read_content(message, where, readers, parts="blocks"))
            conversation.append((where, Message("user", blocks)))
        elif role == "assistant":
            blocks = read_content(message, where, _ASSISTANT, parts="blocks")
            conversation.append((where, Message("assistant", blocks)))
        else:
            raise InvalidRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
    instructions.use_as_prompt(conversation)
    joined = "\n\n".join(text for text in (system or "", *instructions.system) if text.strip()) or None
    if not answered:
        return joined, tuple(message for _, message in conversation)
    return joined, checked_conversation(conversation)


def _image(block: Part, where: str) -> Block:
    source = required(block, "source", dict, where)
    inner = f"{where}.source"
    kind = required(source, "type", str, inner)
    if kind == "url":
        url = required(source, "url", str, inner)
        if not is_web_address(url):
            raise InvalidRequest(f"{inner}.url must be an http(s) URL", param=f"{inner}.url")
        return {"type": "image", "source": {"type": "url", "url": url}}
    if kind != "base64":
        raise InvalidRequest(f"{inner}.type must be base64 or url: there are no files here", param=f"{inner}.type")
    media_type = required(source, "media_type", str, inner)
    return base64_image(media_type, required(source, "data", str, inner), f"{inner}.data")


def _document(block: Part, where: str, *, ignored: list[str]) -> Block:
    """A PDF or a text, given by its data."""
    _citations(block, where, ignored)
    source = required(block, "source", dict, where)
    inner = f"{where}.source"
    kind = required(source, "type", str, inner)
    title, context = (optional(block, name, str, where) for name in ("title", "context"))
    if kind == "base64":
        media_type = required(source, "media_type", str, inner)
        data = required(source, "data", str, inner)
        read = base64_file(media_type, data, f"{inner}.data", title)
    elif kind == "text":
        text: str = required(source, "data", str, inner)
        if not text.strip():
            raise InvalidRequest(f"{inner}.data holds no words", param=f"{inner}.data")
        read = document({"type": "text", "media_type": "text/plain", "data": text}, title)
    else:
        raise InvalidRequest(f"{inner}: {BY_DATA}, or a text", param=f"{inner}.type")
    return {**read, "context": context} if context and read["type"] == "document" else read


def _search_result(block: Part, where: str, *, ignored: list[str]) -> Block:
    """A result of the client's own search as text, with its title and source."""
    _citations(block, where, ignored)
    source = required(block, "source", str, where)
    title = required(block, "title", str, where)
    texts = typed_blocks(
        required(block, "content", list, where, expected="a list of text blocks"),
        f"{where}.content",
        {"text": read_text},
    )
    return {"type": "text", "text": "\n\n".join((f"{title}\n{source}", *(text["text"] for text in texts)))}


def _citations(block: Part, where: str, ignored: list[str]) -> None:
    """The model is not asked for citations: note a wish for them as a field without effect."""
    wanted = optional(block, "citations", dict, where) or {}
    if wanted.get("enabled"):
        ignored.append("citations")


def _tool_reference(block: Part, where: str) -> Block:
    """A tool that a tool search found. Its name is enough, because all tools are offered."""
    name = required(block, "tool_name", str, where)
    return {"type": "text", "text": f"[tool: {name}]"}


def _answer_block(block: Part, where: str) -> Block | None:
    """A block of the model's answer. Tools that Anthropic ran itself are ignored: they are encrypted for its models."""
    kind = block["type"]
    if kind == "thinking":
        thinking, signature = (optional(block, name, str, where) or "" for name in ("thinking", "signature"))
        return {"type": kind, "thinking": thinking, "signature": signature}
    if kind == "redacted_thinking":
        return {"type": kind, "data": required(block, "data", str, where)}
    if kind == "tool_use":
        call_id, name = (required(block, key, str, where) for key in ("id", "name"))
        return {"type": kind, "id": call_id, "name": name, "input": required(block, "input", dict, where)}
    return None


def _tool_result(block: Part, where: str, *, kinds: Mapping[str, Reader]) -> Block:
    content = block.get("content")
    result: str | list[Block]
    if content is None or isinstance(content, str):
        result = content or ""
    elif isinstance(content, list):
        result = typed_blocks(content, f"{where}.content", {**kinds, "tool_reference": _tool_reference})
    else:
        raise wrong_type(f"{where}.content", "a string or a list of blocks")
    call_id = required(block, "tool_use_id", str, where)
    return tool_result(call_id, result, is_error=optional(block, "is_error", bool, where))


_ASSISTANT: dict[str, Reader] = {
    "text": read_text,
    **dict.fromkeys(
        ("thinking", "redacted_thinking", "tool_use", "server_tool_use", "web_search_tool_result",
         "web_fetch_tool_result", "tool_search_tool_result", "code_execution_tool_result",
         "bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
        _answer_block,
    ),
}  # fmt: skip
