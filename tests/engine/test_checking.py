"""Answers and arguments against a client's schema: checked elsewhere, and ended there when that takes too much."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.attacks import NEARLY, reference_bomb
from cli_session_proxy.aside.pool import Aside, Helpers
from cli_session_proxy.domain.client_tools import Offers, ToolPolicy
from cli_session_proxy.domain.models import Block, Tool, ToolChoice
from cli_session_proxy.domain.structured import InvalidOutput
from cli_session_proxy.engine.checks import Checks
from cli_session_proxy.errors import InvalidRequest, UpstreamError

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    made = Helpers(most=1, seconds=0.5, memory=1 << 30)
    yield made
    await made.close()


@pytest.fixture
def checks(helpers: Helpers) -> Checks:
    return Checks(cast(Aside, SimpleNamespace(checking=helpers)))


def text(words: str) -> Block:
    return {"type": "text", "text": words}


async def test_a_valid_answer_is_the_json_alone_and_thinking_stays(checks: Checks) -> None:
    said = [THOUGHT, text('```json\n{"n"'), text(": 1}\n```")]
    assert await checks.answer({"schema": SCHEMA}, said) == [THOUGHT, text('{"n": 1}')]
    with pytest.raises(InvalidOutput, match='"n" is a required property'):
        await checks.answer({"schema": SCHEMA}, [text("{}")])


@pytest.mark.parametrize(
    ("schema", "words", "error", "why"),
    [
        (reference_bomb(60), "1", InvalidRequest, "0.5 s of processor time"),
        ({"type": "string", "pattern": "^(a+)+$"}, f'"{NEARLY}"', InvalidOutput, "does not match"),
        ({"$ref": "#/nowhere"}, "1", InvalidRequest, "cannot be used"),
        ({"pattern": "(("}, '"x"', InvalidRequest, "cannot be used"),
    ],
)
async def test_a_schema_that_is_a_bomb_or_no_use_is_the_clients_fault(
    checks: Checks, schema: Any, words: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        await checks.answer({"schema": schema}, [text(words)])
    assert await checks.answer({"schema": SCHEMA}, [text('{"n": 1}')])


def called(name: str, arguments: Any, call: str = "c") -> Block:
    return {"type": "tool_use", "id": call, "name": f"mcp__client__{name}", "input": arguments}


async def test_only_a_strict_tools_arguments_are_held_against_its_schema(checks: Checks, helpers: Helpers) -> None:
    strict, loose = Tool("strict", schema=SCHEMA, strict=True), Tool("loose", schema=SCHEMA)
    judge = ToolPolicy(Offers.of([strict, loose]), ToolChoice(), checks.arguments)
    await judge.examine([called("loose", {}, "1"), {**called("loose", {}, "2"), "name": "Bash"}])
    assert judge.fault(loose, "1") is None
    assert helpers.processes == 0
    await judge.examine([called("strict", {"n": 1}, "3"), called("strict", {"n": "x"}, "4")])
    assert judge.fault(strict, "3") is None
    assert "$.n" in str(judge.fault(strict, "4"))


async def test_arguments_that_nest_too_deep_end_the_turn_whatever_the_tool(checks: Checks) -> None:
    deep: Any = 1
    for _ in range(600):
        deep = {"a": deep}
    judge = ToolPolicy(Offers.of([Tool("f")]), ToolChoice(), checks.arguments)
    with pytest.raises(UpstreamError, match="'f' with arguments nested deeper than 128 levels"):
        await judge.examine([called("f", deep)])
    await judge.examine([called("other", deep)])  # a tool of the CLI's own: its business
