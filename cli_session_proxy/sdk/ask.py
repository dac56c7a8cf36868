"""A conversation from Python, whichever way it is carried.

    episode, output = await ask("Remember: the colour is teal.")
    episode, output = await ask("What is the colour?", episode=episode)
    episode, city = await ask("The largest city of Italy?", schema=City)        # a City
    episode, output = await ask("Do I need an umbrella?", tools=[weather])      # runs weather() for the model

An `Episode` is where a conversation stands. Asking twice from one branches; writing it down (`to_json`) and going
on from it in another process, or with the other strategy, is the same conversation as long as it is the same `var`:

- without `base_url` the engine of this process runs the CLI (settings from environment and file);
- with one, a running `serve` does.

With `tools` an answer may need several turns: the model calls, the functions run here, on the caller's loop, and
their results are the next turn. `timeout` and `max_rounds` bound the whole of it, and cancelling `ask` ends it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ..domain.models import JSON
from ..domain.structured import checked_schema
from ..errors import InvalidRequest, TurnTimeout, UpstreamError
from ..wires.common import checked_agent_id
from . import runtime, transports
from .tools import Function, Toolbox, faults
from .transports import Saying

T = TypeVar("T")

# Longer than `serve`'s own default `turn_timeout` (1800 s), so that it is serve that says why.
TIMEOUT = 1830.0
# How often the model may call tools before it has to have answered. A loop that needs more has usually lost its way.
MAX_ROUNDS = 50


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


class AskOptions(TypedDict, total=False):
    """What `ask` takes beside `schema`."""

    tools: Sequence[Function]
    episode: Episode | None
    model: str | None
    system: str | None
    agent_id: str | None
    base_url: str | None
    api_key: str | None
    timeout: float
    max_rounds: int


@overload
async def ask(prompt: str, *, schema: None = None, **options: Unpack[AskOptions]) -> tuple[Episode, str]: ...
@overload
async def ask(prompt: str, *, schema: type[T], **options: Unpack[AskOptions]) -> tuple[Episode, T]: ...
@overload
async def ask(prompt: str, *, schema: Mapping[str, Any], **options: Unpack[AskOptions]) -> tuple[Episode, Any]: ...
async def ask(
    prompt: str,
    *,
    schema: type[Any] | Mapping[str, Any] | None = None,
    tools: Sequence[Function] = (),
    episode: Episode | None = None,
    model: str | None = None,
    system: str | None = None,
    agent_id: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    timeout: float = TIMEOUT,
    max_rounds: int = MAX_ROUNDS,
) -> tuple[Episode, Any]:
    """Say `prompt`; where the conversation then stands, and the answer. Raises `ProxyError`.

    With `episode` it goes on from there (`agent_id` then is the episode's); without, a new conversation begins, or
    `agent_id`'s goes on. `system` holds from this turn on. `api_key` is what the `serve` at `base_url` asks for.

    The answer is a text; with `schema` it is an instance of that type (a pydantic model, a dataclass, …), or the
    data that validates against that JSON Schema. `tools` are functions that the model may call: their docstrings
    and signatures tell it how, and what they return or raise goes back to it. `TurnTimeout` ends a loop of calls
    after `timeout` seconds or `max_rounds` rounds; its `detail["episode"]` is where the conversation then stands.
    """
    if not prompt.strip():
        raise InvalidRequest("the prompt is empty", param="prompt")
    if agent_id is not None:
        checked_agent_id(agent_id)
    for name, bound in (("timeout", timeout), ("max_rounds", max_rounds)):
        if bound < 0:
            raise InvalidRequest(f"{name} must not be negative", param=name)
    toolbox = Toolbox(tools)
    typed = _Typed.of(schema)
    saying = Saying(
        said=prompt,
        model=model or (episode.model if episode else "default"),
        timeout=timeout,
        continues=episode.turn if episode else None,
        agent_id=None if episode else agent_id,
        system=system,
        schema=typed.schema,
        tools=toolbox.tools,
        base_url=base_url or (episode.base_url if episode else None),
        api_key=api_key,
    )
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    for round_ in range(max_rounds + 1):
        transport = transports.embedded if saying.base_url is None else transports.served
        async with aclosing(runtime.current().aitems(partial(transport, saying=saying))) as answers:
            async for answer in answers:  # one; then to the end, where the turn is acknowledged
                heard = answer
        stands = Episode(heard.turn, heard.agent_id, saying.model, saying.base_url)
        if not heard.calls:
            return stands, typed.read(heard.text)
        if round_ == max_rounds:
            break
        try:
            async with asyncio.timeout_at(deadline):
                returned = await toolbox.run(heard.calls)
        except TimeoutError as exc:
            raise _unfinished(stands, f"the tools took longer than the {timeout:g} s of this ask") from exc
        # The system prompt holds already; the agent is the turn's.
        saying = replace(
            saying, said=tuple(returned), continues=heard.turn, agent_id=None, system=None, timeout=deadline - clock()
        )
    raise _unfinished(stands, f"the model called tools {max_rounds} times without an answer")


def _unfinished(stands: Episode, why: str) -> TurnTimeout:
    return TurnTimeout(
        f'{why}: ask on with episode=Episode.from_json(error.detail["episode"]), or raise the bound',
        detail={"episode": stands.to_json()},
    )


@dataclass(frozen=True, slots=True)
class _Typed:
    """How the answer's text is read. `schema` is what the model is held to."""

    schema: JSON | None = None
    adapter: TypeAdapter[Any] | None = None
    name: str = ""

    @staticmethod
    def of(schema: type[Any] | Mapping[str, Any] | None) -> _Typed:
        if schema is None:
            return _Typed()
        if isinstance(schema, Mapping):
            return _Typed(checked_schema(dict(schema), "schema"))
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(schema)
            return _Typed(adapter.json_schema(), adapter, getattr(schema, "__name__", str(schema)))
        except (PydanticUserError, NameError, TypeError) as exc:
            why = str(exc).partition("\n")[0]
            raise InvalidRequest(
                f"schema must be a pydantic model, another type of data, or a JSON Schema ({why})", param="schema"
            ) from exc

    def read(self, text: str) -> Any:
        """Raises `UpstreamError` where a validator of the type's own refuses what its JSON Schema allows."""
        if self.adapter is None:
            return text if self.schema is None else json.loads(text)
        try:
            return self.adapter.validate_json(text)
        except ValidationError as exc:
            raise UpstreamError(f"the answer is no {self.name}: {faults(exc)}; ask again") from exc
