"""What happened in one history, as the checker reads it: entries in the order of their time, nothing but data.

A *turn* is one thing that a client wants said, under a number that is unique in the history; an *attempt* is one
request for it. The upstream numbers the requests that reach the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

JSON = dict[str, Any]

# What a client knows of an attempt when it is over. `acknowledged`: the finish event, or the whole body, was read.
# `failed`: an error in words. `unknown`: the connection ended before either, or the client left.
Outcome = Literal["acknowledged", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's text, and its calls by the token in each call's arguments."""

    text: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a client sent for one call."""

    call: str
    text: str


# What a turn asks: a prompt, or the results of the calls of the turn before it.
Asking = str | tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """A turn and its answer on a path that a client named."""

    turn: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Sent:
    """An attempt begins.

    `path` is what the client named as the conversation before it (by an id, or by its whole history); None leaves
    that to the agent's head. `anew`: by the contract these words are said once more, as another turn of the chain.
    `aside`: what is asked is shown the conversation, and is never on a path itself.
    """

    at: float
    attempt: int
    turn: int
    agent: str
    asked: Asking
    path: tuple[Said, ...] | None = None
    anew: bool = False
    aside: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """An attempt is over. `code` is the error's."""

    at: float
    attempt: int
    outcome: Outcome
    answer: Answer | None = None
    code: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request reached the model. `proxy` is the mark of the proxy whose CLI sent it, `answer` what the model says."""

    at: float
    number: int
    proxy: str
    messages: list[JSON] = field(repr=False)
    answer: Answer


@dataclass(frozen=True, slots=True)
class Summed:
    """The conversation is summed up, by the CLI (`messages` up to its own request) or by the proxy, as a text in one
    message. The summary has this number."""

    number: int
    messages: list[JSON] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Told:
    """The model's answer to this request was sent to its end."""

    number: int


@dataclass(frozen=True, slots=True)
class Died:
    """A proxy has ended."""

    at: float
    proxy: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """A proxy has ended that nobody ended, with this exit code."""

    proxy: str
    code: int | None


@dataclass(frozen=True, slots=True)
class Orphans:
    """CLIs of a proxy that were alive although it had ended before."""

    proxy: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hung:
    """An attempt got no answer although nothing that it waited for was held back."""

    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Unserved:
    """At the end, with every proxy up and nothing in the way, an agent got no answer any more."""

    agent: str
    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stale:
    """A write of a turn's beginning or end that the store took from a proxy without the agent's lease."""

    turn_id: str
    by: str
    holder: str | None


@dataclass(frozen=True, slots=True)
class Uncounted:
    """A proxy refused so many stale writes by its log, and counted another number of them."""

    proxy: str
    refused: int
    counted: int


@dataclass(frozen=True, slots=True)
class TakenOff:
    """These turns of an agent were taken off its path, by rewinding or deleting it, while it was asked nothing.

    `certain` is off where the command's answer did not arrive.
    """

    at: float
    agent: str
    turns: frozenset[int]
    certain: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """An attempt of this agent was written to the repository: the next one that begins is told of it, by this number.

    `certain` is off where the command's answer did not arrive.
    """

    at: float
    agent: str
    number: int
    certain: bool


Entry = (
    TakenOff | Committed | Sent | Heard | Asked | Summed | Told | Died | Crashed | Orphans | Hung | Unserved | Stale
    | Uncounted
)  # fmt: skip
