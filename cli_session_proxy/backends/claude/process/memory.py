"""What the CLIs weigh, against a budget: proportional set sizes, so that what they share counts once (Linux only)."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

PROC = Path("/proc")

# One more CLI beside others, while none was weighed: 10 idle ones were 1,156 MB, one alone 186 MB (2.1.329).
FIRST_GUESS = 200 * 1024 * 1024

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


class Memory:
    """The weights last measured. One that was not weighed yet counts as the mean of the others."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self._weights: dict[int, int] = {}
        self._expected = FIRST_GUESS

    async def weigh(self, pids: Collection[int]) -> None:
        """Measure these processes with all that they started, and forget the others. Costs 4 to 5 ms of a core each."""
        self._weights = await asyncio.to_thread(weigh, pids)
        if self._weights:
            self._expected = sum(self._weights.values()) // len(self._weights)

    def of(self, pids: Iterable[int]) -> int:
        """Bytes, as far as measured."""
        return sum(self._weights.get(pid, self._expected) for pid in pids)

    def over(self, pids: Collection[int]) -> bool:
        return self.budget is not None and self.of(pids) > self.budget

    def room(self, pids: Collection[int], starting: int) -> bool:
        """Is there room for one more beside these and those being started? For the first there always is."""
        if self.budget is None or not (pids or starting):
            return True
        return self.of(pids) + (starting + 1) * self._expected <= self.budget


def weigh(pids: Collection[int], proc: Path = PROC) -> dict[int, int]:
    """Bytes of each process with all its descendants; a process that is gone is left out."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in proc.glob("[0-9]*"):
        parent = _parent(entry)
        if parent is not None:
            children[parent].append(int(entry.name))
    found = {}
    for pid in pids:
        family, sizes = [pid], []
        while family:
            one = family.pop()
            sizes += _pss(proc / str(one))
            family += children.pop(one, ())  # once: a pid that was given anew meanwhile could close a circle
        if sizes:
            found[pid] = sum(sizes)
    return found


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_bytes()
    except OSError:  # it has ended
        return None
    return int(stat.rpartition(b")")[2].split()[1])  # after the name, which may be any bytes


def _pss(entry: Path) -> list[int]:
    try:
        match = _PSS.search((entry / "smaps_rollup").read_bytes())
    except OSError:  # it has ended, or is another user's
        return []
    return [int(match[1]) * 1024] if match else []
