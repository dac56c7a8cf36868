"""What a Response says of its parameters is what was used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.responses import body as responses

from ...fakes import TURN


def read(**fields: Any) -> responses.ResponsesCall:
    return responses.read({"model": "sonnet", "input": "hello", **fields}, Naming())


def test_what_has_no_effect_is_not_echoed_as_if_it_had() -> None:
    asked = read(service_tier="flex", truncation="auto", top_logprobs=3, max_tool_calls=2, temperature=0.5)
    told = responses.response(replace(TURN, call=asked.request.call))
    assert {name: told[name] for name in ("service_tier", "truncation", "top_logprobs", "max_tool_calls")} == {
        "service_tier": "default", "truncation": "disabled", "top_logprobs": 0, "max_tool_calls": None,
    }  # fmt: skip
    assert told["temperature"] == 0.5
    assert set(asked.ignored) == {"service_tier", "truncation", "top_logprobs", "max_tool_calls"}


def test_a_parameter_that_the_model_did_not_take_is_not_echoed() -> None:
    asked = read(temperature=0.5, max_output_tokens=9)
    told = responses.response(replace(TURN, call=asked.request.call, evidence=Evidence(unmet=("temperature",))))
    assert (told["temperature"], told["max_output_tokens"]) == (1.0, 9)


def test_probabilities_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(include=["message.output_text.logprobs"])
    assert caught.value.param == "include"
