"""One conversation, two proxies over one store: every acknowledged turn and every free item stands in the next request
once, in order. In `make full` over the real CLI too: each time test_random_conversations.py has a history over it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from cli_session_proxy.wires.responses.body import response_id
from turnfault.provider.script import Fail, HeldReply, Refusal
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...matrix import half
from ...serving import serve
from .conftest import client_of
from .pairs import (
    Pair,
    accepted,
    added,
    answered,
    begun,
    left,
    listed,
    message,
    pair_of,
    removed,
    said,
    shown,
    texts,
)

STORES, OVER_CLI = ("sqlite", "postgresql"), "sqlite, over the CLI"
AT_ONCE = 6  # requests of each kind that are sent at the same time


@pytest.fixture(params=[*STORES, pytest.param(OVER_CLI, marks=pytest.mark.full)])
async def pair(request: pytest.FixtureRequest, make_settings: MakeSettings, upstream: Upstream) -> AsyncIterator[Pair]:
    more: dict[str, Any] = {}
    if request.param == "postgresql":
        more = {"store": request.getfixturevalue("postgres_url")}
    elif request.param == OVER_CLI:
        more = {"claude_bin": request.getfixturevalue("claude_2")}
    async with pair_of(make_settings(**more), upstream) as made:
        yield made


def cases(*axes: Sequence[str]) -> list[ParameterSet]:
    over_cli = (pytest.param(OVER_CLI, *case, marks=pytest.mark.full) for case in itertools.product(*axes))
    return [*half(STORES, *axes), *over_cli]


# --- two proxies at once


@pytest.mark.parametrize(
    ("pair", "first"), cases(["an item was taken out", "an answer in the input"]), indirect=["pair"]
)
@pytest.mark.sample(1)
async def test_a_turn_that_runs_at_one_proxy_is_remembered_by_the_other(
    pair: Pair, upstream: Upstream, first: str
) -> None:
    conversation = (await pair.a.openai.conversations.create()).id
    await said(pair.a, conversation, "say one")
    expected = ["say one", "to say one"]
    given: Any = "say three"
    if first == "an item was taken out":
        await removed(pair.a, conversation, "to say one")
        await said(pair.a, conversation, "say one more")
        expected = ["say one", "say one more", "to say one more"]
    else:
        given = [message("say by hand"), message("by hand", "assistant"), message("say three")]
    running, gate = await begun(pair.b, conversation, upstream, "say two")
    waiting = asyncio.create_task(said(pair.a, conversation, given))
    # In the old way it has read the head by then; where it waits for the turn before it, it is in the store.
    await accepted(pair.a, conversation, len(expected) // 2 + 2)
    gate.open()
    await asyncio.gather(running, waiting)
    expected += ["say two", "to say two"]
    expected += ["say by hand", "by hand"] if first != "an item was taken out" else []
    expected += ["say three", "to say three"]
    assert await shown(pair.a, conversation, upstream) == expected
    assert await shown(pair.b, conversation, upstream) == [*expected, "say end", "to say end"]


@pytest.mark.sample(1)
async def test_two_requests_at_once_show_a_free_item_once(pair: Pair, upstream: Upstream) -> None:
    conversation = (await pair.a.openai.conversations.create(items=[message("say by hand")])).id
    running, gate = await begun(pair.b, conversation, upstream, "say one")
    assert await texts(pair.a, conversation) == ["say by hand"]  # free until its turn is on the path
    waiting = asyncio.create_task(said(pair.a, conversation, "say two"))
    await accepted(pair.a, conversation, 2)
    gate.open()
    await asyncio.gather(running, waiting)
    expected = ["say by hand", "say one", "to say one", "say two", "to say two"]
    assert await shown(pair.b, conversation, upstream) == expected


@pytest.mark.sample(1)
async def test_many_requests_at_once_show_each_free_item_once(pair: Pair, upstream: Upstream) -> None:
    conversation = (await pair.a.openai.conversations.create(items=[message("say h1"), message("h2", "assistant")])).id
    words = [f"say {number}" for number in range(AT_ONCE)]
    await asyncio.gather(*(said(pair[at % 2], conversation, text) for at, text in enumerate(words)))
    seen = await shown(pair.a, conversation, upstream)
    assert seen[:2] == ["say h1", "h2"]
    assert sorted(seen[2::2]) == words
    assert seen[3::2] == [f"to {text}" for text in seen[2::2]]


@pytest.mark.sample(1)
async def test_items_that_are_taken_out_at_once_stay_out_and_the_notes_stay(pair: Pair, upstream: Upstream) -> None:
    conversation = (await pair.a.openai.conversations.create(metadata={"n": "0"})).id
    for number in range(AT_ONCE):
        await said(pair.a, conversation, f"say {number}")
    free = await added(pair.b, conversation, "say f0", "say f1")
    ids = [item_id for item_id, text in await listed(pair.a, conversation) if text.startswith("to say")] + free[:1]

    async def take_out(at: int, item_id: str) -> None:
        await pair[at % 2].openai.conversations.items.delete(item_id, conversation_id=conversation)

    async def note(at: int) -> None:
        await pair[at % 2].openai.conversations.update(conversation, metadata={"n": str(at)})

    await asyncio.gather(
        *(take_out(at, item_id) for at, item_id in enumerate(ids)), *(note(at) for at in range(AT_ONCE))
    )
    words = [*(f"say {number}" for number in range(AT_ONCE)), "say f1"]
    assert await texts(pair.a, conversation) == words
    await pair.a.openai.conversations.update(conversation, metadata={"n": "last"})
    assert await shown(pair.b, conversation, upstream) == words
    assert (await pair.b.openai.conversations.retrieve(conversation)).metadata == {"n": "last"}


async def test_a_free_item_that_is_taken_out_while_a_turn_waits_is_not_shown(pair: Pair, upstream: Upstream) -> None:
    conversation = (await pair.a.openai.conversations.create(items=[message("say kept"), message("say out")])).id
    running, gate = await begun(pair.a, conversation, upstream, "say one")
    await removed(pair.b, conversation, "say out")
    assert await texts(pair.a, conversation) == ["say kept"]
    gate.open()
    await running
    assert await texts(pair.b, conversation) == ["say kept", "say one", "to say one"]
    assert await shown(pair.b, conversation, upstream) == ["say kept", "say one", "to say one"]


# --- items whose turn is not on the path


@pytest.mark.parametrize(
    ("pair", "how", "hand"),
    cases(["refused", "failed", "cancelled", "undelivered", "rewound"], ["a question", "an exchange"]),
    indirect=["pair"],
)
@pytest.mark.sample(4)
async def test_an_item_is_free_again_unless_its_turn_is_on_the_path(
    pair: Pair, upstream: Upstream, how: str, hand: str
) -> None:
    items = ["say h1"] if hand == "a question" else ["say h1", "h2", "say h3"]
    conversation = (await pair.a.openai.conversations.create()).id
    await said(pair.a, conversation, "say zero")
    for text in items:
        await added(pair.a, conversation, text, role="user" if text.startswith("say") else "assistant")
    before = ["say zero", "to say zero"]
    if how == "refused":
        upstream.when("say one", Refusal("policy"))
        assert (await said(pair.a, conversation, "say one")).status == "incomplete"
    elif how == "failed":
        upstream.when("say one", Fail(400), times=None)
        with pytest.raises(Exception, match="scripted failure"):
            await said(pair.a, conversation, "say one")
        upstream.heal()
    elif how == "cancelled":
        gate = HeldReply()
        upstream.when("say one", gate)
        response = await said(pair.a, conversation, "say one", background=True)
        async with asyncio.timeout(60):
            await gate.reached.wait()
        await pair.b.openai.responses.cancel(response.id)
    elif how == "undelivered":
        await left(pair.a, conversation, upstream, "say one")
    else:
        await said(pair.a, conversation, "say one")
        back = await pair.b.http.post(f"/v1/chains/{conversation}/rewind", json={"to": "-1"})
        assert back.status_code == 200, back.text
    assert await texts(pair.b, conversation) == [*before, *items]
    expected = [*before, *items]
    assert await shown(pair.b, conversation, upstream) == expected
    assert await shown(pair.a, conversation, upstream) == [*expected, "say end", "to say end"]


@pytest.mark.sample(1)
async def test_who_goes_on_from_an_answer_before_a_rewind_sees_its_items_once(pair: Pair, upstream: Upstream) -> None:
    conversation = (await pair.a.openai.conversations.create(items=[message("say by hand")])).id
    first = await said(pair.a, conversation, "say one")
    back = await pair.a.http.post(f"/v1/chains/{conversation}/rewind", json={"to": "-1"})
    assert back.status_code == 200, back.text
    await said(pair.b, conversation, "say other")
    again = await pair.b.openai.responses.create(model="sonnet", input="say two", previous_response_id=first.id)
    assert again.output_text == "to say two"
    expected = ["say by hand", "say one", "to say one", "say two", "to say two"]
    assert await texts(pair.a, conversation) == expected
    assert await shown(pair.a, conversation, upstream) == expected


@pytest.mark.parametrize(("pair", "hand"), cases(["a question", "an exchange"]), indirect=["pair"])
@pytest.mark.sample(1)
async def test_a_failed_turn_that_is_sent_again_shows_an_item_that_another_turn_took_once(
    pair: Pair, upstream: Upstream, hand: str
) -> None:
    items = [message("say h1")] if hand == "a question" else [message("say h1"), message("h2", "assistant")]
    words = [item["content"] for item in items]
    conversation = (await pair.a.openai.conversations.create(items=items)).id
    key = {"Idempotency-Key": "k"}
    upstream.when("say one", Fail(400), times=None)
    with pytest.raises(Exception, match="scripted failure"):
        await said(pair.a, conversation, "say one", extra_headers=key)
    upstream.heal()
    await said(pair.b, conversation, "say two")
    await said(pair.a, conversation, "say one", extra_headers=key)
    expected = [*words, "say two", "to say two", "say one", "to say one"]
    assert await texts(pair.a, conversation) == expected
    assert await shown(pair.b, conversation, upstream) == expected


# --- an answer that never arrived


@pytest.mark.parametrize(("pair", "at"), cases(["the same proxy", "the other proxy"]), indirect=["pair"])
@pytest.mark.sample(1)
async def test_an_undelivered_turn_is_left_off_after_an_item_was_taken_out(
    pair: Pair, upstream: Upstream, at: str
) -> None:
    conversation = (await pair.a.openai.conversations.create()).id
    await said(pair.a, conversation, "say one")
    await removed(pair.a, conversation, "to say one")
    await said(pair.a, conversation, "say two")
    await left(pair.a, conversation, upstream, "say lost")
    there = pair.a if at == "the same proxy" else pair.b
    expected = ["say one", "say two", "to say two"]
    assert await texts(there, conversation) == expected
    assert await shown(there, conversation, upstream) == expected


@pytest.mark.sample(1)
async def test_an_answer_in_the_input_behind_an_undelivered_turn_leaves_it_off(pair: Pair, upstream: Upstream) -> None:
    conversation = (await pair.a.openai.conversations.create(items=[message("say by hand")])).id
    await said(pair.a, conversation, "say one")
    await left(pair.a, conversation, upstream, "say lost")
    await said(pair.b, conversation, [message("say h1"), message("h2", "assistant"), message("say two")])
    expected = ["say by hand", "say one", "to say one", "say h1", "h2", "say two", "to say two"]
    assert await shown(pair.b, conversation, upstream) == expected


@pytest.mark.parametrize(
    ("pair", "how", "then"),
    cases(["told anew", "with answers in its input"], ["a turn", "a rewind"]),
    indirect=["pair"],
)
@pytest.mark.sample(2)
async def test_an_undelivered_turn_that_told_the_path_anew_is_left_off_whole(
    pair: Pair, upstream: Upstream, how: str, then: str
) -> None:
    """Nothing of what stood on the path before goes with it, and nothing of its own input stays."""
    conversation = (await pair.a.openai.conversations.create()).id
    await said(pair.a, conversation, "say one")
    await said(pair.a, conversation, "say two")
    expected = ["say one", "to say one", "say two", "to say two"]
    await added(pair.b, conversation, "say by hand")
    if how == "told anew":
        await removed(pair.b, conversation, "to say two")
        expected.remove("to say two")
        await left(pair.a, conversation, upstream, "say lost")
    else:
        await left(pair.a, conversation, upstream, "say h1", "h2", "say lost")
    expected.append("say by hand")
    assert await texts(pair.b, conversation) == expected
    if then == "a rewind":
        back = await pair.b.http.post(f"/v1/chains/{conversation}/rewind", json={"to": "-1"})
        assert (back.status_code, back.json()["turns"]) == (200, 1)
        assert await texts(pair.a, conversation) == expected
    assert await shown(pair.b, conversation, upstream) == expected
    assert await shown(pair.a, conversation, upstream) == [*expected, "say end", "to say end"]


# --- what holds on


@pytest.mark.parametrize(
    ("pair", "then"), cases(["an answer in the input", "an item was taken out"]), indirect=["pair"]
)
@pytest.mark.sample(1)
async def test_a_system_item_holds_on(pair: Pair, upstream: Upstream, then: str) -> None:
    """It is listed as long as the model is shown it, once."""
    conversation = (await pair.a.openai.conversations.create(items=[message("Be terse.", "system")])).id
    await said(pair.a, conversation, "say one")
    given: Any = "say two"
    if then == "an item was taken out":
        await removed(pair.a, conversation, "to say one")
    else:
        given = [message("say h1"), message("h2", "assistant"), message("say two")]
    await said(pair.b, conversation, given)
    await said(pair.a, conversation, "say three")
    for request in upstream.requests:
        assert str(request.body["system"]).count("Be terse.") == 1
    assert (await texts(pair.a, conversation)).count("Be terse.") == 1


async def test_two_serves_on_one_store_keep_a_conversation(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2)
    upstream.answer = answered
    async with serve(settings, tmp_path) as (one, _), serve(settings, tmp_path) as (two, _):
        a, b = client_of(f"{one}/v1"), client_of(f"{two}/v1")
        try:
            made = await a.conversations.create(items=[message("say h1"), message("h2", "assistant")])

            async def say(client: Any, text: str) -> None:
                await client.responses.create(model="sonnet", input=text, conversation=made.id)

            await asyncio.gather(*(say((a, b)[at % 2], f"say {at}") for at in range(AT_ONCE)))
            await b.conversations.items.create(made.id, items=[message("say free")])
            answers = [
                item.id or ""
                for item in (await b.conversations.items.list(made.id, order="asc")).data
                for part in getattr(item, "content", [])
                if part.text.startswith("to say")
            ]
            out = [
                (a, b)[at % 2].conversations.items.delete(item, conversation_id=made.id)
                for at, item in enumerate(answers)
            ]
            await asyncio.gather(*out)
            await asyncio.gather(say(a, "say x"), say(b, "say y"))
            await say(a, "say end")
        finally:
            await a.close()
            await b.close()
    seen = [text for _, text in upstream.requests[-1].texts()]
    assert seen[:2] == ["say h1", "h2"]
    assert sorted(seen[2 : 2 + AT_ONCE]) == [f"say {at}" for at in range(AT_ONCE)]
    rest = seen[2 + AT_ONCE :]
    first, second = ("x", "y") if rest[1] == "say x" else ("y", "x")
    assert rest == ["say free", f"say {first}", f"to say {first}", f"say {second}", f"to say {second}", "say end"]


@pytest.mark.sample(1)
async def test_an_answer_written_by_hand_behind_an_answer_stands_there(pair: Pair, upstream: Upstream) -> None:
    conversation = (await pair.a.openai.conversations.create()).id
    await said(pair.a, conversation, "say one")
    await added(pair.b, conversation, "by hand", role="assistant")
    await said(pair.b, conversation, "say two")
    expected = ["say one", "to say one", "by hand", "say two", "to say two"]
    assert await shown(pair.a, conversation, upstream) == expected


# --- an agent that is named, and continued at its head


async def test_what_holds_on_is_decided_when_a_turn_runs(pair: Pair, upstream: Upstream) -> None:
    """The second request is accepted before the turn that it continues has told what holds on."""
    named: Any = {"extra_headers": {"X-Agent-Id": "ada"}}
    gate = HeldReply()
    upstream.when("say one", gate)
    first = [message("Be terse.", "system"), message("say one")]
    running = asyncio.create_task(pair.a.openai.responses.create(model="sonnet", input=first, **named))
    async with asyncio.timeout(60):
        await gate.reached.wait()
    waiting = asyncio.create_task(pair.b.openai.responses.create(model="sonnet", input="say two", **named))
    await accepted(pair.a, "ada", 2)
    gate.open()
    await asyncio.gather(running, waiting)
    last = upstream.requests[-1]
    assert [text for _, text in last.texts()][-1] == "say two"
    assert str(last.body["system"]).count("Be terse.") == 1


async def test_a_response_that_is_deleted_while_its_turn_begins_again_keeps_what_that_says(
    pair: Pair, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn failed; it is sent again between the look of the deletion and its write."""
    conversation = (await pair.a.openai.conversations.create()).id
    keyed = {"extra_headers": {"Idempotency-Key": "k"}}
    upstream.when("say one", Fail(400), times=None)
    with pytest.raises(Exception, match="scripted failure"):
        await said(pair.a, conversation, "say one", **keyed)
    upstream.heal()
    agent = await pair.a.engine.store.agent("local", conversation)
    assert agent is not None
    [failed] = [turn async for turn in pair.a.engine.store.turns(agent.key)]
    await added(pair.a, conversation, "Be terse.", role="system")
    add_to_call = pair.a.engine.store.add_to_call

    async def late(turn_id: str, more: Any) -> None:
        await said(pair.b, conversation, "say one", **keyed)
        await add_to_call(turn_id, more)

    monkeypatch.setattr(pair.a.engine.store, "add_to_call", late)
    await pair.a.openai.responses.delete(response_id(failed.id))
    assert await texts(pair.b, conversation) == ["Be terse.", "say one", "to say one"]
    await said(pair.b, conversation, "say two")
    assert str(upstream.requests[-1].body["system"]).count("Be terse.") == 1
