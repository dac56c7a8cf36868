"""Orders turns for readers: by acceptance, but each after its parent.

A turn may wait in its lane while other turns are adopted. Then its parent comes later in the order of acceptance. Such
turns are few, and are held in memory; of all other turns only the id is.
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
class _Waiting(Generic[T]):
    """Turns that wait for their parent. `known`: ids of turns that came. `waiting`: turns by their missing parent."""

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
        for each in ready:  # grows meanwhile: by the turns that wait for these
            self.known.add(each.id)
            ready += self.waiting.pop(each.id, ())
        return ready

    def rest(self) -> list[T]:
        """Turns whose parent never came. A valid chain has none."""
        return sorted((turn for held in self.waiting.values() for turn in held), key=lambda turn: turn.seq)


async def numbered(turns: AsyncIterator[T]) -> AsyncIterator[tuple[int, T]]:
    """The turns, parents first, each with its stable number in the order of acceptance."""
    numbers: dict[str, int] = {}
    queue = _Waiting[T]()
    async for turn in turns:
        numbers[turn.id] = len(numbers) + 1
        for ready in queue.take(turn):
            yield numbers[ready.id], ready
    for left in queue.rest():
        yield numbers[left.id], left


def sorted_by_parent(turns: Iterable[T]) -> list[T]:
    """Sort some turns of a chain. Parents that are not among them do not matter."""
    by_seq = sorted(turns, key=lambda turn: turn.seq)
    ids = {turn.id for turn in by_seq}
    queue = _Waiting[T]({turn.parent_id for turn in by_seq if turn.parent_id is not None and turn.parent_id not in ids})
    return [ready for turn in by_seq for ready in queue.take(turn)] + queue.rest()


def by_turn(links: Iterable[Link]) -> dict[str | None, list[Link]]:
    """Links by the id of their turn; under None those without a turn."""
    grouped: dict[str | None, list[Link]] = defaultdict(list)
    for link in links:
        grouped[link.turn_id].append(link)
    return dict(grouped)
