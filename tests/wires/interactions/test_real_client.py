"""Interactions with the google-genai client over a server: `cli_proxy` has the real CLI behind it, `proxy` none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.genai._gaos.types.interactions import Interaction
from google.genai._gaos.types.interactions.interactionsseevent import InteractionSSEEvent
from google.genai._interactions import BadRequestError, NotFoundError
from pydantic import TypeAdapter

from cli_session_proxy.engine.engine import Engine
from turnfault.provider.script import HeldReply, Reply
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...every_wire import five_turns, google_client, proxied, the_one_chain
from ...matrix import rest_in_full
from ...until import until
from ...without_cli import proxied_without_cli

EVENT: TypeAdapter[Any] = TypeAdapter(InteractionSSEEvent)
# Any: the client's own types cannot tell whether `create` was asked to stream.
Proxy = tuple[Engine, Any]
THINK: Any = {"thinking_summaries": "auto"}


@pytest.fixture
async def proxy(make_settings: MakeSettings, upstream: Upstream) -> AsyncIterator[Proxy]:
    async with proxied_without_cli(make_settings(), upstream) as (engine, root), google_client(root) as client:
        yield engine, client


@pytest.fixture
async def cli_proxy(make_settings: MakeSettings, claude_2: Path) -> AsyncIterator[Proxy]:
    async with proxied(make_settings(claude_bin=claude_2)) as (engine, root), google_client(root) as client:
        yield engine, client


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_five_turns_by_id_are_one_chain(cli_proxy: Proxy, upstream: Upstream, stream: bool) -> None:
    engine, client = cli_proxy
    last: dict[str, Any] = {}

    async def say(text: str) -> str:
        if not stream:
            made = await client.interactions.create(model="sonnet", input=text, **last)
            last["previous_interaction_id"] = made.id
            Interaction.model_validate(made.model_dump(by_alias=True, exclude_none=True))
            assert (made.status, made.model) == ("completed", "sonnet")
            return made.output_text or ""
        said = ""
        async for event in await client.interactions.create(model="sonnet", input=text, stream=True, **last):
            EVENT.validate_python(event.model_dump(by_alias=True, exclude_none=True))
            if event.event_type == "step.delta" and event.delta.type == "text":
                said += event.delta.text
            if event.event_type == "interaction.completed":
                last["previous_interaction_id"] = event.interaction.id
        return said

    await five_turns(say, upstream)
    turns = await the_one_chain(engine)
    assert [turn.origin for turn in turns] == ["interactions"] * 5


async def test_two_that_share_a_previous_id_are_branches(proxy: Proxy, upstream: Upstream) -> None:
    _, client = proxy
    root = await client.interactions.create(model="sonnet", input="Remember: the colour is teal")
    ids: Any = [root.id, root.id]
    for number in range(2):
        for side, tree in enumerate(("ash", "oak")):
            made = await client.interactions.create(
                model="sonnet", input=f"Remember: tree {number} is {tree}", previous_interaction_id=ids[side]
            )
            ids[side] = made.id
    for side, tree in enumerate(("ash", "oak")):
        made = await client.interactions.create(model="sonnet", input="recall", previous_interaction_id=ids[side])
        assert made.output_text == f"I remember: colour is teal; tree 0 is {tree}; tree 1 is {tree}."


async def test_a_stream_is_read_on_from_any_event(proxy: Proxy, upstream: Upstream) -> None:
    _, client = proxy
    upstream.when("hello", Reply("Grüße, 猫! This is a longer answer.", thinking="They greet me."))
    events = [
        event async for event in await client.interactions.create(
            model="sonnet", input="hello", stream=True, generation_config=THINK
        )
    ]  # fmt: skip
    name = events[0].interaction.id
    kinds = [event.event_type for event in events]
    assert kinds[:3] == ["interaction.created", "interaction.status_update", "step.start"]
    assert kinds[-2:] == ["step.stop", "interaction.completed"]
    assert kinds.count("step.start") == kinds.count("step.stop") == 2

    def told(some: list[Any]) -> list[str]:
        deltas = [event.delta for event in some if event.event_type == "step.delta"]
        return ["".join(d.content.text for d in deltas if d.type == "thought_summary"),
                "".join(d.text for d in deltas if d.type == "text")]  # fmt: skip

    whole = told(events)
    assert whole == ["They greet me.", "Grüße, 猫! This is a longer answer."]
    for at in range(len(events)):
        rest = [
            event async for event in await client.interactions.get(
                name, stream=True, last_event_id=events[at].event_id
            )
        ]  # fmt: skip
        before, after = told(events[: at + 1]), told(rest)
        assert [one + two for one, two in zip(before, after, strict=True)] == whole
        if at < len(events) - 1:
            assert rest[-1].event_type == "interaction.completed"


async def test_a_background_interaction_goes_on_without_its_client(proxy: Proxy, upstream: Upstream) -> None:
    engine, client = proxy
    gate = HeldReply(reply=Reply("Done."))
    upstream.when("hello", gate)
    made = await client.interactions.create(model="sonnet", input="hello", background=True)
    assert made.status == "queued"
    assert made.id is not None
    await asyncio.wait_for(gate.reached.wait(), 60)
    assert (await client.interactions.get(made.id)).status == "in_progress"
    gate.open()
    events = [event async for event in await client.interactions.get(made.id, stream=True)]
    assert events[-1].event_type == "interaction.completed"
    done = await client.interactions.get(made.id, include_input=True)
    assert (done.status, done.output_text) == ("completed", "Done.")
    assert done.model_dump()["input"][0]["content"][0]["text"] == "hello"

    async def is_noted() -> bool:
        [turn] = await the_one_chain(engine, 1)
        return turn.delivery == "delivered"

    await until(is_noted)


async def test_a_background_interaction_is_cancelled_and_never_continued(proxy: Proxy, upstream: Upstream) -> None:
    _, client = proxy
    gate = HeldReply()
    upstream.when("hello", gate)
    made = await client.interactions.create(model="sonnet", input="hello", background=True)
    assert made.id is not None
    await asyncio.wait_for(gate.reached.wait(), 60)
    assert (await client.interactions.cancel(made.id)).status == "cancelled"
    assert (await client.interactions.get(made.id)).status == "cancelled"
    with pytest.raises(BadRequestError, match="the previous interaction is cancelled"):
        await client.interactions.create(model="sonnet", input="on", previous_interaction_id=made.id)


async def test_a_background_interaction_of_a_dead_proxy_is_failed_with_a_reason(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("hello", gate)
    quick = make_settings(drain_timeout=0.0)
    async with proxied_without_cli(quick, upstream) as (_, root), google_client(root) as client:
        made: Any = await client.interactions.create(model="sonnet", input="hello", background=True)
        assert made.id is not None
        await asyncio.wait_for(gate.reached.wait(), 60)
    async with proxied_without_cli(quick, upstream) as (_, root), google_client(root) as client:
        found = await client.interactions.get(made.id)
        assert found.status in ("failed", "cancelled")


async def test_deleted_unstored_and_unknown_ids_are_not_found(proxy: Proxy, upstream: Upstream) -> None:
    _, client = proxy
    kept = await client.interactions.create(model="sonnet", input="hello")
    unstored = await client.interactions.create(model="sonnet", input="hello", store=False)
    assert kept.id is not None
    assert unstored.id is not None
    await client.interactions.delete(kept.id)
    for name in (kept.id, unstored.id, "interaction_unknown", "v1_x"):
        for ask in (
            client.interactions.get(name),
            client.interactions.delete(name),
            client.interactions.cancel(name),
            client.interactions.create(model="sonnet", input="on", previous_interaction_id=name),
        ):
            with pytest.raises(NotFoundError, match="there is no interaction") as caught:
                await ask
            body: Any = caught.value.body
            assert body["error"]["code"] == "not_found"
