"""A conversation from Python, whichever way it is carried.

    episode, output = await ask("Remember: the colour is teal.")
    episode, output = await ask("What is the colour?", episode=episode)

An `Episode` is where a conversation stands. Asking twice from one branches; writing it down (`to_json`) and going
on from it in another process, or with the other strategy, is the same conversation as long as it is the same `var`:

- without `base_url` the engine of this process runs the CLI (settings from environment and file);
- with one, a running `serve` does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import unquote

import httpx

from ..domain.models import JSON, Message, Turn, TurnRequest
from ..errors import ClaudeUnavailable, InvalidRequest, NotFound, PreviousNotFound, UpstreamError, from_dict
from ..wires.common import answer_text, checked_agent_id, encoded_agent_id, fingerprint, model_name
from ..wires.responses.body import response_id, turn_id_of
from . import runtime

WIRE = "episode"

# Longer than `serve`'s own default `turn_timeout` (1800 s), so that it is serve that says why.
TIMEOUT = 1830.0


@dataclass(frozen=True, slots=True)
class Episode:
    """Where a conversation stands: plain data, without secrets. `turn` is the last turn's id."""

    turn: str
    agent_id: str
    model: str
    base_url: str | None = None

    def to_json(self) -> JSON:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Episode:
        """The inverse of `to_json`. Raises `InvalidRequest`."""
        known = {field.name: data.get(field.name) for field in fields(Episode)}
        if not all(isinstance(known[name], str) for name in ("turn", "agent_id", "model")):
            raise InvalidRequest("this is no episode: give what Episode.to_json() made", param="episode")
        return Episode(**known)  # type: ignore[arg-type]  # checked above


async def ask(
    prompt: str,
    *,
    episode: Episode | None = None,
    model: str | None = None,
    system: str | None = None,
    agent_id: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    timeout: float = TIMEOUT,
) -> tuple[Episode, str]:
    """Say `prompt`; where the conversation then stands, and the answer's text. Raises `ProxyError`.

    With `episode` it goes on from there (`agent_id` then is the episode's); without, a new conversation begins, or
    `agent_id`'s goes on. `system` holds from this turn on. `api_key` is what the `serve` at `base_url` asks for.
    """
    if not prompt.strip():
        raise InvalidRequest("the prompt is empty", param="prompt")
    if agent_id is not None:
        checked_agent_id(agent_id)
    asked = _Asked(
        prompt=prompt,
        episode=episode,
        model=model or (episode.model if episode else "default"),
        system=system,
        agent_id=None if episode else agent_id,
        base_url=base_url or (episode.base_url if episode else None),
        api_key=api_key,
        timeout=timeout,
    )
    way = _embedded if asked.base_url is None else _served
    async with aclosing(runtime.current().aitems(lambda here: way(here, asked))) as answers:
        async for answer in answers:  # one; then to the end, where the turn is acknowledged
            said = answer
    return said


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: str
    episode: Episode | None
    model: str
    system: str | None
    agent_id: str | None
    base_url: str | None
    api_key: str | None
    timeout: float


async def _embedded(here: runtime.Runtime, asked: _Asked) -> AsyncGenerator[tuple[Episode, str], None]:
    engine = await here.engine()
    continues = asked.episode.turn if asked.episode else None
    body: JSON = {"prompt": asked.prompt, "model": asked.model, "system": asked.system, "continues": continues}
    request = TurnRequest(
        model=model_name(asked.model),
        messages=(Message.user(asked.prompt),),
        fingerprint=fingerprint("local", asked.agent_id, WIRE, body),
        agent_id=asked.agent_id,
        system=asked.system,
        continues=continues,
        wire=WIRE,
        timeout=asked.timeout,
    )
    answer = await engine.submit(request)
    try:
        turn: Turn = await answer.turn()
        yield Episode(turn.id, answer.agent_id, asked.model), answer_text(turn.output)
        answer.acknowledge()
    finally:
        answer.leave()


async def _served(here: runtime.Runtime, asked: _Asked) -> AsyncGenerator[tuple[Episode, str], None]:
    assert asked.base_url is not None
    said: list[JSON] = [{"role": "user", "content": asked.prompt}]
    if asked.system is not None:
        said.insert(0, {"role": "system", "content": asked.system})
    body: JSON = {"model": asked.model, "input": said}
    if asked.episode is not None:
        body["previous_response_id"] = response_id(asked.episode.turn)
    headers = {} if asked.api_key is None else {"Authorization": f"Bearer {asked.api_key}"}
    if asked.agent_id is not None:
        headers["X-Agent-Id"] = encoded_agent_id(asked.agent_id)
    try:
        answer = await here.client().post(
            f"{_root(asked.base_url)}/responses", json=body, headers=headers, timeout=asked.timeout
        )
        data = answer.json()
    except httpx.TransportError as exc:
        raise ClaudeUnavailable(f"{asked.base_url} does not answer ({type(exc).__name__}): is `serve` there?") from exc
    except ValueError as exc:
        raise UpstreamError(f"{asked.base_url} does not answer as a server of ours does") from exc
    if answer.status_code != 200:
        raise _refused(data)
    turn = turn_id_of(str(data.get("id")))
    if turn is None:
        raise UpstreamError(f"{asked.base_url} does not answer as a server of ours does")
    agent = unquote(answer.headers.get("x-agent-id", ""))
    yield Episode(turn, agent, asked.model, asked.base_url), _text(data)


def _refused(data: Any) -> Exception:
    error = data.get("error") if isinstance(data, dict) else None
    refused = from_dict(error if isinstance(error, dict) else {})
    # In this process an unknown episode is a NotFound: the same for both strategies.
    return NotFound(refused.message) if isinstance(refused, PreviousNotFound) else refused


def _root(base_url: str) -> str:
    root = base_url.rstrip("/")
    return root if root.endswith("/v1") else f"{root}/v1"


def _text(data: JSON) -> str:
    blocks = [
        {"type": "text", "text": part["text"]}
        for item in data["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    return answer_text(blocks)
