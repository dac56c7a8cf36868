"""What the scripted upstream says: the behaviours a test can ask for, and the tiny model that answers otherwise.

The model (`scripted_answer`) knows only the texts it is sent, so that amnesia shows. Its whole grammar, by the
newest user text, upper and lower case alike:

    Remember: the colour is teal      "Noted: colour is teal."   also `remember that X is Y`, `remember X = Y`
    What is the colour?               "colour is teal."          or "I do not know colour."
    recall                            "I remember: colour is teal; number is 7."  or "I remember nothing."
    list                              every user text it sees, numbered, one a line
    anything else                     "You said: … (3)"          3 = user texts it sees

When the newest message is a tool's result: "The tool said: …".
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Block = dict[str, Any]
Texts = Sequence[tuple[str, str]]
Answer = Callable[[Texts], str]

TOOL_RESULT = "tool_result: "

_REMEMBER = re.compile(r"^\s*remember(?:\s+that)?\s*[:,]?\s+(.+?)\s*(?:=|\bis\b)\s*(.+?)\s*[.!]?\s*$", re.I | re.M)
_WHAT_IS = re.compile(r"^\s*what\s+is\s+(.+?)\s*\?", re.I | re.M)
_RECALL = re.compile(r"^\s*(recall|what do you remember)\b", re.I | re.M)
_LIST = re.compile(r"^\s*list\s*[.!]?\s*$", re.I)
_ARTICLE = re.compile(r"^(the|my|your|a|an)\s+", re.I)

# The Messages API's error type of a status (its documentation, "Errors").
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def scripted_answer(texts: Texts) -> str:
    """The default model: an answer to (role, text) pairs, from nothing else."""
    said = [text for role, text in texts if role == "user" and not text.startswith(TOOL_RESULT)]
    newest = texts[-1][1] if texts else ""
    if newest.startswith(TOOL_RESULT):
        return f"The tool said: {newest.removeprefix(TOOL_RESULT)}"
    if _LIST.match(newest):
        return "\n".join(f"{number}. {text}" for number, text in enumerate(said, 1))
    facts = known_facts(said)
    if noted := _REMEMBER.search(newest):
        return f"Noted: {_name(noted[1])} is {noted[2]}."
    if asked := _WHAT_IS.search(newest):
        name = _name(asked[1])
        return f"{name} is {facts[name]}." if name in facts else f"I do not know {name}."
    if _RECALL.search(newest):
        known = "; ".join(f"{name} is {value}" for name, value in facts.items())
        return f"I remember: {known}." if known else "I remember nothing."
    return f"You said: {newest} ({len(said)})"


def known_facts(said: Sequence[str]) -> dict[str, str]:
    """What these user texts asked to remember; a later fact of the same name wins."""
    return {_name(found[1]): found[2] for text in said for found in _REMEMBER.finditer(text)}


def _name(words: str) -> str:
    return _ARTICLE.sub("", words.strip()).casefold()


@dataclass(frozen=True, slots=True)
class Reply:
    """An ordinary answer. `content` is a text or whole blocks; None lets the default model answer.

    `usage` replaces the counted numbers of the same names; `thinking` puts a block in front, which the upstream seals.
    `diagnostics` is said at the end of a stream, `headers` before it.
    """

    content: str | Sequence[Block] | None = None
    usage: Mapping[str, Any] | None = None
    stop_reason: str = "end_turn"
    stop_sequence: str | None = None
    stop_details: Mapping[str, Any] | None = None
    thinking: str | None = None
    diagnostics: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def blocks(self, texts: Texts, answer: Answer) -> list[Block]:
        if self.content is None or isinstance(self.content, str):
            text = answer(texts) if self.content is None else self.content
            blocks: list[Block] = [{"type": "text", "text": text}]
        else:
            blocks = [dict(block) for block in self.content]
        if self.thinking is not None:
            blocks.insert(0, {"type": "thinking", "thinking": self.thinking})
        return blocks


def Refusal(category: str | None = None, explanation: str | None = None, said: str | None = None) -> Reply:  # noqa: N802 - as Big
    """The model refuses, after `said`, in the API's own shape."""
    details = {"type": "refusal", "category": category, "explanation": explanation}
    blocks = [] if said is None else [{"type": "text", "text": said}]
    return Reply(blocks, stop_reason="refusal", stop_details=details)


def Big(size: int) -> Reply:  # noqa: N802 - reads as one of the behaviours
    """An answer of `size` bytes in one text block."""
    return Reply("0123456789abcde\n" * (size // 16) + "x" * (size % 16))


_call_numbers = iter(range(1, 1 << 62))


def ToolUse(calls: Sequence[tuple[str, Mapping[str, Any]]], *, text: str | None = None) -> Reply:  # noqa: N802 - as Big
    """The model calls tools: (name, input) pairs, after an optional text. Ids are `toolu_…`, fresh at each call."""
    blocks: list[Block] = [{"type": "text", "text": text}] if text is not None else []
    for name, arguments in calls:
        blocks.append(
            {"type": "tool_use", "id": f"toolu_{next(_call_numbers):024d}", "name": name, "input": dict(arguments)}
        )
    return Reply(blocks, stop_reason="tool_use")


@dataclass(frozen=True, slots=True)
class Fail:
    """An HTTP error instead of an answer, in the API's own shape."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "scripted failure"
    type: str | None = None

    @property
    def error(self) -> Block:
        kind = self.type or ERROR_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def windows(status: str, limits: str, **told: tuple[float, float]) -> dict[str, str]:
    """Headers that tell a subscription of its windows: `five_hour=(0.42, resets_at)`, `seven_day=…`. `limits` names the
    one that decides."""
    named = {"five_hour": "5h", "seven_day": "7d"}
    base = "anthropic-ratelimit-unified"
    found = {f"{base}-status": status, f"{base}-representative-claim": limits}
    found[f"{base}-reset"] = str(int(told[limits][1]))
    for name, (used, resets_at) in told.items():
        of_it = status if name == limits else "allowed"
        own = {"status": of_it, "utilization": str(used), "reset": str(int(resets_at))}
        found |= {f"{base}-{named[name]}-{what}": value for what, value in own.items()}
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection is dropped: after `after` deltas of a stream, before the answer otherwise.

    A client that has not read what came right before the drop may never see it. With `held`, the drop waits until
    the test opens it; `reached` is set when it waits.
    `pause`: seconds of silence before that, so that what was said has reached its reader.
    """

    after: int = 1
    reply: Reply = Reply()
    pause: float = 0.0
    held: bool = False
    event: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self) -> None:
        self.event.set()


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An `error` event inside the stream, after `after` deltas; a 529 where there is no stream."""

    type: str = "overloaded_error"
    message: str = "Overloaded"
    after: int = 1
    reply: Reply = Reply()

    @property
    def error(self) -> Block:
        return {"type": "error", "error": {"type": self.type, "message": self.message}}


@dataclass(frozen=True, slots=True)
class Slow:
    """Every delta takes `delay` seconds."""

    delay: float
    reply: Reply = Reply()


@dataclass(frozen=True, slots=True)
class HeldReply:
    """The answer stops after `after` deltas (0: before the status line) and waits until the test opens it.

    `reached` is set when a request waits. It ends by itself when the client leaves or the upstream stops.
    """

    after: int = 0
    reply: Reply = Reply()
    event: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self) -> None:
        self.event.set()


@dataclass(frozen=True, slots=True)
class Stall:
    """Silence after `after` deltas (0: before the status line): for `seconds`, or for as long as the client waits."""

    seconds: float | None = None
    after: int = 1
    reply: Reply = Reply()
    # set when a request waits
    reached: asyncio.Event = field(default_factory=asyncio.Event)


# What begins with an answer, however it goes on.
Answering = Reply | Cut | ErrorEvent | Slow | HeldReply | Stall
Behaviour = Answering | Fail


@dataclass(slots=True)
class Rule:
    """`behaviour` for the next `times` requests (None: all) whose newest user text holds `substring`."""

    substring: str
    behaviour: Behaviour
    times: int | None = 1

    def matches(self, prompt: str) -> bool:
        return self.times != 0 and self.substring in prompt

    def use(self) -> Behaviour:
        if self.times is not None:
            self.times -= 1
        return self.behaviour
