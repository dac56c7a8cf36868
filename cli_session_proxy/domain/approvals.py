"""A tool of the CLI's that waits for a person's word: what was asked, and what became of it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .forms import Sparse

# What a person may say: this once, every call of this tool until the turn ends, or no.
Decision = Literal["allow", "allow_for_turn", "deny"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
# `withdrawn`: nobody needs to answer any more. The turn has ended, or the CLI does not want to run the tool now.
Outcome = Literal["allowed", "allowed_for_turn", "denied", "timed_out", "withdrawn"]
OUTCOMES: dict[Decision, Outcome] = {"allow": "allowed", "allow_for_turn": "allowed_for_turn", "deny": "denied"}

# Characters of what a person says to the model with a refusal, of the line that says what was asked, and of the call
# that are looked at for it: 60 MB of words took 4 s.
LONGEST_WORD = 2000
LONGEST_ASKED, LOOKED_AT = 200, 64 * 1024
# Calls of one turn that need a permission, at most: all of them are stored with it. What is asked beyond is refused.
MOST = 500
# Characters of one such call: a person is shown all of it, without secrets, whenever they look.
LARGEST = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """`by` is the owner who answered, or who had allowed the tool for the turn. `word` is for the model."""

    outcome: Outcome
    by: str | None = None
    word: str | None = None

    @property
    def allows(self) -> bool:
        return self.outcome in ("allowed", "allowed_for_turn")


@dataclass(frozen=True, slots=True)
class Approval(Sparse):
    """One request, as it is stored with its turn: before it is shown to anybody, and again before the CLI is told.

    `asked` says in a line what the tool is to do, `call` is the model's call, `at` and `ended_at` are UTC seconds.
    `attempt`: of the turn. Without an `outcome` nobody has answered; of a turn that has ended, nobody ever will.
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
class Waiting:
    """A request that nobody has answered: what the tool would be given, until when it waits (UTC seconds), and which
    sub-agent asks. `before`: an earlier attempt of the turn was allowed the same, and may have done it."""

    approval: Approval
    input: dict[str, Any]
    until: float
    agent: str | None = None
    before: float | None = None


# What says most of a call, the first of these that it has.
_TELLING = ("command", "file_path", "notebook_path", "path", "url", "query", "pattern", "prompt")


def in_a_line(arguments: dict[str, Any]) -> str:
    """A tool's call in one line of at most `LONGEST_ASKED` characters."""
    told = next((arguments[name] for name in _TELLING if isinstance(arguments.get(name), str)), None)
    whole = (json.dumps(arguments, ensure_ascii=False) if told is None else str(told)).strip()
    line = " ".join(whole[:LOOKED_AT].split())
    is_all = len(whole) <= LOOKED_AT and len(line) <= LONGEST_ASKED
    return line if is_all else f"{line[: LONGEST_ASKED - 2]} …"
