"""What the scripted upstream refuses, as the real API does."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from turnfault.provider.rules import Rules, refusal, sealed

JSON = dict[str, Any]


def text(said: str, **more: Any) -> JSON:
    return {"type": "text", "text": said, **more}


def call(id: str) -> JSON:
    return {"type": "tool_use", "id": id, "name": "look", "input": {}}


def result(id: str) -> JSON:
    return {"type": "tool_result", "tool_use_id": id, "content": "seen"}


def image(width: int, height: int) -> JSON:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def pdf(data: bytes) -> JSON:
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(data).decode()}
    return {"type": "document", "source": source}


PAGE = b"1 0 obj <</Type /Page>> endobj\n"
GOOD = b"%PDF-1.4\n" + PAGE + b"%%EOF"


def body(*contents: Any, **more: Any) -> JSON:
    """Messages of these contents: user, assistant, user, …"""
    roles = ("user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": roles[n % 2], "content": one} for n, one in enumerate(contents)],
        **more,
    }


def said(data: JSON, rules: Rules = Rules(), raw: bytes = b"{}") -> str | None:  # noqa: B008 - it cannot be changed
    fail = refusal(rules, raw, data)
    return None if fail is None else f"{fail.status} {fail.message}"


REFUSED = [
    pytest.param(body([text("")]), "text content blocks must be non-empty", id="empty text"),
    pytest.param(body([text(" \n")]), "non-whitespace", id="blank text"),
    pytest.param(body([text("", cache_control={"type": "ephemeral"})]), "cache_control cannot be set", id="marked"),
    pytest.param(body([]), "non-empty content", id="no content"),
    pytest.param(body(), "at least one message", id="no message"),
    pytest.param({"messages": [{"role": "assistant", "content": "hi"}]}, 'use the "user" role', id="assistant first"),
    pytest.param(body("a", [call("x:1")], [result("x:1")]), r"match pattern '^[a-zA-Z0-9_-]+$'", id="an id"),
    pytest.param(body("a", [call("c")], "b"), "without `tool_result` blocks immediately after: c", id="no result"),
    pytest.param(body("a", [call("c")]), "without `tool_result` blocks", id="an open call at the end"),
    pytest.param(body("a", "b", [result("c")]), "unexpected `tool_use_id`", id="no call"),
    pytest.param(body("a", [call("c"), call("c")], [result("c")]), "must be unique", id="an id twice"),
    pytest.param(body([text(str(n), cache_control={}) for n in range(5)]), "A maximum of 4 blocks", id="breakpoints"),
    pytest.param(body([image(8001, 1)]), "max allowed size: 8000 pixels", id="a long image"),
    pytest.param(body([image(2001, 1)] * 21), "many-image requests: 2000 pixels", id="many images"),
    pytest.param(body([pdf(b"no PDF")]), "The PDF specified was not valid", id="no PDF"),
    pytest.param(body([pdf(GOOD + b"/Encrypt")]), "password protected", id="an encrypted PDF"),
    pytest.param(body([pdf(GOOD + PAGE * 100)]), "A maximum of 100 PDF pages", id="pages"),
]


@pytest.mark.parametrize(("data", "why"), REFUSED)
def test_what_the_api_refuses_is_refused_in_its_words(data: JSON, why: str) -> None:
    answer = said(data)
    assert answer is not None
    assert answer.startswith("400 ")
    assert why in answer


TAKEN = [
    body("a"),
    body("a", [call("c"), call("d")], [result("d"), result("c"), text("and")], "b"),
    body([image(8000, 1), *[image(2000, 1)] * 19]),
    body([image(2001, 1)] * 20),
    body([pdf(GOOD)]),
    {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": []}]},
]


@pytest.mark.parametrize("data", TAKEN)
def test_what_the_api_takes_is_taken(data: JSON) -> None:
    assert said(data) is None


def test_sizes_and_halves_of_characters_are_refused() -> None:
    long = image(10, 10)
    long["source"]["data"] += "A" * (5 * 1024 * 1024)
    assert "image exceeds 5 MB maximum" in str(said(body([long])))
    assert "prompt is too long: " in str(said(body("word " * 100), Rules(context=100)))
    assert str(said(body("a"), Rules(request_bytes=10), b"x" * 11)).startswith("413 ")
    assert "not valid JSON" in str(said(body("a \ud800"), raw=b'"a \\ud800"'))
    assert said(body("\N{PILE OF POO}"), raw=b'"\\ud83d\\udca9"') is None


HEAD: JSON = {"system": "You are A.", "tools": [{"name": "look"}]}


def test_a_thought_is_taken_where_everything_before_it_is_as_it_was() -> None:
    answer = sealed(body("a", **HEAD), [{"type": "thinking", "thinking": "hm"}, text("b")])
    follows = body("a", answer, "c", **HEAD)
    assert said(follows) is None
    changed = {
        "model": {**follows, "model": "other"},
        "system": {**follows, "system": "You are B."},
        "tools": {**follows, "tools": [{"name": "look"}, {"name": "listen"}]},
        "an earlier message": body("A", answer, "c", **HEAD),
        "the thought": body("a", [{**answer[0], "thinking": "hmm"}, answer[1]], "c", **HEAD),
    }
    for what, data in changed.items():
        assert "Invalid `signature` in `thinking` block" in str(said(data)), what
    later = sealed(follows, [{"type": "redacted_thinking"}, text("d")])
    assert said(body("a", answer, "c", later, "e", **HEAD)) is None
    assert "redacted_thinking" in str(said(body("a", "b", "c", later, "e", **HEAD)))
    markers = {**HEAD, "system": [text("You are A.", cache_control={"type": "ephemeral"})]}
    assert said(body([text("a", cache_control={})], answer, "c", **markers)) is None
