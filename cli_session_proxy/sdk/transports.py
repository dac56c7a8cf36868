"""The two ways to one turn of an `ask`: the engine of this process, or a running `serve`.

Both are async generators on the runtime's loop with one item. It is drawn once more after that: then the caller has
the answer, and only then the turn is acknowledged.
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
from ..wires.common import encoded_agent_id, fingerprint, model_name
from ..wires.responses.body import response_id, turn_id_of
from .runtime import Runtime
from .tools import Call, Returned

WIRE = "episode"


@dataclass(frozen=True, slots=True)
class Saying:
    """One request: the prompt, or what the calls before it returned. `continues` is the turn that it goes on from.

    `schema` is the JSON Schema of the answer. `api_key` and `base_url` are of a running `serve`.
    """

    said: str | tuple[Returned, ...]
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
class Heard:
    """The answer: its text, and the calls that it ends with."""

    turn: str
    agent_id: str
    text: str
    calls: tuple[Call, ...]


async def embedded(here: Runtime, saying: Saying) -> AsyncGenerator[Heard, None]:
    engine = await here.engine()
    said = saying.said
    blocks: tuple[Block, ...]
    if isinstance(said, str):
        blocks = ({"type": "text", "text": said},)
    else:
        blocks = tuple(
            {"type": "tool_result", "tool_use_id": one.call.id, "content": one.text, "is_error": one.is_error}
            for one in said
        )
    body: JSON = {name: value for name, value in asdict(saying).items() if name not in ("timeout", "api_key")}
    request = TurnRequest(
        model=model_name(saying.model),
        messages=(Message("user", blocks),),
        fingerprint=fingerprint("local", saying.agent_id, WIRE, body),
        agent_id=saying.agent_id,
        system=saying.system,
        continues=saying.continues,
        wire=WIRE,
        timeout=saying.timeout,
        options=TurnOptions(
            format=None if saying.schema is None else {"schema": saying.schema},
            tools=saying.tools,
        ),
    )
    answer = await engine.submit(request)
    taken = False
    try:
        turn: Turn = await answer.turn()
        calls = [block for block in turn.output if block.get("type") == "tool_use"]
        yield Heard(
            turn.id,
            answer.agent_id,
            answer_text(turn.output),
            tuple(Call(block["id"], block["name"], block["input"]) for block in calls)
            if turn.status == "requires_action"
            else (),
        )
        answer.acknowledge()
        taken = True
    finally:
        if not taken:
            answer.cancel()  # its caller is in this process and does not come back: no time of grace for the turn
        answer.leave()


async def served(here: Runtime, saying: Saying) -> AsyncGenerator[Heard, None]:
    assert saying.base_url is not None
    headers = {} if saying.api_key is None else {"Authorization": f"Bearer {saying.api_key}"}
    if saying.agent_id is not None:
        headers["X-Agent-Id"] = encoded_agent_id(saying.agent_id)
    root = saying.base_url.rstrip("/").removesuffix("/v1")
    try:
        answer = await here.client().post(
            f"{root}/v1/responses", json=_body(saying), headers=headers, timeout=saying.timeout
        )
        data = answer.json()
    except httpx.TimeoutException as exc:
        raise TurnTimeout(
            f"{saying.base_url} did not answer within {saying.timeout:g} s: ask again, or raise timeout"
        ) from exc
    except httpx.TransportError as exc:
        raise ClaudeUnavailable(f"{saying.base_url} does not answer ({type(exc).__name__}): is `serve` there?") from exc
    except ValueError as exc:
        raise UpstreamError(f"{saying.base_url} does not answer like a cli-session-proxy server") from exc
    if answer.status_code != 200:
        error = data.get("error") if isinstance(data, dict) else None
        refused = from_dict(error if isinstance(error, dict) else {})
        # In this process an unknown episode is a NotFound: the same for both ways.
        raise NotFound(refused.message) if isinstance(refused, PreviousNotFound) else refused
    turn = turn_id_of(str(data.get("id")))
    if turn is None:
        raise UpstreamError(f"{saying.base_url} does not answer like a cli-session-proxy server")
    calls = [item for item in data["output"] if item["type"] == "function_call"]
    texts = [
        {"type": "text", "text": part["text"]}
        for item in data["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    yield Heard(
        turn,
        unquote(answer.headers.get("x-agent-id", "")),
        answer_text(texts),
        tuple(Call(item["call_id"], item["name"], _arguments(item["arguments"])) for item in calls),
    )


def _body(saying: Saying) -> JSON:
    """The request as a body of Responses, which cannot mark a result as an error: its text says so."""
    said: list[JSON] = [] if saying.system is None else [{"role": "system", "content": saying.system}]
    if isinstance(saying.said, str):
        said.append({"role": "user", "content": saying.said})
    else:
        said += [{"type": "function_call_output", "call_id": one.call.id, "output": one.text} for one in saying.said]
    body: JSON = {"model": saying.model, "input": said}
    if saying.continues is not None:
        body["previous_response_id"] = response_id(saying.continues)
    if saying.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "output", "schema": saying.schema}}
    if saying.tools:
        body["tools"] = [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.schema}
            for tool in saying.tools
        ]
    return body


def _arguments(text: str) -> JSON:
    """The arguments of a call; none where they are no JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
