"""Ids of tool calls are unique on a path: a result names its call by this id. Pure.

Histories of clients may have an id twice: their provider numbers the calls of each turn from 1, or a part of the
history is repeated. Run on 2.1.330: of two calls with one id the model gets only the first one, and the second result
is lost; if "x" is an id, the result of "x_1" is lost, too. 1.0.120 sends both calls, and the API refuses them. So a
call and its results get another id if their id is used on the path already, or is not valid for the API. The chain has
the ids that the model is shown.

The client still uses its own ids. They are not stored: its next request is matched with the last known answer, which
has the same calls in the same order.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from .client_tools import calls_of
from .evidence import Note
from .lineage import Past
from .models import Block, Message, Turn

_VALID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NUMBERED = re.compile(r"(.+)_[0-9]+")
# Characters that are kept of a duplicate id, with room for a number of six digits. Chains before 0.2 have "-n" instead
# of "-r", in their records but not in their turns.
_KEPT = 56


class CallIds:
    """The used ids of calls. `in`: whether an id is used, or would be confused with a used one."""

    def __init__(self, path: Iterable[Turn] = ()) -> None:
        """`path`: its turns' calls, including those of the CLI's own tools, are used ids."""
        self._taken: set[str] = set()
        self._stems: set[str] = set()  # ids without a "_" and digits at the end
        self._numbers = Counter[str]()  # the last number used after each beginning
        for turn in path:
            for call in (*calls_of(turn.output), *calls_of(turn.tools)):
                self.add(call)

    def __contains__(self, call: str) -> bool:
        return call in self._taken or call in self._stems or _stem(call) in self._taken

    def add(self, call: str) -> None:
        self._taken.add(call)
        if (stem := _stem(call)) is not None:
            self._stems.add(stem)

    def reserve(self, call: str) -> str:
        """Reserve this id if it is valid and unused, else one that is made from it. Returns the reserved id."""
        reserved = call if _VALID.fullmatch(call) else "call"
        prefix = reserved[:_KEPT]
        while reserved in self:
            self._numbers[prefix] += 1
            reserved = f"{prefix}-r{self._numbers[prefix] + 1}"
        self.add(reserved)
        return reserved


def _stem(call: str) -> str | None:
    found = _NUMBERED.fullmatch(call)
    return found and found[1]


def unique(history: Iterable[Past], path: Iterable[Turn] = ()) -> list[Past]:
    """The exchanges that follow this path, with an id of its own for each call and its results.

    Results at the start of the history already have the chain's ids.
    """
    ids = CallIds(path)
    exchanges: list[Past] = []
    clients_answer: Sequence[Block] = ()
    answer: Sequence[Block] = ()
    for past in history:
        question = in_our_ids(past.input, clients_answer, answer)
        clients_answer = past.output
        answer = tuple(
            {**block, "id": ids.reserve(str(block.get("id")))} if block.get("type") == "tool_use" else block
            for block in clients_answer
        )
        changed = sum(old != new for old, new in zip(calls_of(clients_answer), calls_of(answer), strict=True))
        notes = (*past.notes, Note("ids_rewritten", changed)) if changed else past.notes
        exchanges.append(Past(question, answer, notes))
    return exchanges


def in_our_ids(new: Sequence[Message], clients_answer: Sequence[Block], answer: Sequence[Block]) -> tuple[Message, ...]:
    """`new` with its results under the ids of the calls in `answer`. `clients_answer`: the same calls with the client's
    ids, or without ids.

    Results of calls with equal ids are assigned in order.
    """
    ours: dict[str, deque[str]] = {}  # by the client's id
    for clients_id, call in zip(calls_of(clients_answer), calls_of(answer), strict=False):
        ours.setdefault(clients_id, deque()).append(call)
    if all(list(calls) == [clients_id] for clients_id, calls in ours.items()):
        return tuple(new)

    def renamed(block: Block) -> Block:
        calls = ours.get(str(block.get("tool_use_id"))) if block.get("type") == "tool_result" else None
        if calls is None:
            return block
        return {**block, "tool_use_id": calls.popleft() if len(calls) > 1 else calls[0]}

    return tuple(Message(message.role, tuple(map(renamed, message.content))) for message in new)
