"""OpenAI Conversations with OpenAI's own client and types."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, cast

import httpx
import openai
import pytest

from cli_session_proxy.http import connection, gate
from cli_session_proxy.stores import held
from cli_session_proxy.stores.sql import reading, rows, store
from cli_session_proxy.wires.asgi import MIDDLING
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ... import media
from ...talking import events, heard
from ...until import until
from .conftest import Door


async def texts(door: Door, conversation: str) -> list[str]:
    """What the conversation holds, oldest first."""
    page = await door.openai.conversations.items.list(conversation, order="asc")
    return [part.text async for item in page for part in getattr(item, "content", [])]


async def test_five_turns_in_a_conversation_streamed_and_not(door: Door, upstream: Upstream) -> None:
    made = await door.openai.conversations.create(metadata={"topic": "facts"})
    assert made.metadata == {"topic": "facts"}
    said = [f"remember fact{n} = value{n}" for n in range(4)] + ["recall"]
    for n, one in enumerate(said):
        if n % 2:
            async with door.openai.responses.stream(model="sonnet", input=one, conversation=made.id) as events:
                async for _ in events:
                    pass
                response: Any = await events.get_final_response()
        else:
            response = await door.openai.responses.create(model="sonnet", input=one, conversation={"id": made.id})
        assert response.conversation.id == made.id
    assert response.output_text == "I remember: " + "; ".join(f"fact{n} is value{n}" for n in range(4)) + "."
    assert heard(upstream) == said
    held = await texts(door, made.id)
    assert held[0::2] == said
    assert held[-1] == response.output_text


async def test_items_written_by_hand_are_what_the_model_sees(cli_door: Door, upstream: Upstream) -> None:
    made = await cli_door.openai.conversations.create(
        items=[
            {"type": "message", "role": "user", "content": "remember a = 1"},
            {"type": "message", "role": "assistant", "content": "Noted by hand."},
            {"type": "message", "role": "user", "content": "remember b = 2"},
        ]
    )
    first = await cli_door.openai.responses.create(model="sonnet", input="recall", conversation=made.id)
    assert first.output_text == "I remember: a is 1; b is 2."
    assert upstream.requests[-1].texts() == [
        ("user", "remember a = 1"), ("assistant", "Noted by hand."), ("user", "remember b = 2"), ("user", "recall"),
    ]  # fmt: skip
    await cli_door.openai.conversations.items.create(
        made.id, items=[{"type": "message", "role": "user", "content": "remember c = 3"}]
    )
    second = await cli_door.openai.responses.create(model="sonnet", input="recall again", conversation=made.id)
    assert second.output_text == "I remember: a is 1; b is 2; c is 3."
    assert await texts(cli_door, made.id) == [
        "remember a = 1", "Noted by hand.", "remember b = 2", "recall", first.output_text, "remember c = 3",
        "recall again", second.output_text,
    ]  # fmt: skip


async def test_items_are_added_once_although_the_client_lost_the_answer_and_asks_again(door: Door) -> None:
    made = await door.openai.conversations.create()
    said: list[Any] = [{"type": "message", "role": "user", "content": f"remember {name} = 1"} for name in "ab"]
    seen: list[Any] = []

    async def lose(response: Any) -> None:
        await response.aread()
        seen.append(response.json()["data"])
        if len(seen) == 1:
            response.status_code = 502  # as a front says that lost the answer

    loses_the_first = openai.DefaultAsyncHttpxClient(trust_env=False, event_hooks={"response": [lose]})
    async with door.openai.with_options(http_client=loses_the_first, max_retries=1) as client:
        added = await client.conversations.items.create(made.id, items=said)
    assert seen == [seen[0], seen[0]]
    assert [item.id for item in added.data] == [item["id"] for item in seen[0]]
    assert await texts(door, made.id) == ["remember a = 1", "remember b = 1"]
    await door.openai.conversations.items.create(made.id, items=said)  # the same again, on purpose
    assert len(await texts(door, made.id)) == 4


async def test_items_that_equal_those_of_a_turn_are_new_also_if_their_request_is_a_retry(
    door: Door, upstream: Upstream
) -> None:
    """Its first attempt was refused, say: the store was away."""
    made = await door.openai.conversations.create()
    for retries in range(2):
        said: list[Any] = [{"type": "message", "role": "user", "content": "go on"}]
        again = {"x-stainless-retry-count": str(retries)}
        await door.openai.conversations.items.create(made.id, items=said, extra_headers=again)
        await door.openai.responses.create(model="sonnet", input=f"turn-{retries}", conversation=made.id)
    assert upstream.requests[-1].user_texts() == ["go on", "turn-0", "go on", "turn-1"]


async def test_a_turn_that_fails_does_not_swallow_the_items(door: Door, upstream: Upstream) -> None:
    made = await door.openai.conversations.create(
        items=[{"type": "message", "role": "user", "content": "remember a = 1"}]
    )
    gate = HeldReply()
    upstream.next(gate)
    running = await door.openai.responses.create(model="sonnet", input="go", conversation=made.id, background=True)
    await asyncio.wait_for(gate.reached.wait(), 60)
    await door.openai.responses.cancel(running.id)
    assert await texts(door, made.id) == ["remember a = 1"]
    told = await door.openai.responses.create(model="sonnet", input="recall", conversation=made.id)
    assert told.output_text == "I remember: a is 1."


async def test_an_item_taken_out_is_left_off_by_the_next_turn(door: Door, upstream: Upstream) -> None:
    made = await door.openai.conversations.create()
    for name in "abc":
        await door.openai.responses.create(model="sonnet", input=f"remember {name} = 1", conversation=made.id)
    items = await door.openai.conversations.items.list(made.id, order="asc")
    middle = items.data[2]
    assert await door.openai.conversations.items.retrieve(middle.id or "", conversation_id=made.id) == middle
    left = await door.openai.conversations.items.delete(middle.id or "", conversation_id=made.id)
    assert left.id == made.id
    assert "remember b = 1" not in await texts(door, made.id)
    told = await door.openai.responses.create(model="sonnet", input="recall", conversation=made.id)
    assert told.output_text == "I remember: a is 1; c is 1."
    assert heard(upstream) == ["remember a = 1", "remember c = 1", "recall"]
    assert (await texts(door, made.id))[-1] == told.output_text
    # an item that no turn has taken in is simply gone
    [added] = (
        await door.openai.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": "remember d = 1"}]
        )
    ).data
    await door.openai.conversations.items.delete(added.id or "", conversation_id=made.id)
    again = await door.openai.responses.create(model="sonnet", input="recall again", conversation=made.id)
    assert again.output_text == "I remember: a is 1; c is 1."


async def test_items_keep_their_ids_when_a_turn_takes_them_and_when_the_path_is_told_anew(
    door: Door, upstream: Upstream
) -> None:
    given: list[Any] = [
        {"type": "message", "role": "system", "content": "Be terse."},
        {"type": "message", "role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"at": "home"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It rains."}, {"type": "output_text", "text": "Take care."}],
        },
        {"type": "message", "role": "user", "content": "remember a = 1"},
    ]

    async def ids() -> list[str]:
        return [str(item.id) async for item in await door.openai.conversations.items.list(made.id, order="asc")]

    made = await door.openai.conversations.create(items=given)
    system, question, thought, call, output, answer, last = await ids()
    await door.openai.responses.create(model="sonnet", input="say one", conversation=made.id)
    taken = await ids()
    assert set(taken[:-2]) == {system, question, thought, call, output, answer, last}
    assert [item_id for item_id in taken[:-2] if item_id not in (system, thought)] == [
        question, call, output, answer, last,
    ]  # fmt: skip
    await door.openai.conversations.items.delete(answer, conversation_id=made.id)
    await door.openai.responses.create(model="sonnet", input="say two", conversation=made.id)
    anew = await ids()
    assert set(anew[:-2]) == set(taken) - {answer}
    assert "It rains." not in upstream.requests[-1].raw.decode()
    for gone in (call, output, taken[-1]):
        await door.openai.conversations.items.delete(gone, conversation_id=made.id)
    await door.openai.responses.create(model="sonnet", input="say three", conversation=made.id)
    assert upstream.requests[-1].user_texts() == ["weather?", "remember a = 1", "say one", "say two", "say three"]
    assert set((await ids())[:-2]) == set(anew) - {call, output, taken[-1]}
    assert "Be terse." in str(upstream.requests[-1].body["system"])
    await door.openai.conversations.items.delete(system, conversation_id=made.id)
    await door.openai.responses.create(model="sonnet", input="say four", conversation=made.id)
    assert "Be terse." not in upstream.requests[-1].raw.decode()


async def test_metadata_changes_and_a_deleted_conversation_is_gone_with_its_chain(door: Door) -> None:
    api = door.openai.conversations
    made = await api.create()
    response = await door.openai.responses.create(model="sonnet", input="hello", conversation=made.id)
    assert (await api.update(made.id, metadata={"a": "b"})).metadata == {"a": "b"}
    assert (await api.retrieve(made.id)).metadata == {"a": "b"}
    assert (await api.delete(made.id)).deleted
    for call in (api.retrieve, api.delete, api.items.list):
        with pytest.raises(openai.NotFoundError, match=made.id):
            await call(made.id)
    with pytest.raises(openai.NotFoundError):
        await door.openai.responses.create(model="sonnet", input="x", conversation=made.id)
    with pytest.raises(openai.NotFoundError):
        await door.openai.responses.retrieve(response.id)


async def test_items_of_every_kind_come_back_as_they_were_written(door: Door) -> None:
    given: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"at": "home"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
    ]
    made = await door.openai.conversations.create(items=given)
    kept = [item.to_dict() async for item in await door.openai.conversations.items.list(made.id, order="asc")]
    for before, after in zip(given, kept, strict=True):
        assert after["id"]
        assert {name: after[name] for name in before if name != "content"} == {
            name: value for name, value in before.items() if name != "content"
        }
    wrong = await door.http.post(f"/v1/conversations/{made.id}/items", json={"items": [{"type": "apple_call"}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "items[0].type")
    many = await door.http.post("/v1/conversations", json={"items": given * 5})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "items")


async def test_a_chain_of_another_wire_has_a_conversation_too(door: Door, upstream: Upstream) -> None:
    await door.openai.chat.completions.create(
        model="sonnet", messages=[{"role": "user", "content": "remember a = 1"}], extra_headers={"X-Agent-Id": "ada"}
    )
    conversation = f"conv_x{b'ada'.hex()}"
    told = await door.openai.responses.create(model="sonnet", input="recall", conversation=conversation)
    assert told.output_text == "I remember: a is 1."
    assert (await texts(door, conversation))[0] == "remember a = 1"
    again = await door.http.post("/agents/ada/v1/responses", json={"model": "sonnet", "input": "recall again"})
    assert again.headers["x-agent-id"] == "ada"
    assert heard(upstream) == ["remember a = 1", "recall", "recall again"]


async def test_a_conversation_larger_than_what_is_read_on_the_event_loop_comes_in(door: Door) -> None:
    long = "x" * (MIDDLING + 1)
    item: Any = {"type": "message", "role": "user", "content": long}
    made = await door.openai.conversations.create(items=[item])
    await door.openai.conversations.items.create(made.id, items=[item])
    assert await texts(door, made.id) == [long, long]


async def test_a_large_answer_arrives_whole_although_much_of_it_is_unread_at_first(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was given to the server as a whole counted as unread, and the client was disconnected."""
    monkeypatch.setattr(connection.UnreadWatch, "unread", connection.Unread(limit=1024 * 1024))
    long = "x" * (16 * 1024 * 1024)
    made = await door.openai.conversations.create(items=[{"type": "message", "role": "user", "content": long}])
    [item] = (await door.openai.conversations.items.list(made.id)).data
    assert await texts(door, made.id) == [long]
    assert await door.openai.conversations.items.retrieve(item.id or "", conversation_id=made.id) == item


async def test_a_client_that_reads_a_large_answer_very_slowly_is_let_go(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte in five minutes was enough to keep the answer, and what was read for it, in memory."""
    long = "x" * (16 * 1024 * 1024)
    made = await door.openai.conversations.create(items=[{"type": "message", "role": "user", "content": long}])
    [item] = (await door.openai.conversations.items.list(made.id)).data
    monkeypatch.setattr(gate, "TAKEN_WITHIN", 0.1)
    async with door.http.stream("GET", f"/v1/conversations/{made.id}/items/{item.id}") as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces)
        await until(lambda: any(one["event"] == "client_reads_too_slowly" for one in events(caplog)))
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in pieces:
                pass


async def test_items_of_a_client_count_in_the_memory_of_long_conversations(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have 256 MiB together, and were read without a bound for each look and each turn."""
    made = await door.openai.conversations.create(items=[{"type": "message", "role": "user", "content": "here"}])
    monkeypatch.setattr(store, "UNCOUNTED", 0)
    monkeypatch.setattr(held, "PATIENCE", 0.0)
    other = held.Hold(door.engine.holds, "another")
    other.count(held.MOST)
    look = await door.http.get(f"/v1/conversations/{made.id}/items")
    turn = await door.http.post("/v1/responses", json={"model": "sonnet", "input": "hi", "conversation": made.id})
    for refused in (look, turn):
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    other.release()
    assert await texts(door, made.id) == ["here"]
    assert not door.engine.holds.bytes


async def test_the_items_of_a_conversation_are_listed_however_large_its_files_are_together(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 turns with a document of 20 MB took 1.8 GB: every turn was read, for a page of some of its items."""
    made = await door.openai.conversations.create()
    sent: list[Any] = []
    for name in "abc":
        data = base64.b64encode(media.paper() + name.encode() * 100_000).decode()
        part = {"type": "input_file", "file_data": f"data:application/pdf;base64,{data}", "filename": f"{name}.pdf"}
        given: Any = [{"role": "user", "content": [part]}]
        await door.openai.responses.create(model="sonnet", input=given, conversation=made.id)
        sent.append(part["file_data"])
    monkeypatch.setattr(reading, "MOST_OF_A_PATH", 100_000)  # of one turn's document
    pages = [await door.openai.conversations.items.list(made.id, order="asc", limit=limit) for limit in (4, 20)]
    after = pages[0].last_id or ""
    pages.append(await door.openai.conversations.items.list(made.id, order="asc", after=after))
    newest_first = await door.openai.conversations.items.list(made.id)
    items: list[list[Any]] = [list(page.data) for page in (*pages, newest_first)]
    parts = [[part.model_dump() for item in page for part in item.content] for page in items]
    files = [[part["file_data"] for part in page if part["type"] == "input_file"] for page in parts]
    assert files == [sent[:2], sent, sent[2:], sent[::-1]]
    assert [page.has_more for page in (*pages, newest_first)] == [True, False, False, False]
    first = pages[1].data[0]
    assert await door.openai.conversations.items.retrieve(first.id or "", conversation_id=made.id) == first
    nothing = await door.http.get(f"/v1/conversations/{made.id}/items?order=asc&after={pages[1].last_id}")
    assert nothing.json() == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}


async def test_items_that_are_too_much_for_one_turn_are_refused_in_words_until_some_are_removed(
    door: Door, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a turn was run, and exported, but no import took it."""
    monkeypatch.setattr(rows, "INPUT_VALUES", 1000)
    parts = [{"type": "input_text", "text": "x"}] * 200
    made = await door.openai.conversations.create()
    for _ in range(2):
        await door.openai.conversations.items.create(made.id, items=[{"role": "user", "content": cast(Any, parts)}])
    ask = {"model": "sonnet", "input": "recall", "conversation": made.id}
    for _ in range(2):
        refused = await door.http.post("/v1/responses", json=ask)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
        assert "1,000 JSON values" in refused.json()["error"]["message"]
    assert not upstream.requests
    [item, _] = (await door.openai.conversations.items.list(made.id)).data
    await door.openai.conversations.items.delete(item.id or "", conversation_id=made.id)
    told = await door.openai.responses.create(**cast(Any, ask))
    assert told.status == "completed"
    assert len(await texts(door, made.id)) == 202


HALF = r'"\ud800"'
HERE = '{"type": "message", "role": "user", "content": "here"}'
NO_TEXT = (
    f'{{"items": [{{"type": "message", "role": "user", "content": {HALF}}}]}}',
    f'{{"metadata": {{"a": {HALF}}}}}',
)
NO_NUMBER = '{"metadata": {"a": "b"}, "items": [{"type": "message", "role": "user", "content": "x", "n": 1e999}]}'


@pytest.mark.parametrize("body", [*NO_TEXT, NO_NUMBER])
async def test_what_could_not_be_written_down_again_is_refused(door: Door, body: str) -> None:
    """JSON can name half a character, and Python reads it: each look at such a conversation would fail."""
    made = (await door.http.post("/v1/conversations", content=f'{{"items": [{HERE}]}}')).json()
    for path in ("", f"/{made['id']}", f"/{made['id']}/items"):
        refused = await door.http.post(f"/v1/conversations{path}", content=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request"), path
    assert await texts(door, made["id"]) == ["here"]
