"""Random histories of one conversation at two proxies over one store, against a model of what it holds.

Each request that reaches the model, and each list of the items, holds every acknowledged turn and every free item once,
in order. A run is made of its seed: `CSP_SEEDS="100-200"` runs others than the usual ones.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from cli_session_proxy.backends.claude.transcript.writing import OPENED_BY_ASSISTANT
from turnfault.provider.script import Fail, HeldReply, Refusal
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...matrix import half, rest_in_full
from .conftest import Door
from .pairs import Pair, added, id_of, left, message, pair_of, removed, said, texts

# Of each store, with the CLI and without.
STEPS_WITH, STEPS_WITHOUT = 15, 60


def seeds(usual: int) -> list[int]:
    first, _, last = os.environ.get("CSP_SEEDS", f"1-{usual}").partition("-")
    return list(range(int(first), int(last or first) + 1))


@dataclass
class Words:
    """One text of the conversation. `hand` is the order in which it was written by hand, None for a turn's own."""

    text: str
    role: str
    hand: int | None = None
    out: bool = False  # it was taken out


@dataclass
class Group:
    """What rewinding takes back at once: a turn, or an exchange that was brought in with one."""

    words: list[Words]
    response: str | None = None  # the id of the turn, while the path holds it as it was


@dataclass
class Model:
    """What the conversation holds. What was taken out stays in its group until a turn tells the rest anew."""

    path: list[Group] = field(default_factory=list)
    free: list[Words] = field(default_factory=list)

    @property
    def held(self) -> list[Words]:
        return [one for group in self.path for one in group.words if not one.out] + self.free

    def texts(self) -> list[str]:
        return [one.text for one in self.held]

    def told(self, own: list[Words], answer: Words, response: str) -> None:
        """A turn of the conversation was acknowledged."""
        flat = [*self.held, *own, answer]
        touched = next((at for at, group in enumerate(self.path) if any(one.out for one in group.words)), None)
        if touched is None:
            kept, rest = self.path, [*self.free, *own, answer]
        else:
            # An answer whose question is gone belongs to the group before it.
            kept = self.path[:touched]
            rest = flat[sum(len(group.words) for group in kept) :]
            while kept and rest[0].role == "assistant":
                rest = [*kept[-1].words, *rest]
                kept = kept[:-1]
        self.path = [*kept, *grouped(rest)]
        self.path[-1].response = response
        self.free = []
        assert self.texts() == [one.text for one in flat]

    def back_to(self, groups: int) -> None:
        off = [one for group in self.path[groups:] for one in group.words]
        self.path = self.path[:groups]
        self.free += [one for one in off if one.hand is not None and not one.out]
        self.free.sort(key=lambda one: one.hand or 0)

    def take_out(self, words: Words) -> None:
        words.out = True
        self.free = [one for one in self.free if one is not words]


def grouped(words: list[Words]) -> Iterator[Group]:
    """Cut behind each run of answers."""
    group: list[Words] = []
    for one in words:
        if group and group[-1].role == "assistant" and one.role == "user":
            yield Group(group)
            group = []
        group.append(one)
    yield Group(group)


class Run:
    """One history. `log` tells it where it fails."""

    def __init__(self, pair: Pair, upstream: Upstream, seed: int) -> None:
        self.pair = pair
        self.upstream = upstream
        self.random = random.Random(seed)
        self.model = Model()
        self.log: list[str] = []
        self.number = 0
        self.hands = 0
        self.conversation = ""
        self.failed: list[tuple[str, str]] = []  # (key, text) of turns that failed

    def at(self) -> Door:
        return self.random.choice(self.pair)

    def new(self) -> str:
        self.number += 1
        return f"say {self.number}."

    def by_hand(self, role: str | None = None) -> Words:
        self.hands += 1
        return Words(self.new(), role or self.random.choice(["user", "user", "assistant"]), self.hands)

    def input(self) -> list[Words]:
        """A turn's own words; sometimes with answers among them: every second one."""
        own = [Words(self.new(), "user")]
        while self.random.random() < 0.2:
            own = [Words(self.new(), "user"), Words(self.new(), "assistant"), *own]
        return own

    def told(self) -> str:
        """The last steps, for who looks into a failure."""
        return "\n".join([*self.log[-40:], "held: " + ", ".join(self.model.texts())])

    # --- steps

    async def history(self, steps: int) -> None:
        first = [self.by_hand() for _ in range(self.random.choice([0, 0, 1, 3]))]
        items = [message(one.text, one.role) for one in first]
        self.conversation = (await self.at().openai.conversations.create(items=items)).id
        self.model.free = first
        ways: dict[Any, int] = {
            self.turn: 6, self.add: 4, self.take_out: 4, self.two_turns: 3, self.take_two_out: 2,
            self.turn_and_item: 2, self.turn_and_removal: 2, self.refused: 2, self.lost: 2, self.fail: 2,
            self.again: 2, self.rewind: 2, self.branch: 1, self.cancelled: 1,
        }  # fmt: skip
        await self.turn()
        for way in self.random.choices(list(ways), list(ways.values()), k=steps):
            self.log.append(way.__name__)
            await way()
            assert await texts(self.at(), self.conversation) == self.model.texts(), self.told()
        await self.turn()

    async def turn(self) -> None:
        await self.tell(self.input())

    async def tell(self, own: list[Words], **more: Any) -> None:
        expected = [*self.model.texts(), *(one.text for one in own)]
        self.log.append(f"tell {[one.text for one in own]} {more}")
        given: Any = [message(one.text, one.role) for one in own] if len(own) > 1 else own[0].text
        response = await said(self.at(), self.conversation, given, **more)
        assert self.seen() == expected, self.told()
        self.model.told(own, Words(response.output_text, "assistant"), response.id)

    def seen(self, back: int = 1) -> list[str]:
        """What the model was shown; not the words in front of an answer that a conversation begins with."""
        shown = [text for _, text in self.upstream.requests[-back].texts()]
        return shown[1:] if shown[0] == OPENED_BY_ASSISTANT else shown

    async def add(self) -> None:
        new = [self.by_hand() for _ in range(self.random.choice([1, 1, 2]))]
        door = self.at()
        for one in new:
            await added(door, self.conversation, one.text, role=one.role)
        self.model.free += new

    def pick(self) -> Words | None:
        return self.random.choice(self.model.held) if self.model.held else None

    async def take_out(self) -> None:
        if (words := self.pick()) is not None:
            self.log.append(words.text)
            await removed(self.at(), self.conversation, words.text)
            self.model.take_out(words)

    async def take_two_out(self) -> None:
        chosen = self.random.sample(self.model.held, min(2, len(self.model.held)))
        await asyncio.gather(
            *(removed(door, self.conversation, one.text) for door, one in zip(self.pair, chosen, strict=False)),
            self.at().openai.conversations.update(self.conversation, metadata={"n": str(self.number)}),
        )
        for one in chosen:
            self.model.take_out(one)
        metadata = (await self.at().openai.conversations.retrieve(self.conversation)).metadata
        assert metadata == {"n": str(self.number)}, self.told()

    async def two_turns(self) -> None:
        """Who comes first is known only from what they were shown."""
        both = [self.input(), self.input()]
        before = self.model.texts()
        given = [[message(one.text, one.role) for one in own] for own in both]
        answers = await asyncio.gather(
            *(said(door, self.conversation, one) for door, one in zip(self.pair, given, strict=True))
        )
        by_last = {own[-1].text: (own, answer) for own, answer in zip(both, answers, strict=True)}
        for seen in sorted([self.seen(1), self.seen(2)], key=len):
            own, answer = by_last[seen[-1]]
            assert seen == [*before, *(one.text for one in own)], self.told()
            self.model.told(own, Words(answer.output_text, "assistant"), answer.id)
            before = self.model.texts()

    async def turn_and_item(self) -> None:
        """The item is in front of the turn, or free behind it."""
        own, item = self.input(), self.by_hand("user")
        given = [message(one.text, one.role) for one in own]
        first, second = self.random.sample(self.pair, 2)
        response, _ = await asyncio.gather(
            said(first, self.conversation, given), added(second, self.conversation, item.text)
        )
        taken = item.text in self.seen()
        self.model.free += [item] if taken else []
        assert self.seen() == [*self.model.texts(), *(one.text for one in own)], self.told()
        self.model.told(own, Words(response.output_text, "assistant"), response.id)
        self.model.free += [] if taken else [item]

    async def turn_and_removal(self) -> None:
        """The turn is shown the item or not; what follows is not."""
        if (words := self.pick()) is None:
            return
        own = self.input()
        given = [message(one.text, one.role) for one in own]
        first, second = self.random.sample(self.pair, 2)
        item_id = await id_of(first, self.conversation, words.text)
        response, _ = await asyncio.gather(
            said(first, self.conversation, given),
            second.openai.conversations.items.delete(item_id, conversation_id=self.conversation),
        )
        if there := words.text in self.seen():
            assert self.seen() == [*self.model.texts(), *(one.text for one in own)], self.told()
            self.model.told(own, Words(response.output_text, "assistant"), response.id)
        self.model.take_out(words)
        if not there:
            assert self.seen() == [*self.model.texts(), *(one.text for one in own)], self.told()
            self.model.told(own, Words(response.output_text, "assistant"), response.id)

    async def refused(self) -> None:
        own = self.input()
        self.upstream.when(own[-1].text, Refusal("policy"))
        response = await said(self.at(), self.conversation, [message(one.text, one.role) for one in own])
        assert response.status == "incomplete", self.told()

    async def lost(self) -> None:
        """Its client leaves; nobody asks for it again."""
        await left(self.at(), self.conversation, self.upstream, *(one.text for one in self.input()))

    async def fail(self) -> None:
        key, text = f"k{self.new()}", self.new()
        self.upstream.when(text, Fail(400), times=None)
        with pytest.raises(openai.BadRequestError):
            await said(self.at(), self.conversation, text, extra_headers={"Idempotency-Key": key})
        self.upstream.heal()
        self.failed.append((key, text))

    async def again(self) -> None:
        """One that failed is sent again, with its key."""
        if self.failed:
            key, text = self.failed.pop(self.random.randrange(len(self.failed)))
            await self.tell([Words(text, "user")], extra_headers={"Idempotency-Key": key})

    async def cancelled(self) -> None:
        text, gate = self.new(), HeldReply()
        self.upstream.when(text, gate)
        response = await said(self.at(), self.conversation, text, background=True)
        async with asyncio.timeout(60):
            await gate.reached.wait()
        await self.at().openai.responses.cancel(response.id)

    async def rewind(self) -> None:
        """To a turn that the path holds as it was, by its id."""
        targets = [at for at, group in enumerate(self.model.path[:-1]) if group.response is not None]
        if not targets:
            return
        target = self.random.choice(targets)
        turn_id = (self.model.path[target].response or "").replace("resp_", "turn_")
        self.log.append(f"to {self.model.path[target].words[-1].text}")
        back = await self.at().http.post(f"/v1/chains/{self.conversation}/rewind", json={"to": turn_id})
        assert back.status_code == 200, back.text + self.told()
        self.model.back_to(target + 1)

    async def branch(self) -> None:
        """From an earlier answer, without the conversation: what is free stays free."""
        at = [
            at
            for at, group in enumerate(self.model.path)
            if group.response is not None
            and not any(one.out for before in self.model.path[: at + 1] for one in before.words)
        ]
        if not at:
            return
        target = self.random.choice(at)
        own = self.new()
        self.log.append(f"from {self.model.path[target].words[-1].text}: {own}")
        previous = self.model.path[target].response
        response = await self.at().openai.responses.create(model="sonnet", input=own, previous_response_id=previous)
        self.model.back_to(target + 1)
        free, self.model.free = self.model.free, []
        assert self.seen() == [*self.model.texts(), own], self.told()
        self.model.told([Words(own, "user")], Words(response.output_text, "assistant"), response.id)
        self.model.free = free


@pytest.mark.parametrize("store", rest_in_full("sqlite", "postgresql"))  # each time on both, without the CLI
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.full
async def test_a_random_history_is_told_whole_with_the_cli(
    request: pytest.FixtureRequest,
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    store: str,
    seed: int,
) -> None:
    more = {"store": request.getfixturevalue("postgres_url")} if store == "postgresql" else {}
    async with pair_of(make_settings(claude_bin=claude_2, **more), upstream) as pair:
        await Run(pair, upstream, seed).history(STEPS_WITH)


@pytest.mark.parametrize(("store", "seed"), half(["sqlite", "postgresql"], seeds(2)))
@pytest.mark.sample(1)
async def test_a_random_history_is_told_whole(
    request: pytest.FixtureRequest, make_settings: MakeSettings, upstream: Upstream, store: str, seed: int
) -> None:
    """Without the CLI there is time for more of them."""
    more = {"store": request.getfixturevalue("postgres_url")} if store == "postgresql" else {}
    async with pair_of(make_settings(**more), upstream) as pair:
        await Run(pair, upstream, seed).history(STEPS_WITHOUT)
