"""Names, results, choices and stop sequences, without a CLI."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends.claude.process.tool_server import ToolServer
from cli_session_proxy.domain.client_tools import (
    LARGEST_RESULTS,
    Offers,
    answers,
    checked,
    cli_name,
    for_waiting,
    mcp_result,
)
from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop, Message, Tool
from cli_session_proxy.domain.stop_sequences import StopCutter
from cli_session_proxy.errors import InvalidRequest

CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}


def result(call: str = "toolu_1", content: object = "fine") -> Message:
    return Message("user", ({"type": "tool_result", "tool_use_id": call, "content": content},))


@given(st.text(min_size=1))
def test_a_name_is_always_one_that_the_provider_takes_and_never_a_tool_of_the_cli(name: str) -> None:
    assert cli_name(name) == cli_name(name)
    assert cli_name(name).startswith("mcp__client__")
    assert len(cli_name(name)) <= 64
    assert cli_name(name).isascii()


@pytest.mark.parametrize(
    "tools",
    [
        (Tool("f"), Tool("f")),
        (Tool("n" * 60), Tool(cli_name("n" * 60).removeprefix("mcp__client__"))),
        (Tool(" "),),
        (Tool("f", "", {"type": "array"}),),
        (Tool("f", "", {"type": "object", "properties": 5}),),
    ],
)
def test_tools_that_cannot_be_told_apart_or_have_no_schema_are_refused(tools: tuple[Tool, ...]) -> None:
    with pytest.raises(InvalidRequest):
        checked(tools)


def test_results_are_taken_in_the_order_of_their_calls_and_words_beside_them_are_kept() -> None:
    second = {**CALL, "id": "toolu_2"}
    results, rest = answers((CALL, second), [result("toolu_2"), result(), Message.user("and?")])
    assert list(results) == ["toolu_1", "toolu_2"]
    assert rest == ({"type": "text", "text": "and?"},)
    assert for_waiting(results, rest) is None


def test_a_result_that_a_waiting_process_would_not_pass_on_whole_is_not_brought_to_it() -> None:
    assert for_waiting(*answers((CALL,), [result(content="x" * LARGEST_RESULTS)])) is not None
    assert for_waiting(*answers((CALL,), [result(content="x" * (LARGEST_RESULTS + 1))])) is None
    url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    assert mcp_result(result(content=[url]).content[0]) is None


def test_a_result_may_come_before_the_cli_makes_its_call() -> None:
    server = ToolServer()
    server.offer(Offers.of([Tool("f")]))
    message = {"method": "tools/call", "id": 7, "params": {"name": "f", "_meta": {"claudecode/toolUseId": "toolu_1"}}}
    request = {"subtype": "mcp_message", "server_name": "client", "message": message}
    assert server.answer("toolu_1", {"content": []}) is None
    answered = server.handle({"type": "control_request", "request_id": "r", "request": request})
    assert answered is not None
    assert answered["response"]["response"]["mcp_response"] == {"jsonrpc": "2.0", "id": 7, "result": {"content": []}}


def test_a_process_can_be_given_more_tools_or_none_but_not_others() -> None:
    server = ToolServer()
    server.offer(Offers.of([Tool("f")]))
    assert server.takes(Offers.of([Tool("g"), Tool("f")]))
    assert server.takes(Offers())
    assert not server.takes(Offers.of([Tool("g")]))
    assert not server.takes(Offers.of([Tool("f", "changed")]))


@given(st.text("abST", max_size=40), st.lists(st.text("abST", min_size=1, max_size=4), min_size=1), st.integers(1, 7))
def test_a_text_is_cut_before_the_first_stop_sequence_however_it_comes(
    text: str, sequences: list[str], size: int
) -> None:
    cutter = StopCutter(sequences)
    events = [
        *cutter.feed(BlockStart(0, {"type": "text", "text": ""})),
        *(
            event
            for at in range(0, len(text), size)
            for event in cutter.feed(BlockDelta(0, {"type": "text_delta", "text": text[at : at + size]}))
        ),
        *cutter.feed(BlockStop(0)),
    ]
    said = "".join(event.delta["text"] for event in events if isinstance(event, BlockDelta))
    places = [at for sequence in sequences if (at := text.find(sequence)) >= 0]
    if cutter.hit is None:
        assert (said, places) == (text, [])
    else:
        assert text.startswith(said + cutter.hit)
        assert not any(sequence in said for sequence in sequences)
    assert [type(event) for event in events].count(BlockStop) == 1
