"""The scripted model of a history: its words are unique to each request, and it misbehaves where a turn asks for it."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from cli_session_proxy.domain.client_tools import cli_name
from turnfault.provider.exchange import deltas
from turnfault.provider.script import Behaviour, Block, Cut, ErrorEvent, Fail, HeldReply, Refusal, Reply, Stall
from turnfault.provider.seen import Seen

from .journal import Answer, Asked
from .reading import GO_ON, KEPT_PICTURE, arguments

# The header that each CLI sends: whose proxy's child it is.
MARK_HEADER = "x-chaos-proxy"
TOOL = "look_up"

# Where the upstream stops until the history opens it: before the status line, after some words, before the end.
Hold = Literal["start", "words", "end"]
# What the upstream does to the first request of a turn; the CLI's own retry gets an ordinary answer. `broken` is a
# 400 for every request: the turn fails. At a `refusal` the model refuses every request, behind some words.
FaultKind = Literal["500", "529", "429", "cut", "event", "stall", "broken", "refusal"]

# What each answer is said to have cost: by the true numbers a long answer would make the CLI compact the conversation.
USAGE = {"input_tokens": 10, "output_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}

# Seconds in which the words before a cut reach the client.
CUT_AFTER = 0.3
# Characters that are said before a refusal.
SAID = 60

TURN = re.compile(r"#(\d+)#")
_WORDS = (
    "lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "do", "eiusmod", "tempor",
    "incididunt", "ut", "labore", "et", "dolore", "magna", "aliqua",
)  # fmt: skip


@dataclass(slots=True)
class Plan:
    """What the model does when it is asked for a turn. `size`: characters of the answer."""

    calls: int = 0
    fault: FaultKind | None = None
    hold: Hold | None = None
    size: int = 240
    asked: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    request: Seen | None = None  # the newest one

    @property
    def mark(self) -> str:
        """Of the proxy whose CLI asked last; "" before."""
        return "" if self.request is None else self.request.headers.get(MARK_HEADER, "")

    @property
    def held(self) -> bool:
        """The upstream holds its answer now. A request whose CLI has ended holds nothing up any more."""
        asking = self.request is not None and self.request.outcome == "running"
        return asking and self.reached.is_set() and not self.opened.is_set()


def filler(seed: int, size: int) -> str:
    """Words that differ from answer to answer."""
    words: list[str] = []
    length = 0
    for at in itertools.count(seed):
        if length >= size:
            return " ".join(words)
        words.append(_WORDS[(at * 7 + seed) % len(_WORDS)])
        length += len(words[-1]) + 1
    raise AssertionError


@dataclass(slots=True)
class Model:
    """`behave` is the upstream's: it answers a request, and notes it in the journal. `before`: the number of the last
    request of a journal that this one goes on."""

    note: Callable[[Asked], None]
    plans: dict[int, Plan] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)
    next_request: asyncio.Event = field(default_factory=asyncio.Event)
    before: int = 0

    def behave(self, seen: Seen) -> Behaviour:
        number = self.before + len(self.seen) + 1
        self.seen[number] = seen
        self.next_request.set()
        self.next_request = asyncio.Event()
        said = seen.user_texts()
        while len(said) > 1 and said[-1].lstrip().startswith((*GO_ON, KEPT_PICTURE)):  # the CLI's own words
            said.pop()
        found = TURN.search(said[-1]) if said else None
        turn = int(found[1]) if found else None
        plan = self.plans.get(turn, Plan()) if turn is not None else Plan()
        plan.asked += 1
        plan.request = seen
        text = f"ok-{number} to #{turn}# {filler(number, plan.size)}"
        calls = tuple(f"call-{number}-{at}" for at in range(plan.calls))
        self.note(Asked(time.monotonic(), number, plan.mark, seen.messages, Answer(text, calls)))
        blocks: list[Block] = [{"type": "text", "text": text}]
        for at, call in enumerate(calls):
            tool_id = f"toolu_{number:012d}{at:012d}"
            blocks.append({"type": "tool_use", "id": tool_id, "name": cli_name(TOOL), "input": arguments(call)})
        return _misbehaving(plan, Reply(blocks, USAGE, "tool_use" if calls else "end_turn"))


def _misbehaving(plan: Plan, reply: Reply) -> Behaviour:
    if plan.fault == "broken":
        return Fail(400)
    if plan.fault == "refusal":
        assert isinstance(reply.content, list)
        reply = replace(Refusal("cyber", said=str(reply.content[0]["text"])[:SAID]), usage=USAGE)
    if plan.asked == 1:
        match plan.fault:
            case "500" | "529" | "429":
                return Fail(int(plan.fault))
            case "cut":
                return Cut(after=4, reply=reply, pause=CUT_AFTER)
            case "event":
                return ErrorEvent(after=4, reply=reply)
            case "stall":
                return Stall(seconds=3.0, after=4, reply=reply)
            case _:
                pass
    if plan.hold is not None and not plan.opened.is_set():
        assert isinstance(reply.content, list)
        after = {"start": 0, "words": 4, "end": deltas(reply.content)}[plan.hold]
        return HeldReply(after, reply, plan.opened, plan.reached)
    return reply
