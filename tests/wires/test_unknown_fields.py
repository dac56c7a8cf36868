"""A field that nobody here knows is named in X-Ignored-Params, on every wire, and no field that has an effect is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy.domain.models import JSON
from cli_session_proxy.wires.fields import MAX_UNREAD, Fields

from ..no_cli import no_cli

INPUT: JSON = {"model": "sonnet", "input": "hello"}
SAID: JSON = {"model": "sonnet", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
CONTENTS: JSON = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}


@pytest.mark.parametrize(
    ("path", "body", "given", "named"),
    [
        ("/v1/chat/completions", SAID, {"temprature": 0}, "temprature"),
        ("/v1/chat/completions", SAID, {"enable_thinking": False}, "enable_thinking"),
        ("/v1/chat/completions", SAID, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("/v1/chat/completions", SAID, {"reasoning": {"effort": "low", "exclude": True}}, "reasoning.exclude"),
        ("/v1/chat/completions", SAID, {"store": True}, "store"),
        ("/v1/messages", SAID, {"reasoning": {"effort": "low"}}, "reasoning"),
        ("/v1/responses", INPUT, {"thinking": {"type": "disabled"}}, "thinking"),
        ("/v1/responses", INPUT, {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", INPUT, {"include": ["reasoning.encrypted_content"]}, "include"),
        ("/v1/responses", INPUT, {"reasoning": {"context": "all"}}, "reasoning.context"),
        ("/v1/models/sonnet:generateContent", CONTENTS, {"labels": {"team": "a"}}, "labels"),
        ("/api/chat", SAID, {"thinking_budget": 5}, "thinking_budget"),
        ("/v1/chat/completions", SAID, {"maxTokens": 5}, "maxTokens"),
        ("/v1/chat/completions", SAID, {"agentid": "ada"}, "agentid"),
        ("/v1/messages", SAID, {"stop_sequence": ["x"]}, "stop_sequence"),
        ("/v1/responses", INPUT, {"previous_responce_id": "x"}, "previous_responce_id"),
        ("/v1/conversations", {}, {"metdata": {}}, "metdata"),
        ("/v1/models/sonnet:generateContent", CONTENTS, {"systemInstructions": {}}, "systemInstructions"),
        (
            "/v1/models/sonnet:generateContent",
            CONTENTS,
            {"generationConfig": {"stopSequence": ["x"]}},
            "generationConfig.stopSequence",
        ),
        ("/api/chat", SAID, {"formats": "json"}, "formats"),
        ("/api/generate", {"prompt": "hello"}, {"options": {"temprature": 0}}, "options.temprature"),
        (
            "/v1/interactions",
            INPUT,
            {"system_instructions": "x"},
            "system_instructions",
        ),
        (
            "/v1/interactions",
            INPUT,
            {"generation_config": {"thinking_levels": "low"}},
            "generation_config.thinking_levels",
        ),
    ],
)
async def test_an_unknown_field_is_named(tmp_path: Path, path: str, body: JSON, given: JSON, named: str) -> None:
    async with no_cli(tmp_path) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        plain = await http.post(path, json=body)
        told = await http.post(path, json=body | given)
    assert (plain.status_code, told.status_code) == (200, 200)
    before = plain.headers.get("x-ignored-params", "").split(", ")
    assert told.headers["x-ignored-params"].split(", ") == [*filter(None, before), named]


def read(**body: Any) -> tuple[str, ...]:
    fields = Fields(body)
    for name in ("temperature", "stop", "metadata", "user"):
        fields.get(name)
    return fields.unread()


def test_what_vendors_add_is_named_where_it_says_something() -> None:
    assert read(reasoning_split=True, cache={}, nothing=None, metadata={}, stop=["x"]) == ("reasoning_split", "cache")


@pytest.mark.parametrize("name", ["temperature\r\nX-Evil: 1", "temperature, user", "temperaturé", "t" * 65, ""])
def test_a_name_that_no_vendor_could_have_reaches_no_header(name: str) -> None:
    assert read(**{name: 1}) == ()


def test_no_more_names_are_told_than_a_client_sends() -> None:
    many = {f"temperatur{chr(97 + n % 26)}{n}": 1 for n in range(10_000)}
    assert len(read(**many)) == MAX_UNREAD


def test_fields_that_are_asked_for_together_are_known_whether_they_are_there_or_not() -> None:
    fields = Fields({"b": 1, "a": None, "max_token": 5})
    assert fields.given(("max_tokens", "a", "b")) == ("b",)
    assert fields.unread() == ("max_token",)


CITED = {"type": "text", "media_type": "text/plain", "data": "It is teal."}


@pytest.mark.parametrize("kind", ["document", "search_result"])
async def test_citations_that_nobody_makes_are_named(tmp_path: Path, kind: str) -> None:
    said: Any = {"type": "document", "source": CITED, "citations": {"enabled": True}}
    if kind == "search_result":
        said = {"type": kind, "source": "a", "title": "b", "content": [{"type": "text", "text": "c"}]}
        said["citations"] = {"enabled": True}
    body = {**SAID, "messages": [{"role": "user", "content": [said, {"type": "text", "text": "which?"}]}]}
    async with no_cli(tmp_path) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        told = await http.post("/v1/messages", json=body)
    assert (told.status_code, told.headers["x-ignored-params"]) == (200, "citations")


async def test_what_nearly_every_client_sends_names_nothing(tmp_path: Path) -> None:
    async with no_cli(tmp_path) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        for path, body in (
            ("/v1/chat/completions", {**SAID, "stream": False, "user": "u", "metadata": {"a": "b"}, "store": False}),
            ("/v1/messages", {**SAID, "metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}),
            ("/v1/responses", {**INPUT, "store": True, "include": [], "text": {"verbosity": "medium"}}),
            ("/v1/models/sonnet:generateContent", {**CONTENTS, "model": "models/sonnet", "toolConfig": {}}),
            ("/api/chat", {"model": "sonnet", "messages": SAID["messages"], "stream": False}),
        ):
            told = await http.post(path, json=body)
            assert told.status_code == 200
            assert "x-ignored-params" not in told.headers, path
