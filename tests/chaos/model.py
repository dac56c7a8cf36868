"""The scripted model of a history: its words are unique to each request, and it misbehaves where a turn asks for it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from cli_session_proxy.backends.claude.sessions import summaries
from cli_session_proxy.domain.client_tools import cli_name
from cli_session_proxy.engine.committing import ASK
from turnfault.provider.exchange import deltas
from turnfault.provider.script import Behaviour, Block, Cut, ErrorEvent, Fail, HeldReply, Refusal, Reply, Stall
from turnfault.provider.seen import Seen, parts

from ..continuity.talk import ASKS_FOR_SUMMARY
from .journal import JSON, Answer, Asked, Summed
from .reading import GO_ON, KEPT_PICTURE, PLAIN, arguments

# The header that each CLI sends: whose proxy's child it is.
MARK_HEADER = "x-chaos-proxy"
TOOL = "look_up"

# Where the upstream stops until the history opens it: before the status line, after some words, before the end.
Hold = Literal["start", "words", "end"]
# What the upstream does to the first request of a turn; the CLI's own retry gets an ordinary answer. `broken` is a
# 400 for every request: the turn fails. At a `refusal` the model refuses every request, behind some words. At a `limit`
# Claude's are refused until its reset, or end in it behind some words; another model's are answered.
FaultKind = Literal["500", "529", "429", "cut", "event", "stall", "broken", "refusal", "limit", "limit amid"]
LIMITS: tuple[FaultKind, ...] = ("limit", "limit amid")
# The model that answers where Claude is at its limit, by its name with us and with the provider.
OTHER, OTHER_NAME = "other", "other-1"
# Seconds after which a limit is over.
LIMITED = 5

# What each answer is said to have cost: by the true numbers a long answer would make the CLI compact the conversation.
USAGE = {"input_tokens": 10, "output_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}

# What an answer is said to have cost that fills the context: the CLI has the conversation summed up before the next.
FULL = {"input_tokens": 990_000}

# Seconds in which the words before a cut reach the client.
CUT_AFTER = 0.3
# Characters that are said before a refusal.
SAID = 60

TURN = re.compile(r"#(\d+)#")
# How the proxy asks an agent for what a commit says.
COMMITS = ASK[:40]
_SAID_OF_IT = ("headline", "root_cause", "fix", "reasoning", "why_it_failed")
_WORDS = (
    "lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "do", "eiusmod", "tempor",
    "incididunt", "ut", "labore", "et", "dolore", "magna", "aliqua",
)  # fmt: skip


@dataclass(slots=True)
class Plan:
    """What the model does when it is asked for a turn. `size`: characters of the answer. `full`: the context is full
    with it. `aside`: what is asked is an agent's last words for a commit."""

    calls: int = 0
    fault: FaultKind | None = None
    hold: Hold | None = None
    size: int = 240
    full: bool = False
    aside: str = ""
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

    note: Callable[[Asked | Summed], None]
    plans: dict[int, Plan] = field(default_factory=dict)
    committing: int | None = None  # the turn beside a conversation that is asked for just now
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
        if said and any(words in said[-1] for words in (ASKS_FOR_SUMMARY, summaries.ASK)):
            self.note(Summed(number, seen.messages))
            return Reply(f"<summary>summary-{number} of all that was said</summary>", USAGE)
        found = TURN.search(said[-1]) if said else None
        turn = int(found[1]) if found else None
        messages = seen.messages
        if self.committing is not None and any(text.startswith(COMMITS) for text in said[-2:]):
            turn = self.committing
            messages = _asked_aside(messages, self.plans[turn].aside)
        plan = self.plans.get(turn, Plan()) if turn is not None else Plan()
        plan.asked += 1
        plan.request = seen
        text = f"ok-{number} to #{turn}# {filler(number, plan.size)}"
        if plan.aside:
            text = json.dumps(dict.fromkeys(_SAID_OF_IT, f"commit-{turn}") | {"investigation": [], "confidence": "low"})
        other = seen.body.get("model") == OTHER_NAME
        calls = tuple(f"{PLAIN * other}call-{number}-{at}" for at in range(plan.calls))
        self.note(Asked(time.monotonic(), number, plan.mark, messages, Answer(text, calls)))
        blocks: list[Block] = [{"type": "text", "text": text}]
        for at, call in enumerate(calls):
            tool_id = f"toolu_{number:012d}{at:012d}"
            name = TOOL if other else cli_name(TOOL)
            blocks.append({"type": "tool_use", "id": tool_id, "name": name, "input": arguments(call)})
        usage = USAGE | FULL if plan.full else USAGE
        return _misbehaving(plan, Reply(blocks, usage, "tool_use" if calls else "end_turn"), seen)


def _asked_aside(messages: list[JSON], asked: str) -> list[JSON]:
    """The same where what the proxy asks is these words."""
    at = max(at for at, message in enumerate(messages) if message["role"] == "user")
    blocks = [block for block in parts(messages[at]["content"]) if block["type"] != "text"]
    return [*messages[:at], {"role": "user", "content": [*blocks, {"type": "text", "text": asked}]}]


def _misbehaving(plan: Plan, reply: Reply, seen: Seen) -> Behaviour:
    if plan.fault in LIMITS and seen.body.get("model") != OTHER_NAME:
        message = f"Claude AI usage limit reached|{int(time.time()) + LIMITED}"
        if plan.fault == "limit":
            return Fail(429, {"retry-after": "1"}, message)
        return ErrorEvent("rate_limit_error", message, after=4, reply=reply)
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
