"""A conversation from Python, with an engine in this process or with a running `serve`.

    episode, output = await ask("Remember: the colour is teal.")
    episode, output = await ask("What is the colour?", episode=episode)
    episode, city = await ask("The largest city of Italy?", schema=City)        # a City
    episode, output = await ask("Do I need an umbrella?", tools=[weather])      # runs weather() for the model

An `Episode` is a position in a conversation. Asking twice from one creates two branches. There are two ways to ask:

- without `base_url` the engine of this process runs the CLI (settings from environment and file);
- with `base_url` a running `serve` does.

An episode can be stored (`to_json`), and continued in another process or in the other way, if both use the same `var`.

With `tools` an answer may take several turns: the model calls functions, they run here, on the caller's loop, and their
results are the next turn. `timeout` and `max_rounds` are bounds for all turns together. Cancelling `ask` ends them.
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
from .transports import AskRequest

T = TypeVar("T")

# Longer than `serve`'s default `turn_timeout` (1800 s), so that the error comes from `serve`, with its reason.
TIMEOUT = 1830.0
# The most rounds of tool calls before the answer. A model that needs more is usually in a loop.
MAX_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Episode:
    """A position in a conversation: plain data, without secrets.

    `turn`: the last turn's id. `agent_id` and `model`: of that turn. `base_url`: the `serve` that ran it; None: this
    process.
    """

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
    """The options of `ask` except `schema`."""

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
    """Send `prompt`. Returns the new episode and the answer. Raises `ProxyError`.

    With `episode` the conversation continues from there, with the episode's agent. Without one, a new conversation
    begins, or `agent_id`'s continues. `system` applies from this turn on. `api_key`: for the `serve` at `base_url`.

    The answer is a text; with `schema` it is an instance of that type (a pydantic model, a dataclass, …), or data that
    is valid by that JSON Schema. `tools`: functions that the model may call. It is shown their docstrings and
    signatures, and gets what they return or raise. A loop of calls ends with `TurnTimeout` after `timeout` seconds or
    `max_rounds` rounds; the error's `detail["episode"]` is the position at which to continue.
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
    sent = AskRequest(
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
        transport = transports.embedded if sent.base_url is None else transports.served
        async with aclosing(runtime.current().aitems(partial(transport, sent=sent))) as answers:
            async for answer in answers:  # one item; the turn is acknowledged when the loop ends
                reply = answer
        reached = Episode(reply.turn, reply.agent_id, sent.model, sent.base_url)
        if not reply.calls:
            return reached, typed.read(reply.text)
        if round_ == max_rounds:
            break
        try:
            async with asyncio.timeout_at(deadline):
                returned = await toolbox.run(reply.calls)
        except TimeoutError as exc:
            raise _unfinished(reached, f"the tools took longer than the {timeout:g} s of this ask") from exc
        # The system prompt already applies, and the agent is the turn's.
        sent = replace(
            sent, said=tuple(returned), continues=reply.turn, agent_id=None, system=None, timeout=deadline - clock()
        )
    raise _unfinished(reached, f"the model called tools {max_rounds} times without an answer")


def _unfinished(reached: Episode, why: str) -> TurnTimeout:
    return TurnTimeout(
        f'{why}: ask on with episode=Episode.from_json(error.detail["episode"]), or raise the bound',
        detail={"episode": reached.to_json()},
    )


@dataclass(frozen=True, slots=True)
class _Typed:
    """How the answer's text is converted. `schema`: the JSON Schema that the model must follow."""

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
        """The answer's text as an object of the schema; without a schema the text.

        Raises `UpstreamError` if the type's own validators refuse data that its JSON Schema allows.
        """
        if self.adapter is None:
            return text if self.schema is None else json.loads(text)
        try:
            return self.adapter.validate_json(text)
        except ValidationError as exc:
            raise UpstreamError(f"the answer is no {self.name}: {faults(exc)}; ask again") from exc
