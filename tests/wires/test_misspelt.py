"""An unknown field that looks like a known one is named in X-Ignored-Params, on every wire; others are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy.domain.models import JSON
from cli_session_proxy.wires.common import MAX_UNREAD, Fields

from ..no_cli import no_cli

INPUT: JSON = {"model": "sonnet", "input": "hello"}
SAID: JSON = {"model": "sonnet", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
CONTENTS: JSON = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}


@pytest.mark.parametrize(
    ("path", "body", "typo", "named"),
    [
        ("/v1/chat/completions", SAID, {"temprature": 0}, "temprature"),
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
async def test_a_misspelt_field_is_named(tmp_path: Path, path: str, body: JSON, typo: JSON, named: str) -> None:
    async with no_cli(tmp_path) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        plain = await http.post(path, json=body)
        told = await http.post(path, json=body | typo)
    assert (plain.status_code, told.status_code) == (200, 200)
    before = plain.headers.get("x-ignored-params", "").split(", ")
    assert told.headers["x-ignored-params"].split(", ") == [*filter(None, before), named]


def read(**body: Any) -> tuple[str, ...]:
    fields = Fields(body)
    for name in ("temperature", "stop", "metadata", "user"):
        fields.get(name)
    return fields.misspelt()


def test_what_vendors_add_is_left_alone() -> None:
    assert read(store=True, cache_control={}, prompt_cache_key="x", metadata={}, stop=["x"]) == ()


@pytest.mark.parametrize("name", ["temperature\r\nX-Evil: 1", "temperature, user", "temperaturé", "t" * 65, ""])
def test_a_name_that_no_vendor_could_have_reaches_no_header(name: str) -> None:
    assert read(**{name: 1}) == ()


def test_no_more_names_are_compared_than_a_client_sends() -> None:
    many = {f"temperatur{chr(97 + n % 26)}{n}": 1 for n in range(10_000)}
    assert len(read(**many)) == MAX_UNREAD


def test_fields_that_are_asked_for_together_are_known_whether_they_are_there_or_not() -> None:
    fields = Fields({"b": 1, "a": None, "max_token": 5})
    assert fields.given(("max_tokens", "a", "b")) == ("b",)
    assert fields.misspelt() == ("max_token",)
