"""The proxy's own OpenAPI document: it is right, and whatever is sent by it is answered without a fault."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis.strategies import SearchStrategy
from openai import AsyncOpenAI
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cli_session_proxy.domain.models import JSON

from ..conftest import ROOT
from ..matrix import rest_in_full
from ..no_cli import no_cli
from ..wires.responses.conftest import client_of

# For each operation: nearly all of the time is Hypothesis's, which makes them.
EXAMPLES = 1, 10
SAID: JSON = {"model": "sonnet", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
INPUT: JSON = {"model": "sonnet", "input": "hello"}
CONTENTS: JSON = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
GOOD = {
    "/v1/chat/completions": SAID,
    "/v1/messages": SAID,
    "/v1/messages/count_tokens": SAID,
    "/v1/responses": INPUT,
    "/v1/responses/input_tokens": INPUT,
    "/v1/interactions": INPUT,
    "/api/chat": SAID,
    "/api/generate": {"model": "sonnet", "prompt": "hello"},
    "/v1/models/{model}:generateContent": CONTENTS,
    "/v1/models/{model}:streamGenerateContent": CONTENTS,
    "/v1/models/{model}:countTokens": CONTENTS,
}
# Retired; asked only of an agent that is not there, because for one that is they never end; an image, of which none was
# said; and a word on a tool, of which none waits.
NEVER_WELL = (
    "/v1/assistants", "/v1/threads", "/v1/chains/{agent_id}/events", "/v1/chains/{agent_id}/turns/{turn_id}/images",
    "/v1/approvals/events", "/v1/chains/{agent_id}/approve",
)  # fmt: skip
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


async def document(url: str) -> JSON:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        found: JSON = (await http.get("/openapi.json")).json()
    return found


async def known_ids(client: AsyncOpenAI, url: str) -> dict[str, str]:
    """What there is, by the names of the addresses' parts. One conversation has an item, one turn is an interaction."""
    made = await client.conversations.create(items=[{"type": "message", "role": "user", "content": "hello"}])
    items = await client.conversations.items.list(made.id)
    response = await client.responses.create(model="sonnet", input="hello")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        interaction = (await http.post("/v1/interactions", json={"model": "sonnet", "input": "hello"})).json()
    return {
        "conversation_id": made.id, "item_id": items.data[0].id or "", "response_id": response.id,
        "name": interaction["id"], "agent_id": "chat", "turn_id": interaction["id"].replace("interaction_", "turn_"),
        "model": "sonnet",
    }  # fmt: skip


def call_all(url: str, document: JSON, known: dict[str, str], examples: int) -> Counter[tuple[str, str, int]]:
    """Every operation with made-up parameters and bodies, and once more about what there is; how each was answered."""
    answered: Counter[tuple[str, str, int]] = Counter()
    found: Any = schemathesis.openapi.from_dict(document).get_all_operations()
    operations = [one.ok() for one in found]
    # what deletes comes last, so that what there is can be asked for until then
    for operation in sorted(operations, key=lambda one: one.method.lower() == "delete"):
        if operation.path == "/v1/approvals/events":  # it never ends
            continue
        ids = known | ({"name": "main.js"} if operation.path.startswith("/ui") else {})
        call(url, operation, operation.as_strategy(), examples, answered)
        # the events of an agent that there is never end
        if not operation.path.endswith("/events"):
            names = {parameter.name for parameter in operation.path_parameters}
            there = {name: ids[name] for name in names & ids.keys()}
            good = {"body": GOOD[operation.path]} if operation.path in GOOD else {}
            call(url, operation, operation.as_strategy(path_parameters=there, **good), examples, answered)
    return answered


def call(
    url: str, operation: Any, cases: SearchStrategy[Any], examples: int, answered: Counter[tuple[str, str, int]]
) -> None:
    @given(case=cases)
    @hypothesis_settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def each(case: Any) -> None:
        response = case.call(base_url=url, timeout=20)
        case.validate_response(response, checks=CHECKS)
        answered[operation.method.upper(), operation.path, response.status_code] += 1

    each()


async def test_every_query_of_the_contract_is_described(tmp_path: Path) -> None:
    told = re.findall(r"`(/v1/[^`?]*)\?([a-z_=&]+)`", (ROOT / "docs" / "contract" / "routes.md").read_text())
    assert len(told) > 1
    async with no_cli(tmp_path) as url:
        paths = (await document(url))["paths"]
    for path, query in told:
        described = {one["name"] for one in paths[path]["get"]["parameters"] if one["in"] == "query"}
        assert {part.partition("=")[0] for part in query.split("&")} == described, path


@pytest.mark.timeout(200)
@pytest.mark.parametrize("examples", rest_in_full(*EXAMPLES))
async def test_no_address_and_no_body_makes_a_fault_or_an_answer_that_is_not_described(
    examples: int, tmp_path: Path
) -> None:
    async with no_cli(tmp_path) as url, client_of(f"{url}/v1") as client:
        described = await document(url)
        answered = await asyncio.to_thread(call_all, url, described, await known_ids(client, url), examples)
    well = {path for method, path, status in answered if method in ("GET", "POST") and status == 200}
    expected = {path for path, operations in described["paths"].items() if "get" in operations} | set(GOOD)
    assert {path for path in expected - well if not path.startswith(NEVER_WELL)} == set()
