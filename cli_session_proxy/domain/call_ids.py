"""Ids of tool calls are unique on a path: a result finds its call by its id. Pure.

Histories of clients may have an id twice: their provider numbers the calls of each turn from 1, or a part of the
history is repeated. Run on 2.1.330: of two calls with one id the model gets only the first one, and the second result
is lost; if "x" is an id, the result of "x_1" is lost, too. 1.0.120 sends both calls, and the API refuses them. So a
call and its results get another id if theirs is used on the path, or is not valid for the API. The chain has the ids
that the model is shown.

The client still uses its own ids. They are not stored: its next request is matched with the last known answer, which
has the same calls in the same order.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from .client_tools import calls_of
from .lineage import Past
from .models import Block, Message, Turn
from .notes import Note

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

    def free(self, wanted: str) -> str:
        """Reserve an unused id: the wanted one, or one made of it."""
        known = wanted if _VALID.fullmatch(wanted) else "call"
        prefix = known[:_KEPT]
        while known in self:
            self._numbers[prefix] += 1
            known = f"{prefix}-r{self._numbers[prefix] + 1}"
        self.add(known)
        return known


def _stem(call: str) -> str | None:
    found = _NUMBERED.fullmatch(call)
    return found and found[1]


def unique(history: Iterable[Past], path: Iterable[Turn] = ()) -> list[Past]:
    """The exchanges that follow this path, each call under an id of its own, its results with it.

    Results at the start of the history already have our ids.
    """
    ids = CallIds(path)
    out: list[Past] = []
    said: Sequence[Block] = ()
    ours: Sequence[Block] = ()
    for past in history:
        asked = in_our_ids(past.input, said, ours)
        said, ours = (
            past.output,
            tuple(
                {**block, "id": ids.free(str(block.get("id")))} if block.get("type") == "tool_use" else block
                for block in past.output
            ),
        )
        changed = sum(was != now for was, now in zip(calls_of(said), calls_of(ours), strict=True))
        out.append(Past(asked, ours, (*past.notes, Note("ids_rewritten", changed)) if changed else past.notes))
    return out


def in_our_ids(new: Sequence[Message], said: Sequence[Block], output: Sequence[Block]) -> tuple[Message, ...]:
    """`new` with the ids of the calls in `output`. `said`: the same calls with the client's ids, or without ids.

    Results of calls with equal ids are assigned in order.
    """
    ours: dict[str, deque[str]] = {}
    for theirs, known in zip(calls_of(said), calls_of(output), strict=False):
        ours.setdefault(theirs, deque()).append(known)
    if all(list(known) == [theirs] for theirs, known in ours.items()):
        return tuple(new)

    def renamed(block: Block) -> Block:
        known = ours.get(str(block.get("tool_use_id"))) if block.get("type") == "tool_result" else None
        if known is None:
            return block
        return {**block, "tool_use_id": known.popleft() if len(known) > 1 else known[0]}

    return tuple(Message(message.role, tuple(map(renamed, message.content))) for message in new)
