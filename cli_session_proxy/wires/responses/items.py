"""Converts items of OpenAI's Responses and Conversations to blocks of the Messages API and back. Pure.

Ids of a turn's items are derived from the turn's id: `msg_<turn>_in0`, `msg_<turn>_0`, `rs_<turn>_1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, repeat
from typing import Any

from ...domain import limits
from ...domain.models import JSON, Block, Item, Message, Turn
from ...domain.system_prompts import reminded, reminder
from ...errors import InvalidRequest
from ..blocks import image_block, in_base64
from ..conversation import Reader, read_content, read_text, tool_result
from ..fields import arguments, checked_arguments, objects, optional, required, wrong_type
from ..openai import read_file
from . import published
from .compaction import read_compaction
from .tools import Shapes, flat

# Page sizes: OpenAI's limits and default.
PAGE_LIMIT = 100
PAGE = 20


@dataclass(frozen=True, slots=True)
class Input:
    """Parsed items: the system and developer texts at their beginning, and the conversation."""

    system: tuple[str, ...]
    messages: tuple[Message, ...]


# --- reading ----------------------------------------------------------------------------------------------


def read(given: object, where: str = "input", *, references: bool = False) -> Input:
    """Parse a string or a list of items. Reasoning, and calls of tools that OpenAI runs, are dropped. Raises
    `InvalidRequest`.

    With `references`, an item may be given by its id. This becomes a message with a single block
    `item_reference`, which `Dialogues` later replaces by the item.
    """
    if isinstance(given, str):
        if not given.strip():
            raise InvalidRequest(f"{where} is empty: send a text or a list of items", param=where)
        return Input((), (Message.user(given),))
    if not isinstance(given, list):
        raise wrong_type(where, "a string or a list of items")
    limits.at_most(given, limits.MESSAGES, where)
    system: list[str] = []
    messages: list[Message] = []
    for here, item in objects(given, where):
        kind = optional(item, "type", str, here) or "message"
        if kind in _IGNORED or kind.removesuffix("_call") in _RUN_BY_OPENAI:
            continue
        if kind == "item_reference" and references:
            item_id = required(item, "id", str, here)
            messages.append(Message("assistant", ({"type": "item_reference", "id": item_id, "where": here},)))
            continue
        if kind not in _READERS:
            raise InvalidRequest(
                f"{here}: items of type {kind!r} are not supported; send {', '.join(_READERS)}", param=f"{here}.type"
            )
        parsed = _READERS[kind](item, here)  # the text of a system or developer item, else a message
        if isinstance(parsed, Message):
            messages.append(parsed)
        elif messages and parsed.strip():
            messages.append(reminder(parsed))
        else:
            system.append(parsed)
    checked_arguments(messages, where)
    return Input(tuple(text for text in system if text.strip()), tuple(messages))


def tools_in(given: object) -> list[object]:
    """The tools that this input defines, in items of type `additional_tools`."""
    items = given if isinstance(given, list) else []
    lists = [item.get("tools") for item in items if isinstance(item, dict) and item.get("type") == "additional_tools"]
    return [tool for tools in lists if isinstance(tools, list) for tool in tools]


def turn_id_of_item(item_id: str) -> str | None:
    """The turn id in an item's id; None if it is not derived from a turn."""
    parts = item_id.split("_")
    return f"turn_{'_'.join(parts[1:-1])}" if len(parts) > 2 else None


def _message(item: Mapping[str, Any], where: str) -> Message | str:
    role = required(item, "role", str, where)
    if role in ("system", "developer"):
        return "".join(block["text"] for block in read_content(item, where, _TEXTS))
    if role == "assistant":
        return Message("assistant", read_content(item, where, _TEXTS))
    if role != "user":
        raise InvalidRequest(f"{where}.role must be system, developer, user or assistant", param=f"{where}.role")
    blocks = read_content(item, where, _PARTS)
    # The Messages API refuses blank text blocks; beside other blocks they can be dropped.
    blocks = tuple(block for block in blocks if block["type"] != "text" or block["text"].strip())
    if not blocks:
        raise InvalidRequest(f"{where}.content is empty: send a text or an image", param=f"{where}.content")
    return Message("user", blocks)


def _call(item: Mapping[str, Any], where: str) -> Message:
    """A call of a function, or of a custom tool, which takes a text."""
    if item["type"] == "custom_tool_call":
        given: JSON = {"input": optional(item, "input", str, where) or ""}
    else:
        given = arguments(optional(item, "arguments", str, where), f"{where}.arguments")
    call_id = required(item, "call_id", str, where)
    name = required(item, "name", str, where)
    space = optional(item, "namespace", str, where)
    name = flat(space, name) if space else name
    return Message("assistant", ({"type": "tool_use", "id": call_id, "name": name, "input": given},))


def _function_output(item: Mapping[str, Any], where: str) -> Message:
    call_id = item.get("call_id") or required(item, "id", str, where)
    output = item.get("output")
    content = output if isinstance(output, str) else list(read_content(item, where, _PARTS, name="output"))
    return Message("user", (tool_result(str(call_id), content),))


_READERS: dict[str, Callable[[Mapping[str, Any], str], Message | str]] = {
    "message": _message, "function_call": _call, "function_call_output": _function_output,
    "custom_tool_call": _call, "custom_tool_call_output": _function_output,
    "compaction": read_compaction,
    **{f"{name}_call": published.read_call for name in published.PREFIXES},
    **{f"{name}_call_output": published.read_result for name in published.PREFIXES},
}  # fmt: skip
# Prefixes of item ids.
_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "compaction": "cmp",
    **{f"{name}_call": prefix for name, prefix in published.PREFIXES.items()},
}  # fmt: skip
# Ignored items: encrypted reasoning, tools (read by `tools_in`), and tools that OpenAI ran.
_IGNORED = frozenset({"reasoning", "additional_tools", "compaction_trigger", "mcp_list_tools"})
_RUN_BY_OPENAI = frozenset({"web_search", "file_search", "image_generation", "code_interpreter", "mcp", "tool_search"})


def _image(part: Mapping[str, Any], where: str) -> Block:
    url = optional(part, "image_url", str, where)
    if url is None:
        raise InvalidRequest(
            f"{where}: files are not kept here; send the image in image_url, as a URL or data URL", param=where
        )
    return image_block(url, f"{where}.image_url")


_TEXTS: Mapping[str, Reader] = {
    "input_text": read_text, "output_text": read_text, "text": read_text, "refusal": partial(read_text, name="refusal"),
}  # fmt: skip
_PARTS: Mapping[str, Reader] = {**_TEXTS, "input_image": _image, "input_file": read_file}


# --- writing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConversationItem:
    """An item as clients see it, with its message to the model (None for system texts)."""

    item: JSON
    message: Message | None

    @property
    def id(self) -> str:
        return str(self.item["id"])

    def under(self, item_id: str | None) -> ConversationItem:
        """The item with this id; None: with its own."""
        return self if item_id is None else replace(self, item={**self.item, "id": item_id})

    @property
    def system(self) -> str | None:
        """The text, if it is a system or developer item outside of the messages."""
        if self.message is not None or self.item.get("role") not in ("system", "developer"):
            return None
        parts = self.item.get("content")
        texts = (part.get("text") for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
        return "".join(text for text in texts if isinstance(text, str))


NO_ITEMS: Mapping[str, Item] = {}


def hex_of(turn_id: str) -> str:
    return turn_id.removeprefix("turn_")


def text_part(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(item_id: str, status: str, content: list[JSON]) -> JSON:
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(item_id: str, status: str, summary: list[JSON]) -> JSON:
    return {"id": item_id, "type": "reasoning", "summary": summary, "status": status}


def shown(output: Iterable[Block], *, calls: bool) -> list[Block]:
    """The blocks of an answer that have an item: texts, readable thinking and, with `calls`, tool calls."""
    return [
        block
        for block in output
        if (block.get("type") in ("text", "thinking") and block.get(block["type"]))
        or (calls and block.get("type") == "tool_use")
    ]


def output_entries(turn: Turn, own_items: Mapping[str, Item] = NO_ITEMS) -> list[ConversationItem]:
    """An item for each shown block of the answer, in order; a client's own item may have several blocks."""
    brought = turn.evidence.brought is not None and turn.evidence.brought.by == "client"
    blocks = shown(turn.output, calls=brought or turn.status == "requires_action")
    key = hex_of(turn.id)
    ids = dict(zip(map(id, turn.output), _ids(turn, "output"), strict=False))
    entries: list[ConversationItem] = []
    for item_id, group in groupby(enumerate(blocks), lambda numbered: ids.get(id(numbered[1]))):
        numbered = list(group)
        if item_id is not None and item_id in own_items:
            message = Message("assistant", tuple(block for _, block in numbered))
            entries.append(ConversationItem(own_items[item_id].data, message))
            continue
        for n, block in numbered:
            if block["type"] == "text":
                item = message_item(f"msg_{key}_{n}", "completed", [text_part(block["text"])])
            elif block["type"] == "thinking":
                thought = {"type": "summary_text", "text": block["thinking"]}
                item = reasoning_item(f"rs_{key}_{n}", "completed", [thought])
            else:
                item = Shapes((turn.call or {}).get("shapes", {})).item(block, key, n)
            entries.append(ConversationItem(item, Message("assistant", (block,))).under(item_id))
    return entries


def _ids(turn: Turn, part: str) -> Sequence[str | None]:
    """The ids of the conversation's items for the input's messages, or for the output's blocks."""
    ids: Sequence[str | None] = (turn.call or {}).get("items", {}).get(part, ())
    return ids


def input_entries(turn: Turn, own_items: Mapping[str, Item] = NO_ITEMS) -> list[ConversationItem]:
    """The items of the turn's input. `own_items`: the client's own items of its conversation."""
    call = turn.call or {}
    ids, beside = _ids(turn, "input"), call.get("beside", ())
    if "shown" in call:  # a turn of 0.1
        known = [item_id for item_id in call["shown"] if item_id in own_items]
        ids = [item_id for item_id in known if entry_of(own_items[item_id]).message]
        beside = [item_id for item_id in known if item_id not in ids]
    entries = [ConversationItem(own_items[item_id].data, None) for item_id in beside if item_id in own_items]
    key = hex_of(turn.id)
    system_ids = chain(call.get("system_ids", ()), repeat(None))
    for n, (system, item_id) in enumerate(zip(call.get("system_sent", ()), system_ids, strict=False)):
        part = {"type": "input_text", "text": system}
        item = {"id": f"msg_{key}_sys{n}", "type": "message", "status": "completed", "role": "system"}
        entries.append(ConversationItem({**item, "content": [part]}, None).under(item_id))
    for message, item_id in zip(turn.input, chain(ids, repeat(None)), strict=False):
        if item_id is not None and item_id in own_items:
            entries.append(ConversationItem(own_items[item_id].data, message))
        else:
            entries += [entry.under(item_id) for entry in _message_entries(message, key, len(entries))]
    return entries


def _message_entries(message: Message, key: str, n: int) -> list[ConversationItem]:
    entries: list[ConversationItem] = []
    texts = [reminded(block) for block in message.content]
    if message.content and None not in texts:
        part = {"type": "input_text", "text": "\n\n".join(text or "" for text in texts)}
        item = {"id": f"msg_{key}_in{n}", "type": "message", "status": "completed", "role": "system", "content": [part]}
        return [ConversationItem(item, message)]
    results = [block for block in message.content if block.get("type") == "tool_result"]
    for block in results:
        text = block.get("content")
        if not isinstance(text, str):
            text = "".join(str(part.get("text", "")) for part in text) if isinstance(text, list) else ""
        item = {
            "id": f"fco_{key}_in{n + len(entries)}", "type": "function_call_output", "status": "completed",
            "call_id": block["tool_use_id"], "output": text,
        }  # fmt: skip
        entries.append(ConversationItem(item, Message("user", (block,))))
    rest = tuple(block for block in message.content if block.get("type") in ("text", "image", "document"))
    if rest:
        item = {
            "id": f"msg_{key}_in{n + len(entries)}", "type": "message", "status": "completed", "role": "user",
            "content": [_input_part(block) for block in rest],
        }  # fmt: skip
        entries.append(ConversationItem(item, Message("user", rest)))
    return entries


def _input_part(block: Block) -> JSON:
    """A block of the client as a part of a message item."""
    if block["type"] == "text":
        return {"type": "input_text", "text": block["text"]}
    source = block["source"]
    if block["type"] == "document":
        given = f"data:{source['media_type']};base64,{in_base64(source)}"
        return {"type": "input_file", "file_data": given, "filename": block.get("title"), "file_id": None}
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "input_image", "image_url": url, "detail": "auto", "file_id": None}


# --- items of the client, and pages -----------------------------------------------------------------------


def entry_of(item: Item) -> ConversationItem:
    """A client's own item with its message. Without one if no client could have sent it: imports take any object."""
    try:
        messages = read([item.data], "items").messages
    except InvalidRequest:
        messages = ()
    return ConversationItem(item.data, messages[0] if messages else None)


def stored_items(given: object, new_id: Callable[[str], str]) -> list[Item]:
    """Items for a conversation in the stored form: with an id and a list of parts. Raises `InvalidRequest`."""
    if not isinstance(given, list):
        raise wrong_type("items", "a list of items")
    read(given, "items")  # raises for an invalid item
    items: list[Item] = []
    for given_item in given:
        kind = given_item.get("type") or "message"
        item: JSON = {**given_item, "id": new_id(_PREFIXES.get(kind, "item")), "type": kind}
        if kind == "reasoning":
            item.setdefault("summary", [])
        else:
            item["status"] = "completed"
        if kind == "message" and isinstance(item["content"], str):
            text = item["content"]
            part = text_part(text) if item["role"] == "assistant" else _input_part({"type": "text", "text": text})
            item["content"] = [part]
        items.append(Item(item["id"], item))
    return items


def page(items: Sequence[JSON], query: Mapping[str, str]) -> JSON:
    """OpenAI's list object: newest first unless `order=asc`, starting after the item `after`. Raises
    `InvalidRequest`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    limit = query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_LIMIT):
        raise InvalidRequest(f"limit must be a whole number from 1 to {PAGE_LIMIT}", param="limit")
    rows = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        position = next((index for index, item in enumerate(rows) if item["id"] == after), None)
        if position is None:
            raise InvalidRequest(f"there is no item {after!r} here", param="after")
        rows = rows[position + 1 :]
    return listed(rows[: int(limit)], has_more=len(rows) > int(limit))


def listed(rows: Sequence[JSON], *, has_more: bool = False) -> JSON:
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else ("", "")
    return {"object": "list", "data": list(rows), "first_id": first, "last_id": last, "has_more": has_more}
