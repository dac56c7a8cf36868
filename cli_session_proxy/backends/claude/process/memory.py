"""How much memory the CLIs take, against a budget.

On Linux by proportional set sizes, so that what they share counts once. Elsewhere, and where the kernel does not tell
them, by resident sizes: on macOS the call for anything better is refused for other programs, and may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable

import psutil

# One more CLI beside others, while none was weighed: 10 idle ones were 1,156 MB, one alone 186 MB (2.1.329).
FIRST_WEIGHT = 200 * 1024 * 1024
# Bytes that the kernel takes for a file in memory, whatever is in it.
OF_A_FILE = 1024
# Seconds for a measurement.
WEIGH_WAIT = 5.0


class Memory:
    """The weights last measured. One that was not weighed yet counts as the mean of the others."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self._weights: dict[int, int] = {}
        self._expected = FIRST_WEIGHT
        self._weighing: asyncio.Task[dict[int, int]] | None = None

    async def weigh(self, pids: Collection[int]) -> None:
        """Measure these processes with all that they started, and forget the others. Costs 4 to 5 ms of a core each.

        Bounded: the kernel may hold up who asks (a process in a page fault of a file system that does not answer). The
        last weights hold until it has answered.
        """
        if self._weighing is None:
            self._weighing = asyncio.create_task(asyncio.to_thread(weigh, pids))
        try:
            done, _ = await asyncio.wait({self._weighing}, timeout=WEIGH_WAIT)
        except asyncio.CancelledError:
            self._weighing.cancel()
            raise
        if not done:
            return
        weighed, self._weighing = self._weighing, None
        self._weights = weighed.result()
        if self._weights:
            self._expected = sum(self._weights.values()) // len(self._weights)

    def of(self, pids: Iterable[int]) -> int:
        """Bytes, as far as measured."""
        return sum(self._weights.get(pid, self._expected) for pid in pids)

    def measured(self, pid: int) -> int:
        """Bytes of one; 0 where it was not weighed yet."""
        return self._weights.get(pid, 0)

    def over(self, pids: Collection[int]) -> bool:
        return self.budget is not None and self.of(pids) > self.budget

    def room(self, pids: Collection[int], starting: int) -> bool:
        """Whether one more process fits beside these and those that start. The first one always does."""
        if self.budget is None or not (pids or starting):
            return True
        return self.of(pids) + (starting + 1) * self._expected <= self.budget


def weigh(pids: Collection[int]) -> dict[int, int]:
    """Bytes of each process with all its descendants; a process that is gone is left out."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    living = {}
    for process in psutil.process_iter(["ppid"]):
        living[process.pid] = process
        children[process.info["ppid"]].append(process)
    ours = os.readlink("/proc/self/ns/mnt") if sys.platform == "linux" else ""
    found = {}
    for pid in pids:
        family, sizes = [living[pid]] if pid in living else [], []
        spaces = {ours}  # mount namespaces whose files in memory are counted
        while family:
            one = family.pop()
            family += children.pop(one.pid, ())  # once: a pid that was given anew meanwhile could close a circle
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                sizes.append(size(one))
                with contextlib.suppress(OSError):
                    if sys.platform == "linux" and (space := os.readlink(f"/proc/{one.pid}/ns/mnt")) not in spaces:
                        spaces.add(space)
                        sizes.append(_in_memory(one.pid))
        if sizes:
            found[pid] = sum(sizes)
    return found


def _in_memory(pid: int) -> int:
    """Bytes of the files that a process behind a boundary has in memory (tmpfs): part of no process's size."""
    used = {}
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, kind = line.partition(" - ")
            at = f"/proc/{pid}/root{fields.split()[4]}"
            with contextlib.suppress(OSError):  # hidden below another mount
                if kind.startswith("tmpfs ") and (told := os.statvfs(at)).f_blocks:
                    files = (told.f_files - told.f_ffree) * OF_A_FILE
                    used[os.stat(at).st_dev] = (told.f_blocks - told.f_bfree) * told.f_frsize + files
    return sum(used.values())


def size(process: psutil.Process) -> int:
    """Raises psutil.Error."""
    if sys.platform == "linux":
        with contextlib.suppress(psutil.AccessDenied):
            return int(process.memory_full_info().pss)
    return int(process.memory_info().rss)
