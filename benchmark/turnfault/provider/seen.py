"""One request as it reached the scripted upstream: what the model was shown, and what the prompt cache kept of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .script import TOOL_RESULT

JSON = dict[str, Any]
Outcome = Literal["running", "answered", "failed", "cut", "left"]

# What the CLI puts beside the user's words is a block (or the start of a string) of its own in these tags.
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>\s*", re.S)


@dataclass(slots=True)
class Seen:
    """A request. `raw` is the body as it came, `body` the same read ({} where it is not a JSON object).

    `outcome`: `left` when the client went away before the end of the answer, `cut` when a behaviour dropped it.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: JSON
    outcome: Outcome = "running"
    # set when nothing more is sent: `outcome` is final then
    done: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def messages(self) -> list[JSON]:
        messages: list[JSON] = self.body.get("messages", [])
        return messages

    @property
    def prompt(self) -> str:
        """The newest text of the user, or "" where there is none."""
        return next((text for role, text in reversed(self.texts()) if role == "user"), "")

    def texts(self) -> list[tuple[str, str]]:
        """(role, text) of every block of the conversation, in order, as a reader would tell it.

        Without what the CLI adds on its own: messages of role `system`, `<system-reminder>` blocks. Tool results
        are `tool_result: …`, tool calls `tool_use: <name> <input>`, images `[image]`; thinking is left out.
        """
        return [
            (message["role"], text)
            for message in self.messages
            if message["role"] != "system"
            for block in parts(message["content"])
            if (text := _told(block)) is not None
        ]

    def user_texts(self) -> list[str]:
        return [text for role, text in self.texts() if role == "user"]

    def lines(self) -> list[bytes]:
        """The cached part of the prompt (tools, system, messages), canonical, a line for each tool, block or role.

        `cache_control` is removed, and a content string is the list of one text that it stands for: the CLI sends
        the same message as a list with a marker first, and as a string later.
        """
        return [line.text for line in marked_lines(self.body)]

    def form(self) -> list[JSON]:
        """How each part of the prompt is written, without its words: whether it is a string or a list of blocks, the
        types of the blocks, and the breakpoints on them."""
        parts_of = [("tools", self.body.get("tools")), ("system", self.body.get("system"))]
        parts_of += [(message["role"], message["content"]) for message in self.messages]
        return [
            {
                "part": name,
                "string": isinstance(content, str),
                "blocks": [(block.get("type"), block.get("cache_control")) for block in parts(content)],
            }
            for name, content in parts_of
        ]

    def prefix_kept(self, previous: Seen) -> float:
        """The share of the previous request's bytes that this one still starts with: 1.0 = the cache holds."""
        before = b"".join(previous.lines())
        return _common(before, b"".join(self.lines())) / len(before) if before else 1.0


def _common(left: bytes, right: bytes) -> int:
    """How many bytes both start with: halves first, as these are megabytes in a long conversation."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def parts(content: Any) -> list[JSON]:
    """Content as blocks: a string is one text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


class Line(NamedTuple):
    """`marked`: it ends at a cache breakpoint. `block`: it is a tool or a block, and not the head of a message."""

    text: bytes
    marked: bool
    block: bool


def marked_lines(body: JSON) -> Iterator[Line]:
    """The canonical lines of a request."""
    for tool in body.get("tools") or ():
        yield _line(tool)
    for block in parts(body.get("system")):
        yield _line(block)
    for message in body.get("messages") or ():
        yield _line({key: value for key, value in message.items() if key != "content"}, block=False)
        for block in parts(message["content"]):
            yield _line(block)


def _line(data: JSON, *, block: bool = True) -> Line:
    text = json.dumps(_without_markers(data), ensure_ascii=False, sort_keys=True)
    return Line(text.encode("utf-8", "surrogatepass") + b"\n", "cache_control" in data, block)


def _without_markers(block: JSON) -> JSON:
    """Where a marker may stand: on a tool or block, and on the blocks in a tool's result."""
    bare = {key: value for key, value in block.items() if key != "cache_control"}
    if isinstance(bare.get("content"), list):
        bare["content"] = [_without_markers(part) if isinstance(part, dict) else part for part in bare["content"]]
    return bare


def spoken(text: str) -> str | None:
    """A text without the reminders that the CLI puts in front of it; None where nothing else is in it."""
    if not text.lstrip().startswith("<system-reminder>"):
        return text
    return _REMINDER.sub("", text).strip() or None


def _told(block: JSON) -> str | None:
    kind = block.get("type")
    if kind == "text":
        return spoken(block["text"])
    if kind == "tool_result":
        return TOOL_RESULT + " ".join(part.get("text", "[image]") for part in parts(block.get("content")))
    if kind == "tool_use":
        return f"tool_use: {block['name']} {json.dumps(block['input'], ensure_ascii=False, sort_keys=True)}"
    return "[image]" if kind == "image" else None
