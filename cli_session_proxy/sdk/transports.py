"""Runs one turn of an `ask`, on the engine of this process or on a running `serve`.

Both functions are async generators on the runtime's loop that yield one item. When the next item is requested, the
caller has the answer: only then the turn is acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from urllib.parse import unquote

import httpx

from ..domain.lineage import answer_text
from ..domain.models import JSON, Block, Message, Tool, Turn, TurnOptions, TurnRequest
from ..errors import ClaudeUnavailable, NotFound, PreviousNotFound, TurnTimeout, UpstreamError, from_dict
from ..wires.common import calls_for_client, encoded_agent_id, fingerprint
from ..wires.fields import model_name
from ..wires.responses.body import response_id, turn_id_of
from .runtime import Runtime
from .tools import Call, Returned

WIRE = "episode"


@dataclass(frozen=True, slots=True)
class AskRequest:
    """One request. `said`: the prompt, or the results of the calls before it. `continues`: id of the previous turn.

    `schema`: the JSON Schema of the answer. `api_key` and `base_url`: those of a running `serve`.
    """

    said: str | tuple[Returned, ...]  # the fingerprint has this name
    model: str
    timeout: float
    continues: str | None = None
    agent_id: str | None = None
    system: str | None = None
    schema: JSON | None = None
    tools: tuple[Tool, ...] = ()
    base_url: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class AskReply:
    """An answer: its text, and the calls at its end."""

    turn: str
    agent_id: str
    text: str
    calls: tuple[Call, ...]


async def embedded(here: Runtime, sent: AskRequest) -> AsyncGenerator[AskReply, None]:
    engine = await here.engine()
    content = sent.said
    blocks: tuple[Block, ...]
    if isinstance(content, str):
        blocks = ({"type": "text", "text": content},)
    else:
        blocks = tuple(
            {"type": "tool_result", "tool_use_id": one.call.id, "content": one.text, "is_error": one.is_error}
            for one in content
        )
    body: JSON = {name: value for name, value in asdict(sent).items() if name not in ("timeout", "api_key")}
    request = TurnRequest(
        model=model_name(sent.model),
        messages=(Message("user", blocks),),
        fingerprint=fingerprint("local", sent.agent_id, WIRE, body),
        agent_id=sent.agent_id,
        system=sent.system,
        continues=sent.continues,
        wire=WIRE,
        timeout=sent.timeout,
        options=TurnOptions(
            format=None if sent.schema is None else {"schema": sent.schema},
            tools=sent.tools,
        ),
    )
    answer = await engine.submit(request)
    taken = False
    try:
        turn: Turn = await answer.turn()
        calls = tuple(Call(block["id"], block["name"], block["input"]) for block in calls_for_client(turn))
        yield AskReply(turn.id, answer.agent_id, answer_text(turn.output), calls)
        answer.acknowledge()
        taken = True
    finally:
        if not taken:
            answer.cancel()  # the caller is in this process and cannot reconnect: no grace period
        answer.leave()


async def served(here: Runtime, sent: AskRequest) -> AsyncGenerator[AskReply, None]:
    assert sent.base_url is not None
    headers = {} if sent.api_key is None else {"Authorization": f"Bearer {sent.api_key}"}
    if sent.agent_id is not None:
        headers["X-Agent-Id"] = encoded_agent_id(sent.agent_id)
    root = sent.base_url.rstrip("/").removesuffix("/v1")
    # A result cannot be marked as an error here, but the result's text says so.
    items: list[JSON] = [] if sent.system is None else [{"role": "system", "content": sent.system}]
    if isinstance(sent.said, str):
        items.append({"role": "user", "content": sent.said})
    else:
        items += [{"type": "function_call_output", "call_id": one.call.id, "output": one.text} for one in sent.said]
    body: JSON = {"model": sent.model, "input": items}
    if sent.continues is not None:
        body["previous_response_id"] = response_id(sent.continues)
    if sent.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "output", "schema": sent.schema}}
    if sent.tools:
        body["tools"] = [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.schema}
            for tool in sent.tools
        ]
    try:
        answer = await here.client().post(f"{root}/v1/responses", json=body, headers=headers, timeout=sent.timeout)
        data = answer.json()
    except httpx.TimeoutException as exc:
        raise TurnTimeout(
            f"{sent.base_url} did not answer within {sent.timeout:g} s: ask again, or raise timeout"
        ) from exc
    except httpx.TransportError as exc:
        raise ClaudeUnavailable(f"{sent.base_url} does not answer ({type(exc).__name__}): is `serve` there?") from exc
    except ValueError as exc:
        raise UpstreamError(f"{sent.base_url} does not answer like a cli-session-proxy server") from exc
    if answer.status_code != 200:
        error = data.get("error") if isinstance(data, dict) else None
        refused = from_dict(error if isinstance(error, dict) else {})
        # The engine of this process raises NotFound for an unknown episode: so both functions do.
        raise NotFound(refused.message) if isinstance(refused, PreviousNotFound) else refused
    turn = turn_id_of(str(data.get("id")))
    if turn is None:
        raise UpstreamError(f"{sent.base_url} does not answer like a cli-session-proxy server")
    calls = [item for item in data["output"] if item["type"] == "function_call"]
    texts = [
        {"type": "text", "text": part["text"]}
        for item in data["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    yield AskReply(
        turn,
        unquote(answer.headers.get("x-agent-id", "")),
        answer_text(texts),
        tuple(Call(item["call_id"], item["name"], _arguments(item["arguments"])) for item in calls),
    )


def _arguments(text: str) -> JSON:
    """The arguments of a call; empty if they are not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
