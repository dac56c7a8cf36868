"""Orders turns for readers: by acceptance, but each after its parent.

A turn may wait in its lane while other turns are adopted. Then its parent is later in the order of acceptance. Such
turns are few, and held in memory; of all others only the id is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from .models import Link


class Ordered(Protocol):
    """A turn, or its outline."""

    @property
    def id(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def parent_id(self) -> str | None: ...


T = TypeVar("T", bound=Ordered)


@dataclass(slots=True)
class _Line(Generic[T]):
    """`waiting`: turns by their parent, which has not come yet."""

    known: set[str] = field(default_factory=set)
    waiting: dict[str, list[T]] = field(default_factory=lambda: defaultdict(list))

    def take(self, turn: T) -> Sequence[T]:
        """This turn and those that wait for it; none while its parent is missing."""
        if turn.parent_id is not None and turn.parent_id not in self.known:
            self.waiting[turn.parent_id].append(turn)
            return ()
        if not self.waiting:  # nearly always
            self.known.add(turn.id)
            return (turn,)
        ready = [turn]
        for at in ready:  # grows by turns that wait for these
            self.known.add(at.id)
            ready += self.waiting.pop(at.id, ())
        return ready

    def rest(self) -> list[T]:
        """Turns whose parent never came. A valid chain has none."""
        return sorted((turn for held in self.waiting.values() for turn in held), key=lambda turn: turn.seq)


async def parents_first(turns: AsyncIterator[T]) -> AsyncIterator[T]:
    line = _Line[T]()
    async for turn in turns:
        for ready in line.take(turn):
            yield ready
    for left in line.rest():
        yield left


async def numbered(turns: AsyncIterator[T]) -> AsyncIterator[tuple[int, T]]:
    """The turns in reading order, each with its stable number in the order of acceptance."""
    numbers: dict[str, int] = {}

    async def counted() -> AsyncIterator[T]:
        async for turn in turns:
            numbers[turn.id] = len(numbers) + 1
            yield turn

    async for turn in parents_first(counted()):
        yield numbers[turn.id], turn


def sorted_by_parent(turns: Iterable[T]) -> list[T]:
    """Sort some turns of a chain. Parents that are not among them do not matter."""
    every = sorted(turns, key=lambda turn: turn.seq)
    own = {turn.id for turn in every}
    line = _Line[T]({turn.parent_id for turn in every if turn.parent_id is not None and turn.parent_id not in own})
    return [ready for turn in every for ready in line.take(turn)] + line.rest()


def by_turn(links: Iterable[Link]) -> dict[str | None, list[Link]]:
    """Links by turn; None: without a turn."""
    found: dict[str | None, list[Link]] = defaultdict(list)
    for link in links:
        found[link.turn_id].append(link)
    return dict(found)
