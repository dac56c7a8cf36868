"""Who the agent is: the order of the contract, and what is no name."""

from __future__ import annotations

import pytest

from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.common import encoded_agent_id, naming

EVERYWHERE = {
    "agent_id": "body",
    "metadata": {"agent_id": "metadata", "litellm_session_id": "inner session"},
    "litellm_session_id": "session",
}


def without(*names: str) -> dict[str, object]:
    body: dict[str, object] = {name: value for name, value in EVERYWHERE.items() if name not in names}
    return body


def test_the_first_place_that_names_the_agent_wins() -> None:
    header = {"x-agent-id": "header"}
    assert naming(header, path_agent="path", request_id=None).agent_id(EVERYWHERE) == "path"
    assert naming(header, path_agent=None, request_id=None).agent_id(EVERYWHERE) == "header"
    nameless = naming({}, path_agent=None, request_id=None)
    assert nameless.agent_id(EVERYWHERE) == "body"
    assert nameless.agent_id(without("agent_id")) == "metadata"
    assert nameless.agent_id(without("agent_id", "metadata")) == "session"
    assert nameless.agent_id({"metadata": {"litellm_session_id": "inner"}}) == "inner"
    assert nameless.agent_id({"user": "somebody", "metadata": {"user_id": "u"}}) is None


@pytest.mark.parametrize("agent_id", ["plain", "a/b", "Zoë 猫", "100% sure", "agents/agents/x", ".."])
def test_a_header_carries_any_name_percent_encoded(agent_id: str) -> None:
    headers = {"x-agent-id": encoded_agent_id(agent_id)}
    assert naming(headers, path_agent=None, request_id=None).agent_id({}) == agent_id


def test_a_header_of_raw_utf8_is_understood_too() -> None:
    raw = "Zoë".encode().decode("latin-1")
    assert naming({"x-agent-id": raw}, path_agent=None, request_id=None).agent_id({}) == "Zoë"


@pytest.mark.parametrize("headers", [{"x-agent-id": ""}, {"x-agent-id": "x" * 257}, {"x-agent-id": "%ff%fe"}])
def test_a_header_that_is_no_name_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        naming(headers, path_agent=None, request_id=None)
    assert caught.value.param == "agent_id"


@pytest.mark.parametrize("value", ["", "x" * 257, 7, ["a"], True])
def test_a_body_field_that_is_no_name_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        naming({}, path_agent=None, request_id=None).agent_id({"agent_id": value})
    assert caught.value.param == "agent_id"


def test_a_name_of_256_characters_is_one() -> None:
    assert naming({}, path_agent=None, request_id=None).agent_id({"agent_id": "猫" * 256}) == "猫" * 256


def test_x_chain_new_starts_afresh_and_nothing_else_does() -> None:
    assert naming({"x-chain": "new"}, path_agent=None, request_id=None).fresh
    assert not naming({}, path_agent=None, request_id=None).fresh
    with pytest.raises(InvalidRequest):
        naming({"x-chain": "old"}, path_agent=None, request_id=None)


@pytest.mark.parametrize(("count", "retry"), [("0", False), ("1", True), ("2", True), ("x", False), ("²", False)])
def test_a_clients_own_retry_is_known_by_its_count(count: str, retry: bool) -> None:
    assert naming({"x-stainless-retry-count": count}, path_agent=None, request_id=None).is_retry is retry


def test_an_idempotency_key_is_bounded() -> None:
    assert naming({"idempotency-key": "k"}, path_agent=None, request_id=None).idempotency_key == "k"
    with pytest.raises(InvalidRequest):
        naming({"idempotency-key": "k" * 256}, path_agent=None, request_id=None)
