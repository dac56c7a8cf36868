"""A tool of the CLI that needs a person's approval: the request and its outcome. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .forms import Sparse

# A person's decision: once, for all calls of this tool until the turn ends, or no.
Decision = Literal["allow", "allow_for_turn", "deny"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
# `withdrawn`: no answer is needed any more, because the turn ended or the CLI no longer wants to run the tool.
Outcome = Literal["allowed", "allowed_for_turn", "denied", "timed_out", "withdrawn"]
OUTCOMES: dict[Decision, Outcome] = {"allow": "allowed", "allow_for_turn": "allowed_for_turn", "deny": "denied"}

# Characters of a person's reason for a refusal; of the line that describes a request; and of the call that are read for
# that line (60 MB took 4 s).
LONGEST_WORD = 2000
LONGEST_ASKED, LOOKED_AT = 200, 64 * 1024
# The most approval requests of one turn: all are stored with it. More are refused.
MOST = 500
# The longest call in characters: a person is shown all of it, without keys.
LARGEST = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a request, to be told to the CLI. `by`: the owner who decided, for this call or earlier for the
    whole turn; None: nobody. `word`: a message of that person to the model."""

    outcome: Outcome
    by: str | None = None
    word: str | None = None

    @property
    def allows(self) -> bool:
        return self.outcome in ("allowed", "allowed_for_turn")


@dataclass(frozen=True, slots=True)
class Approval(Sparse):
    """One request, as it is stored with its turn: before it is shown to anybody, and again before the CLI is told.

    `asked` says in a line what the tool is to do. `call` is the id of the model's call, `attempt` the number of the
    turn's attempt. `at` and `ended_at` are UTC seconds. Without an `outcome` nobody has answered; if the turn has
    ended, nobody ever will.
    """

    id: str
    tool: str
    asked: str
    at: float
    attempt: int = 1
    call: str | None = None
    outcome: Outcome | None = None
    by: str | None = None
    word: str | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class PendingApproval:
    """A request that nobody has answered yet. `input`: the arguments of the call. `until`: when it times out (UTC
    seconds). `agent`: the sub-agent that asks, if any. `before`: when the same call was allowed in an earlier attempt
    of the turn, which may have run it."""

    approval: Approval
    input: dict[str, Any]
    until: float
    agent: str | None = None
    before: float | None = None


# A call is described by the first of these arguments that it has.
_DESCRIPTIVE = ("command", "file_path", "notebook_path", "path", "url", "query", "pattern", "prompt")


def in_one_line(arguments: dict[str, Any]) -> str:
    """A tool's call in one line of at most `LONGEST_ASKED` characters."""
    text = next((arguments[name] for name in _DESCRIPTIVE if isinstance(arguments.get(name), str)), None)
    whole = (json.dumps(arguments, ensure_ascii=False) if text is None else str(text)).strip()
    line = " ".join(whole[:LOOKED_AT].split())
    is_whole = len(whole) <= LOOKED_AT and len(line) <= LONGEST_ASKED
    return line if is_whole else f"{line[: LONGEST_ASKED - 2]} …"
