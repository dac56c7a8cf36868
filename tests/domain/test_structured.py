"""Structured output, without I/O: what is asked, what is refused."""

from __future__ import annotations

import pytest

from cli_session_proxy.domain.structured import InvalidOutput, checked, instruction
from cli_session_proxy.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
FORMAT = {"schema": SCHEMA}


def text(said: str) -> list[dict[str, str]]:
    return [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": said}]


@pytest.mark.parametrize("said", ['{"n": 1}', ' \n{"n": 1}\n', '```json\n{"n": 1}\n```', '```\n{"n": 1}\n```\n'])
def test_a_valid_answer_is_the_json_alone_and_thinking_stays(said: str) -> None:
    assert checked(FORMAT, text(said)) == [text("")[0], {"type": "text", "text": '{"n": 1}'}]


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("", "not JSON"), ("Here: {}", "not JSON"), ("{}", "'n' is a required property"), ('{"n": 0}', r"\$\.n"),
        ("[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_an_invalid_answer_is_refused_and_the_fault_is_short(said: str, fault: str) -> None:
    with pytest.raises(InvalidOutput, match=fault) as raised:
        checked(FORMAT, text(said))
    assert len(raised.value.fault) < 1000
    assert raised.value.fault in str(instruction(FORMAT, raised.value.fault)["text"])
    assert (raised.value.as_error().status, raised.value.as_error().code) == (502, "upstream_error")


def test_any_object_will_do_where_there_is_no_schema() -> None:
    assert checked({"schema": None}, text('{"a": 1}'))
    with pytest.raises(InvalidOutput, match="object"):
        checked({"schema": None}, text("[1]"))


def test_a_reference_to_another_machine_is_never_fetched() -> None:
    with pytest.raises(InvalidRequest, match=r"127\.0\.0\.1"):
        checked({"schema": {"$ref": "http://127.0.0.1:9/schema.json"}}, text("{}"))
