"""OpenAI Responses with OpenAI's own client and types.

What reaches the model, and what interrupts or asks it again, is looked at on the real CLI (`cli_door`).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from cli_session_proxy.wires.responses import dialogues
from cli_session_proxy.wires.responses.composing import compose
from turnfault.provider.script import Fail, HeldReply, Reply
from turnfault.provider.seen import parts as parts_of
from turnfault.provider.upstream import Upstream

from ...talking import heard
from .conftest import Door, OpenDoor

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# ResponseResource: a strict reader wants these present even when null.
FIELDS = {
    "background", "completed_at", "created_at", "error", "frequency_penalty", "id", "incomplete_details",
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "object", "output",
    "parallel_tool_calls", "presence_penalty", "previous_response_id", "prompt_cache_key", "reasoning",
    "safety_identifier", "service_tier", "status", "store", "temperature", "text", "tool_choice", "tools",
    "top_logprobs", "top_p", "truncation", "usage",
}  # fmt: skip
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def lines(raw: str) -> list[dict[str, Any]]:
    """The events of a stream, each checked by OpenAI's own types; names and data agree."""
    found = []
    *blocks, done = raw.strip().split("\n\n")
    assert done == "data: [DONE]"
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(_with_their_code(event))
        found.append(event)
    return found


def _with_their_code(event: dict[str, Any]) -> dict[str, Any]:
    """Their types name a closed list of codes for a failed response; their client takes ours, too."""
    if event["type"] != "response.failed" or event["response"]["error"] is None:
        return event
    failed = event["response"]
    return {**event, "response": {**failed, "error": {**failed["error"], "code": "server_error"}}}


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def stream(door: Door, **body: Any) -> list[dict[str, Any]]:
    answer = await door.http.post("/v1/responses", json={"model": "sonnet", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return lines(answer.text)


async def read_again(door: Door, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    answer = await door.http.get(f"/v1/responses/{response_id}", params=query)
    assert answer.status_code == 200, answer.text
    return lines(answer.text) if answer.text else []


async def test_five_turns_by_previous_response_id_streamed_and_not(cli_door: Door, upstream: Upstream) -> None:
    previous: str | None = None
    said = [f"remember fact{n} = value{n}" for n in range(4)] + ["recall"]
    for n, one in enumerate(said):
        if n % 2:
            async with cli_door.openai.responses.stream(
                model="sonnet", input=one, previous_response_id=previous or openai.omit
            ) as events:
                seen = [event.type async for event in events]
                response: Any = await events.get_final_response()
            assert seen[0] == "response.created"
            assert seen[-1] == "response.completed"
        else:
            response = await cli_door.openai.responses.create(model="sonnet", input=one, previous_response_id=previous)
        assert response.previous_response_id == previous
        previous = response.id
    assert response.output_text == "I remember: " + "; ".join(f"fact{n} is value{n}" for n in range(4)) + "."
    assert heard(upstream) == said
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


async def test_a_response_has_every_field_and_is_the_same_when_it_is_retrieved(door: Door) -> None:
    raw = await door.http.post(
        "/v1/responses",
        json={"model": "sonnet", "input": "hello", "metadata": {"k": "v"}, "temperature": 0.5, "agent_id": "ada"},
    )
    body = raw.json()
    assert set(body) >= FIELDS
    assert TypeAdapter(Response).validate_python(body).output_text == "You said: hello (1)"
    assert body["metadata"] == {"k": "v"}
    assert raw.headers["x-ignored-params"] == "temperature"
    assert raw.headers["x-agent-id"] == "ada"
    assert body["id"].removeprefix("resp_") == raw.headers["x-turn-id"].removeprefix("turn_")
    again = await door.http.get(f"/v1/responses/{body['id']}")
    assert again.json() == body
    assert again.headers["x-session-id"] == raw.headers["x-session-id"]


async def test_two_responses_from_one_previous_are_branches_that_never_mix(cli_door: Door, upstream: Upstream) -> None:
    create = cli_door.openai.responses.create
    root = await create(model="sonnet", input="remember base = 0")
    left, right = await asyncio.gather(
        create(model="sonnet", input="remember side = left", previous_response_id=root.id),
        create(model="sonnet", input="remember side = right", previous_response_id=root.id),
    )
    for side, first in (("left", left), ("right", right)):
        last = first
        for n in range(2):
            last = await create(model="sonnet", input=f"{side} {n}", previous_response_id=last.id)
        told = await create(model="sonnet", input="recall", previous_response_id=last.id)
        assert told.output_text == f"I remember: base is 0; side is {side}."
        assert heard(upstream) == ["remember base = 0", f"remember side = {side}", f"{side} 0", f"{side} 1", "recall"]


async def test_instructions_hold_for_one_response_and_system_items_for_the_conversation(
    door: Door, upstream: Upstream
) -> None:
    create = door.openai.responses.create
    first = await create(
        model="sonnet", instructions="Speak softly.",
        input=[{"role": "system", "content": "You are Ada."}, {"role": "user", "content": "hi"}],
    )  # fmt: skip
    assert first.instructions == "Speak softly."
    second = await create(model="sonnet", input="and now", previous_response_id=first.id)
    assert second.instructions is None
    systems = [json.dumps(seen.body["system"]) for seen in upstream.requests]
    assert ["Speak softly." in one for one in systems] == [True, False]
    assert ["You are Ada." in one for one in systems] == [True, True]
    items = await door.openai.responses.input_items.list(first.id, order="asc")
    assert [item.role for item in items.data] == ["system", "user"]  # type: ignore[union-attr]


async def test_a_whole_history_without_an_id_continues_the_chain(door: Door, upstream: Upstream) -> None:
    first = await door.openai.responses.create(model="sonnet", input="remember a = 1")
    history: list[Any] = [{"role": "user", "content": "remember a = 1"}, *(one.model_dump() for one in first.output)]
    second = await door.http.post(
        "/v1/responses", json={"model": "sonnet", "input": [*history, {"role": "user", "content": "recall"}]}
    )
    assert second.headers["x-continuity"] == "warm"
    assert heard(upstream) == ["remember a = 1", "recall"]


async def test_images_go_to_the_model_and_stand_in_the_input_items(door: Door, upstream: Upstream) -> None:
    url = f"data:image/png;base64,{PNG}"
    parts: Any = [
        {"type": "input_text", "text": "what is this?"}, {"type": "input_image", "image_url": url, "detail": "auto"},
    ]  # fmt: skip
    response = await door.openai.responses.create(model="sonnet", input=[{"role": "user", "content": parts}])
    blocks = [block for message in upstream.requests[-1].messages for block in parts_of(message["content"])]
    assert [block["source"]["data"] for block in blocks if block["type"] == "image"] == [PNG]
    [item] = (await door.openai.responses.input_items.list(response.id)).data
    assert item.to_dict()["content"][1]["image_url"] == url  # type: ignore[index]


async def test_a_stream_has_every_event_in_order(door: Door, upstream: Upstream) -> None:
    upstream.next(Reply("words " * 40, thinking="let me think about that for a moment"))
    events = await stream(door, input="go")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    assert once == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    done = events[-1]["response"]
    assert text_of(events) == "words " * 40 == done["output"][1]["content"][0]["text"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == done["output"]


async def test_a_cut_stream_read_on_from_any_event_gives_the_same_text(door: Door, upstream: Upstream) -> None:
    upstream.next(Reply("".join(f"word{n} " for n in range(60)), thinking="hm"))
    events = await stream(door, input="go")
    response_id = events[0]["response"]["id"]
    assert await read_again(door, response_id) == events
    for after in (0, 7, len(events) - 2, len(events) - 1):
        assert await read_again(door, response_id, after) == events[after + 1 :]


async def test_a_running_response_can_be_read_while_it_runs(door: Door, upstream: Upstream) -> None:
    gate = HeldReply(after=2, reply=Reply("one two three four five six seven eight nine ten"))
    upstream.next(gate)
    started = await door.openai.responses.create(model="sonnet", input="go", background=True)
    assert started.status == "queued"
    await asyncio.wait_for(gate.reached.wait(), 60)
    assert (await door.openai.responses.retrieve(started.id)).status == "in_progress"
    reading = asyncio.create_task(read_again(door, started.id))
    gate.open()
    events = await reading
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert text_of(events) == "one two three four five six seven eight nine ten"
    assert await read_again(door, started.id) == events
    assert (await door.openai.responses.retrieve(started.id)).output_text == text_of(events)


async def test_a_background_response_is_cancelled_and_its_words_are_on_no_path(
    cli_door: Door, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.next(gate)
    running = await cli_door.openai.responses.create(
        model="sonnet", input="forget me", background=True, extra_body={"agent_id": "ada"}
    )
    await asyncio.wait_for(gate.reached.wait(), 60)
    cancelled = await cli_door.openai.responses.cancel(running.id)
    assert cancelled.status == "cancelled"
    assert (await cli_door.openai.responses.cancel(running.id)).status == "cancelled"
    assert (await cli_door.openai.responses.retrieve(running.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await cli_door.openai.responses.create(model="sonnet", input="x", previous_response_id=running.id)
    await cli_door.openai.responses.create(model="sonnet", input="next", extra_body={"agent_id": "ada"})
    assert heard(upstream) == ["next"]


async def test_a_failed_background_response_says_why(door: Door, upstream: Upstream) -> None:
    upstream.when("go", Fail(400, message="no such thing"), times=None)
    running = await door.openai.responses.create(model="sonnet", input="go", background=True)
    await door.engine.ended(running.id.replace("resp_", "turn_"))
    failed = await door.openai.responses.retrieve(running.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert str(failed.error.code) == "invalid_request"
    assert "no such thing" in failed.error.message
    assert [event["type"] for event in await read_again(door, running.id)][-1] == "response.failed"


async def test_what_is_not_stored_or_deleted_is_unknown(door: Door, upstream: Upstream) -> None:
    api = door.openai.responses
    hidden = await api.create(model="sonnet", input="remember a = 1", store=False, extra_body={"agent_id": "ada"})
    gone = await api.create(model="sonnet", input="remember b = 2", extra_body={"agent_id": "ada"})
    assert hidden.to_dict()["store"] is False
    await api.delete(gone.id)
    for response in (hidden, gone):
        for call in (api.retrieve, api.cancel, api.delete, api.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await call(response.id)
        with pytest.raises(openai.BadRequestError) as raised:
            await api.create(model="sonnet", input="x", previous_response_id=response.id)
        assert raised.value.code == "previous_response_not_found"
        assert raised.value.param == "previous_response_id"
    told = await api.create(model="sonnet", input="recall", extra_body={"agent_id": "ada"})
    assert told.output_text == "I remember: a is 1; b is 2."


async def test_input_items_come_in_pages(door: Door) -> None:
    parts: Any = [{"role": "user", "content": f"part {n}"} for n in range(5)]
    response = await door.openai.responses.create(model="sonnet", input=parts)
    page = await door.openai.responses.input_items.list(response.id, limit=2)
    assert [item.to_dict()["content"][0]["text"] async for item in page] == [  # type: ignore[index]
        f"part {n}" for n in reversed(range(5))
    ]
    first = await door.http.get(f"/v1/responses/{response.id}/input_items", params={"limit": 2, "order": "asc"})
    assert first.json()["has_more"]
    wrong = await door.http.get(f"/v1/responses/{response.id}/input_items", params={"after": "msg_x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")


async def test_input_tokens_are_estimated_from_what_came_before(door: Door) -> None:
    fresh = await door.http.post("/v1/responses/input_tokens", json={"model": "sonnet", "input": "x" * 350})
    assert fresh.headers["x-estimated"] == "true"
    assert 90 < fresh.json()["input_tokens"] < 120
    first = await door.openai.responses.create(model="sonnet", input="hello")
    assert first.usage is not None
    more = await door.openai.responses.input_tokens.count(model="sonnet", input="hello", previous_response_id=first.id)
    assert more.input_tokens > first.usage.total_tokens


class Colour(BaseModel):
    name: str
    red: int


async def test_structured_output_is_parsed_by_the_client_and_keeps_the_prefix(
    cli_door: Door, upstream: Upstream
) -> None:
    first = await cli_door.openai.responses.create(model="sonnet", input="hello")
    upstream.next(Reply('```json\n{"name": "teal", "red": 0}\n```'))
    parsed = await cli_door.openai.responses.parse(
        model="sonnet", input="which colour?", text_format=Colour, previous_response_id=first.id
    )
    assert parsed.output_parsed == Colour(name="teal", red=0)
    assert parsed.output_text == '{"name": "teal", "red": 0}'
    assert upstream.requests[-1].body.get("tools", []) == []
    after = await cli_door.openai.responses.create(model="sonnet", input="and now", previous_response_id=parsed.id)
    assert after.output_text.startswith("You said: and now")
    assert [seen.prefix_kept(was) for was, seen in zip(upstream.requests, upstream.requests[1:], strict=False)] == [
        1.0, 1.0,
    ]  # fmt: skip


async def test_an_invalid_structured_output_is_asked_for_once_more(cli_door: Door, upstream: Upstream) -> None:
    upstream.next(Reply('{"name": 5}'), Reply('{"name": "teal", "red": 1}'))
    parsed = await cli_door.openai.responses.parse(model="sonnet", input="which colour?", text_format=Colour)
    assert parsed.output_parsed == Colour(name="teal", red=1)
    assert "was refused" in "".join(heard(upstream))
    # the refused answer is on no path
    assert "assistant" not in [role for role, _ in upstream.requests[-1].texts()]


async def test_a_second_invalid_structured_output_is_an_error(door: Door, upstream: Upstream) -> None:
    upstream.next(Reply("no"), Reply("no"))
    with pytest.raises(openai.InternalServerError, match="invalid structured output") as raised:
        await door.openai.responses.parse(model="sonnet", input="which colour?", text_format=Colour)
    assert (raised.value.status_code, raised.value.code) == (502, "upstream_error")


async def test_chat_completions_give_structured_output_too_streamed_when_it_is_known_to_be_valid(
    door: Door, upstream: Upstream
) -> None:
    upstream.next(Reply("not JSON"), Reply('{"name": "teal", "red": 0}'))
    async with door.openai.chat.completions.stream(
        model="sonnet", messages=[{"role": "user", "content": "which colour?"}], response_format=Colour
    ) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.parsed == Colour(name="teal", red=0)
    upstream.next(Reply('{"any": 1}'))
    made = await door.openai.chat.completions.create(
        model="sonnet", messages=[{"role": "user", "content": "json"}], response_format={"type": "json_object"}
    )
    assert made.choices[0].message.content == '{"any": 1}'


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": ""}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "apple_call"}]}, "input[0].type"),
    ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
    ({"input": "x", "tools": [{"type": 5}]}, "tools[0].type"),
    ({"input": "x", "stream": "yes"}, "stream"),
    ({"input": "x", "metadata": {"a": 1}}, "metadata"),
    ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format.schema"),
    ({"input": "x", "background": True, "store": False}, "store"),
    ({"input": "x", "conversation": 5}, "conversation"),
    ({"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "previous_response_id": "resp_unknown"}, "previous_response_id"),
    ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
]


async def test_errors_name_the_field_in_openais_shape(door: Door) -> None:
    for body, field in BAD:
        answer = await door.http.post("/v1/responses", json={"model": "sonnet", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), body
        assert error["type"] == "invalid_request_error"
    assert (await door.http.post("/v1/responses", content=b"{")).status_code == 400
    assert (await door.http.put("/v1/responses", json={})).status_code == 405
    assert (await door.http.get("/v1/responses/resp_unknown")).status_code == 404
    assert (await door.http.get("/v1/responses/nonsense")).status_code == 404
    gone = await door.http.post("/v1/threads/thread_1/runs", json={})
    assert gone.status_code == 404
    assert "/v1/conversations" in gone.json()["error"]["message"]
    for path in ("/v1/assistants", "/v1/assistants/a", "/v1/threads"):
        assert "/v1/conversations" in (await door.http.get(path)).json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused(open_door: OpenDoor) -> None:
    async with open_door(max_body=2048) as door:
        answer = await door.http.post("/v1/responses", json={"model": "sonnet", "input": "x" * 4000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_named_agents_new_message_is_composed_once_while_its_head_stays(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed: list[str | None] = []

    def counted(*given: Any, **options: Any) -> Any:
        composed.append(options["continues"])
        return compose(*given, **options)

    first = await door.openai.responses.create(model="sonnet", input="one", extra_body={"agent_id": "ada"})
    monkeypatch.setattr(dialogues, "compose", counted)
    await door.openai.responses.create(model="sonnet", input="two", extra_body={"agent_id": "ada"})
    assert composed == [f"turn_{first.id.removeprefix('resp_')}"]
