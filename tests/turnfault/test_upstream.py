"""The scripted upstream itself, over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from turnfault.provider.script import (
    Big,
    Cut,
    ErrorEvent,
    Fail,
    HeldReply,
    Reply,
    Slow,
    Stall,
    ToolUse,
    scripted_answer,
)
from turnfault.provider.upstream import Upstream, UpstreamThread


def body(*texts: str, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A request of these texts in turn: user, assistant, user, …"""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"model": "m", "max_tokens": 100, "messages": messages, "stream": stream, **more}


async def post(upstream: Upstream, data: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10) as client:
        return await client.post(f"{upstream.url}/v1/messages", json=data)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def text_of(response: httpx.Response) -> str:
    return "".join(
        event["delta"].get("text", "") for event in events(response) if "index" in event and "delta" in event
    )


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (["Remember: the colour is teal"], "Noted: colour is teal."),
        (["remember X = Y"], "Noted: x is Y."),
        (["Remember: the colour is teal", "ok", "What is the colour?"], "colour is teal."),
        (["What is the colour?"], "I do not know colour."),
        (["remember a = 1", "ok", "remember that b is 2", "ok", "recall"], "I remember: a is 1; b is 2."),
        (["recall"], "I remember nothing."),
        (["one", "ok", "list"], "1. one\n2. list"),
        (["one", "ok", "two"], "You said: two (2)"),
    ],
)
async def test_answers_from_the_messages_it_is_sent(upstream: Upstream, said: list[str], answer: str) -> None:
    response = await post(upstream, body(*said))
    assert response.json()["content"] == [{"type": "text", "text": answer}]


async def test_forgets_what_a_request_no_longer_carries(upstream: Upstream) -> None:
    await post(upstream, body("Remember: the colour is teal"))
    response = await post(upstream, body("What is the colour?"))
    assert response.json()["content"][0]["text"] == "I do not know colour."


async def test_streams_events_in_the_order_of_the_api(upstream: Upstream) -> None:
    upstream.next(Reply("a short answer", thinking="let me think"))
    response = await post(upstream, body("hello", stream=True))
    kinds = [event["type"] for event in events(response)]
    deduplicated = [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert deduplicated == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    assert any(event.get("delta", {}).get("type") == "signature_delta" for event in events(response))
    assert text_of(response) == "a short answer"


async def test_a_tool_call_streams_its_input_and_stops_for_it(upstream: Upstream) -> None:
    upstream.next(ToolUse([("weather", {"city": "Zürich"})], text="Let me look."))
    seen = events(await post(upstream, body("weather?", stream=True)))
    written = "".join(event["delta"].get("partial_json", "") for event in seen if "index" in event and "delta" in event)
    assert json.loads(written) == {"city": "Zürich"}
    assert [event["delta"]["stop_reason"] for event in seen if event["type"] == "message_delta"] == ["tool_use"]


async def test_the_answer_to_a_tool_result_is_the_result() -> None:
    assert scripted_answer([("user", "weather?"), ("user", "tool_result: 21 degrees")]) == "The tool said: 21 degrees"


async def test_behaviours_by_text_go_before_the_queue_and_are_used_up(upstream: Upstream) -> None:
    upstream.next(Reply("queued"))
    upstream.when("special", Fail(429, {"retry-after": "7"}))
    limited = await post(upstream, body("a special one"))
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "7")
    assert limited.json()["error"]["type"] == "rate_limit_error"
    assert (await post(upstream, body("a special one"))).json()["content"][0]["text"] == "queued"
    assert (await post(upstream, body("hello"))).json()["content"][0]["text"] == "You said: hello (1)"
    assert [seen.outcome for seen in upstream.requests] == ["failed", "answered", "answered"]


async def test_a_cut_stream_ends_without_its_end(upstream: Upstream) -> None:
    upstream.next(Cut(after=1))
    with pytest.raises(httpx.RemoteProtocolError):
        await post(upstream, body("hello", stream=True))
    assert upstream.requests[0].outcome == "cut"


async def test_without_a_stream_a_cut_drops_the_connection(upstream: Upstream) -> None:
    upstream.next(Cut())
    with pytest.raises(httpx.RemoteProtocolError):
        await post(upstream, body("hello"))


async def test_an_error_event_comes_inside_the_stream(upstream: Upstream) -> None:
    upstream.next(ErrorEvent())
    kinds = [event["type"] for event in events(await post(upstream, body("hello", stream=True)))]
    assert kinds == ["message_start", "ping", "content_block_start", "content_block_delta", "error"]


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_gate_holds_the_answer_until_it_is_opened(upstream: Upstream, after: int) -> None:
    gate = HeldReply(after=after)
    upstream.when("wait", gate)
    waiting = asyncio.create_task(post(upstream, body("wait here", stream=True)))
    await asyncio.wait_for(gate.reached.wait(), 60)
    assert (await post(upstream, body("another"))).status_code == 200
    assert not waiting.done()
    gate.open()
    assert text_of(await waiting) == "You said: wait here (1)"


async def test_a_client_that_leaves_a_stalled_answer_is_noticed(upstream: Upstream) -> None:
    stall = Stall()
    upstream.next(stall)
    waiting = asyncio.create_task(post(upstream, body("hello", stream=True)))
    await asyncio.wait_for(stall.reached.wait(), 60)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    seen = await upstream.arrived()
    await asyncio.wait_for(seen.done.wait(), 60)
    assert seen.outcome == "left"


async def test_it_stops_while_an_answer_is_stalled() -> None:
    async with asyncio.timeout(60):
        async with Upstream() as upstream:
            upstream.next(stall := Stall(after=0))
            waiting = asyncio.create_task(post(upstream, body("hello")))
            await stall.reached.wait()
        with pytest.raises(httpx.RemoteProtocolError):
            await waiting


async def test_a_slow_and_a_big_answer_arrive_whole(upstream: Upstream) -> None:
    upstream.next(Slow(0.01), Big(1_000_001))
    assert text_of(await post(upstream, body("slowly", stream=True))) == "You said: slowly (1)"
    assert len(text_of(await post(upstream, body("big", stream=True)))) == 1_000_001


async def test_texts_leave_out_what_the_cli_adds(upstream: Upstream) -> None:
    reminder = {"type": "text", "text": "<system-reminder>\nbe nice\n</system-reminder>"}
    messages = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "hello"}]},
        {"role": "system", "content": "# Environment"},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": "<system-reminder>x</system-reminder>\n\nwhat did I say?"},
    ]
    await post(upstream, {"messages": messages})
    assert upstream.requests[0].texts() == [("user", "hello"), ("assistant", "hi"), ("user", "what did I say?")]
    assert upstream.requests[0].prompt == "what did I say?"


async def test_prefix_ignores_markers_and_the_form_of_a_text(upstream: Upstream) -> None:
    marked = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]
    first = {"system": "s", "messages": [{"role": "user", "content": marked}]}
    await post(upstream, first)
    await post(upstream, body("one", "two", "three", system="s"))
    await post(upstream, body("one!", "two", "three", system="s"))
    before, kept, changed = upstream.requests
    assert kept.prefix_kept(before) == 1.0
    assert 0 < changed.prefix_kept(before) < 1.0


async def test_usage_counts_the_cache_as_the_provider_does(upstream: Upstream) -> None:
    def marked(*texts: str) -> dict[str, Any]:
        data = body(*texts)
        last = data["messages"][-1]
        last["content"] = [{"type": "text", "text": last["content"], "cache_control": {"type": "ephemeral"}}]
        return data

    first = (await post(upstream, marked("one " * 100))).json()["usage"]
    again = (await post(upstream, marked("one " * 100, "two", "three"))).json()["usage"]
    other = (await post(upstream, marked("One " * 100, "two", "three"))).json()["usage"]
    assert first["cache_read_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] > 100
    assert again["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert other["cache_read_input_tokens"] == 0


async def test_other_routes_are_404_and_kept_apart(upstream: Upstream) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.head(f"{upstream.url}/")).status_code == 404
        counted = await client.post(f"{upstream.url}/v1/messages/count_tokens", json=body("hello"))
    assert counted.json()["input_tokens"] > 0
    assert upstream.requests == []
    assert [seen.path for seen in upstream.others] == ["/", "/v1/messages/count_tokens"]


def test_a_thread_serves_code_that_is_not_async() -> None:
    with UpstreamThread() as thread:
        response = httpx.post(f"{thread.upstream.url}/v1/messages", json=body("hello"))
        assert response.json()["content"][0]["text"] == "You said: hello (1)"
        assert thread.call(lambda: len(thread.upstream.requests)) == 1
