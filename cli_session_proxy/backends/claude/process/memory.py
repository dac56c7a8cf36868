"""Measures the memory of CLIs, for a budget.

On Linux by proportional set sizes, so that shared memory counts once. Elsewhere, and if the kernel does not report
them, by resident sizes: on macOS the more exact calls are refused for other programs, and may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable

import psutil

# The assumed size of a CLI before any measurement: 10 idle ones were 1,156 MB, one alone 186 MB (2.1.329).
FIRST_WEIGHT = 200 * 1024 * 1024
# Bytes of kernel memory for each file in a tmpfs.
TMPFS_FILE = 1024
# A folder that is only looked at. `O_PATH` is Linux's, as is what it is used for.
FOLDER = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# How the kernel writes a blank in a mount's path.
ESCAPED = re.compile(r"\\([0-7]{3})")
# Timeout of a measurement in seconds.
WEIGH_WAIT = 5.0


class Memory:
    """The last measured sizes. A process that was not measured yet counts as the mean of the measured ones. `budget`:
    the most bytes of all of them; None: no limit."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self._weights: dict[int, int] = {}
        self._expected = FIRST_WEIGHT
        self._weighing: asyncio.Task[dict[int, int]] | None = None

    async def weigh(self, pids: Collection[int]) -> None:
        """Measure these processes with their descendants, and forget others. It takes 4 to 5 ms of a core for each.

        With a timeout, because the kernel may block the measurement (a page fault on a file system that does not
        respond). It then goes on, its sizes are taken by a later call, and until then the last sizes are used.
        """
        if self._weighing is None:
            self._weighing = asyncio.create_task(asyncio.to_thread(weigh, pids))
        try:
            done, _ = await asyncio.wait({self._weighing}, timeout=WEIGH_WAIT)
        except asyncio.CancelledError:
            self._weighing.cancel()
            raise
        if not done:  # a blocked thread cannot be ended: the next call waits for it, and starts no second one
            return
        weighed, self._weighing = self._weighing, None
        self._weights = weighed.result()
        if self._weights:  # without any measured process the last mean stays
            self._expected = sum(self._weights.values()) // len(self._weights)

    def of(self, pids: Iterable[int]) -> int:
        """Total bytes, with an estimate for processes not measured yet."""
        return sum(self._weights.get(pid, self._expected) for pid in pids)

    def measured(self, pid: int) -> int:
        """Bytes of one process; 0 if not measured yet."""
        return self._weights.get(pid, 0)

    def over(self, pids: Collection[int]) -> bool:
        return self.budget is not None and self.of(pids) > self.budget

    def room(self, pids: Collection[int], starting: int) -> bool:
        """Whether another process fits beside these and `starting` ones. The first one always does."""
        if self.budget is None or not (pids or starting):
            return True
        return self.of(pids) + (starting + 1) * self._expected <= self.budget


def weigh(pids: Collection[int]) -> dict[int, int]:
    """Bytes of each process with all its descendants; without dead ones."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    living = {}
    for process in psutil.process_iter(["ppid"]):
        living[process.pid] = process
        children[process.info["ppid"]].append(process)
    ours = os.readlink("/proc/self/ns/mnt") if sys.platform == "linux" else ""
    found = {}
    for pid in pids:
        family, sizes = [living[pid]] if pid in living else [], []
        spaces = {ours}  # mount namespaces that are already counted
        while family:
            one = family.pop()
            family += children.pop(one.pid, ())  # once each: a reused pid could form a cycle
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
    """Bytes of a sandbox's files in tmpfs: they count for no process. No link is followed on the way to a mount: an
    agent could put one there, and would be weighed with the machine's whole disk."""
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.split()[2:5:2] for line in file if " - tmpfs " in line]
    used = {}
    for device, path in mounts:
        at = os.open(os.path.join("/proc", str(pid), "root", "."), FOLDER)
        try:
            for name in ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), path).split("/"):
                above, at = at, os.open(name or ".", FOLDER, dir_fd=at)
                os.close(above)
            found, usage = os.fstat(at).st_dev, os.statvfs(at)
        except OSError:  # below another mount, or moved meanwhile
            continue
        finally:
            os.close(at)
        if usage.f_blocks and device == f"{os.major(found)}:{os.minor(found)}":
            files = (usage.f_files - usage.f_ffree) * TMPFS_FILE
            used[device] = (usage.f_blocks - usage.f_bfree) * usage.f_frsize + files
    return sum(used.values())


def size(process: psutil.Process) -> int:
    """Raises psutil.Error."""
    if sys.platform == "linux":
        with contextlib.suppress(psutil.AccessDenied):
            return int(process.memory_full_info().pss)
    return int(process.memory_info().rss)
