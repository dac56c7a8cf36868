"""Structured output, without I/O: what is asked, what is refused."""

from __future__ import annotations

import threading

import pytest

from cli_session_proxy.domain import limits
from cli_session_proxy.domain.models import JSON
from cli_session_proxy.domain.structured import InvalidOutput, checked, checked_schema, fault_of, instruction
from cli_session_proxy.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
FORMAT = {"schema": SCHEMA}


@pytest.mark.parametrize(
    "said",
    ['{"n": 1}', ' \n{"n": 1}\n', '```json\n{"n": 1}\n```', '```\n{"n": 1}\n```\n', '```JSON \n\n{"n": 1}```'],
)
def test_a_valid_answer_is_the_json_alone(said: str) -> None:
    assert checked(FORMAT, said) == '{"n": 1}'


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("", "not JSON"), ("Here: {}", "not JSON"), ("{}", '"n" is a required property'), ('{"n": 0}', r"\$\.n"),
        ("[" * 100_000, "deeper than 128"), ("[" * 129 + "]" * 129, "deeper than 128"),
        ("```\n{}", "not JSON"), ('```json{"n": 1}```', "not JSON"),
    ],
)  # fmt: skip
def test_an_invalid_answer_is_refused_and_the_fault_is_short(said: str, fault: str) -> None:
    with pytest.raises(InvalidOutput, match=fault) as raised:
        checked(FORMAT, said)
    assert len(raised.value.fault) < 1000
    assert raised.value.fault in str(instruction(FORMAT, raised.value.fault)["text"])
    assert (raised.value.as_error().status, raised.value.as_error().code) == (502, "upstream_error")


def test_a_fence_of_very_many_lines_is_looked_at_once() -> None:
    for end in ("x", "```"):
        with pytest.raises(InvalidOutput, match="not JSON"):
            checked(FORMAT, "```" + "\n" * 500_000 + end)


def test_any_object_will_do_where_there_is_no_schema() -> None:
    assert checked({"schema": None}, '{"a": 1}')
    with pytest.raises(InvalidOutput, match="object"):
        checked({"schema": None}, "[1]")


@pytest.mark.parametrize("place", ["http://127.0.0.1:9/schema.json", "file:///etc/hostname"])
def test_a_reference_to_another_machine_or_a_file_is_never_fetched(place: str) -> None:
    with pytest.raises(InvalidRequest, match="Retrieval is disabled"):
        checked({"schema": {"$ref": place}}, "{}")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_only_python_takes_for_json_is_no_answer(number: str) -> None:
    with pytest.raises(InvalidOutput, match="not JSON"):
        checked({"schema": None}, f'{{"n": {number}}}')


def test_of_alternatives_the_fault_of_the_one_that_fits_best_is_told() -> None:
    cat = {"properties": {"cat": {"properties": {"lives": {"type": "integer"}}}}}
    assert fault_of({"cat": {"lives": "nine"}}, {"anyOf": [{"type": "string"}, cat]}) == (
        'at $.cat.lives: "nine" is not of type "integer"'
    )


@pytest.mark.parametrize(
    ("pattern", "value"),
    [("^(a+)+$", "a" * 50_000 + "!"), ("(.*)*x$", "a" * 50_000), ("^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 50_000)],
)
def test_a_pattern_that_makes_others_try_every_way_takes_linear_time(pattern: str, value: str) -> None:
    assert fault_of(value, {"type": "string", "pattern": pattern}) is not None


def test_a_pattern_that_looks_around_has_a_bounded_number_of_steps() -> None:
    assert fault_of("a1", {"pattern": "^(?=.*[0-9])(?!.*b).+$"}) is None
    with pytest.raises(InvalidRequest, match="too many steps"):
        fault_of("a" * 60 + "!", {"pattern": "^(?:(a+)+(?=.))+$"})


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "objct"}, "not a JSON Schema"),
        ({"properties": {"a": 3}}, "not a JSON Schema"),
        ({"properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}, "more than 20,000 JSON values"),
        ([], "missing"),
    ],
)
def test_what_is_no_schema_or_a_huge_one_is_refused_before_anything_runs(schema: JSON, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        checked_schema(schema, "here")


def wrapped(keyword: str, inner: JSON) -> JSON:
    return {keyword: [inner] if keyword == "allOf" else {"a": inner} if keyword == "properties" else inner}


@pytest.mark.parametrize("keyword", ["not", "allOf", "properties"])
def test_a_schema_may_nest_as_deep_as_a_body_and_no_deeper(keyword: str) -> None:
    """At the limit it is checked, on the small stack that macOS gives to threads as well; far above it, the checker
    would end the process."""
    schema: JSON = {}
    while not limits.is_deeper(wrapped(keyword, schema)):
        schema = wrapped(keyword, schema)
    found: list[JSON] = []
    before = threading.stack_size(512 * 1024)
    try:
        checking = threading.Thread(target=lambda: found.append(checked_schema(schema, "here")))
        checking.start()
        checking.join()
    finally:
        threading.stack_size(before)
    assert found == [schema]
    for _ in range(1_000):
        schema = wrapped(keyword, schema)
    with pytest.raises(InvalidRequest, match="deeper than 128"):
        checked_schema(schema, "here")


def test_a_schema_that_says_another_draft_is_read_as_ours() -> None:
    for draft in ("http://json-schema.org/draft-07/schema#", "http://127.0.0.1:9/schema"):
        assert checked_schema({"$schema": draft, "type": "string"}, "here")
        assert fault_of("x", {"$schema": draft, "type": "string"}) is None
