"""What bodies of Ollama's chat and generate mean, and how they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.ollama import body as ollama
from cli_session_proxy.wires.ollama.body import Load, OllamaCall

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ASKED = {"role": "user", "content": "hello"}


def chat(*messages: Any, **more: Any) -> OllamaCall:
    call = ollama.read_chat({"model": "sonnet", "messages": list(messages) or [ASKED], **more}, Naming())
    assert isinstance(call, OllamaCall)
    return call


def generate(**body: Any) -> OllamaCall:
    call = ollama.read_generate({"model": "sonnet", "prompt": "hello", **body}, Naming())
    assert isinstance(call, OllamaCall)
    return call


def test_a_call_streams_unless_it_says_otherwise() -> None:
    assert chat().stream
    assert chat(stream=None).stream
    assert not chat(stream=False).stream


def test_a_model_may_have_ollamas_tag_and_is_answered_as_it_was_written() -> None:
    call = chat(model="sonnet:latest")
    assert (call.request.model, call.model) == ("sonnet", "sonnet:latest")
    assert chat(model=None).request.model == "default"


def test_messages_are_read_with_their_system_and_images() -> None:
    call = chat({"role": "system", "content": "be brief"}, {"role": "user", "content": "look", "images": [PNG]})
    assert call.request.system == "be brief"
    image, text = call.request.messages[0].content
    assert image["source"] == {"type": "base64", "media_type": "image/png", "data": PNG}
    assert text == {"type": "text", "text": "look"}
    shown = chat({"role": "user", "content": "", "images": [PNG]}).request.messages[0]
    assert [block["type"] for block in shown.content] == ["image"]


@pytest.mark.parametrize(
    ("beginning", "media_type"),
    [("/9j/4AAQSkZJRgAB", "image/jpeg"), ("R0lGODlhAQABAAAA", "image/gif"), ("UklGRiQAAABXRUJQ", "image/webp")],
)
def test_an_image_is_known_by_how_it_begins(beginning: str, media_type: str) -> None:
    [image, _] = generate(images=[beginning]).request.messages[0].content
    assert image["source"]["media_type"] == media_type


def results_of(*results: dict[str, str], ids: tuple[str | None, ...] = (None, None, None)) -> list[str]:
    functions = ("time", "weather", "time")
    calls: list[Any] = [
        {**({"id": given} if given else {}), "function": {"name": name, "arguments": {}}}
        for given, name in zip(ids, functions, strict=True)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    tools = [{"role": "tool", "content": "r", **result} for result in results]
    request = chat(ASKED, said, *tools).request
    called = [block["id"] for block in request.messages[1].content]
    return [str(called.index(message.content[0]["tool_use_id"])) for message in request.messages[2:]]


def test_results_find_their_calls_by_id_by_function_or_by_their_order() -> None:
    time, weather = {"tool_name": "time"}, {"tool_name": "weather"}
    assert results_of(weather, time, time) == ["1", "0", "2"]
    assert results_of({}, {}, {}) == ["0", "1", "2"]
    assert results_of(time, {}, {}) == ["0", "1", "2"]
    assert results_of(weather, {}, {}) == ["1", "0", "2"]
    given = ("a", "b", "c")
    assert results_of({"tool_call_id": "c"}, time, weather, ids=given) == ["2", "0", "1"]


def test_formats_options_and_thinking_are_what_the_cli_can_do() -> None:
    assert chat().request.options.format is None
    assert chat(format="json").request.options.format == {"schema": None}
    assert chat(format={"type": "object"}).request.options.format == {"schema": {"type": "object"}}
    assert chat(options={"stop": ["a", "b"]}).request.options.stop == ("a", "b")
    assert chat(options={"stop": "a"}).request.options.stop == ("a",)
    for think, effort, shown in ((None, None, True), (True, None, True), (False, "low", False), ("high", "high", True)):
        call = chat(think=think)
        assert (call.request.effort, call.thoughts) == (effort, shown)


def test_what_has_no_effect_is_named() -> None:
    call = chat(options={"num_ctx": 8192, "temperature": 0, "use_mmap": True}, keep_alive="5m")
    assert call.ignored == ("options.num_ctx", "options.use_mmap", "keep_alive")


def test_a_prompt_is_one_turn_and_a_context_names_the_one_before() -> None:
    first = generate(system="be brief").request
    assert (first.continues, first.system, len(first.messages)) == (None, "be brief", 1)
    assert generate(context=[]).request.continues is None
    assert generate(context=list(b"turn_abc")).request.continues == "turn_abc"


@pytest.mark.parametrize("context", [[1, 2, 3], "turn_abc", [True] * 5, [1e3], [300] * 8, [116] * 129, {"a": 1}])
def test_a_context_that_was_never_given_out_is_refused(context: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        generate(context=context)
    assert error.value.param == "context"


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")])
def test_a_request_without_a_word_makes_no_turn(keep_alive: Any, reason: str) -> None:
    doors: list[tuple[Any, dict[str, Any]]] = [(ollama.read_chat, {"messages": []}), (ollama.read_generate, {})]
    for read, said in doors:
        load = read({"model": "sonnet", "keep_alive": keep_alive, **said}, Naming())
        assert isinstance(load, Load)
        assert (load.model, load.done_reason) == ("sonnet", reason)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": " "}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "  "}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "images": ["!"]}]}, "messages[0].images[0]"),
        ({"messages": [{"role": "user", "content": "x", "images": ["AAAAAAAAAAAAAAAA"]}]}, "messages[0].images[0]"),
        ({"messages": [{"role": "system", "content": "x", "images": [PNG]}, ASKED]}, "messages[0].images"),
        ({"messages": [ASKED, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function"),
        ({"stream": "yes"}, "stream"),
        ({"format": "yaml"}, "format"),
        ({"think": "hard"}, "think"),
        ({"keep_alive": True}, "keep_alive"),
        ({"logprobs": True}, "logprobs"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_ctx": True}}, "options.num_ctx"),
        ({"options": {"use_mmap": 1}}, "options.use_mmap"),
        ({"options": {"stop": 1}}, "options.stop"),
        ({"model": 7}, "model"),
        ({"model": "--help"}, "model"),
    ],
)
def test_a_chat_that_cannot_be_served_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(**{"messages": [ASKED], **body})
    assert error.value.param == param


@pytest.mark.parametrize(
    ("body", "param"), [({"suffix": "end"}, "suffix"), ({"prompt": " "}, "prompt"), ({"images": [""]}, "images[0]")]
)
def test_a_prompt_that_cannot_be_served_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        generate(**body)
    assert error.value.param == param
