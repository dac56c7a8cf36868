"""What the kernel knows of processes: their CPU time, memory and cores. Linux only (/proc)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
_TICK = os.sysconf("SC_CLK_TCK")
# The number of a process's CPU clock is made of its pid and this kind of clock, as in glibc's clock_getcpuclockid.
_SCHEDULED = 2


@dataclass(frozen=True)
class Cores:
    """Where the load generator with its upstream runs, and where the contenders run."""

    load: frozenset[int]
    contenders: frozenset[int]

    def settle(self) -> None:
        """This process stays on the load's cores; what it starts does too, but for `for_contender`."""
        os.sched_setaffinity(0, self.load)

    @contextlib.contextmanager
    def for_contender(self) -> Iterator[None]:
        """A process started inside runs on the contenders' cores: a child inherits its parent's."""
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.contenders)
        try:
            yield
        finally:
            os.sched_setaffinity(0, mine)


def cores() -> Cores:
    """The load on the first core, so that it does not wander; the contenders wherever the kernel puts them."""
    usable = os.sched_getaffinity(0)
    return Cores(frozenset({min(usable)}), frozenset(usable))


def tree(pids: Iterable[int]) -> list[int]:
    """These processes and all below them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], list(pids)
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def commands(parent: int) -> list[list[str]]:
    """The command lines of a process's own children."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                found.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    return found


def own_cpu_seconds(pid: int) -> float:
    """CPU time of this process alone, to the nanosecond, with threads that have ended. OSError: there is none."""
    return time.clock_gettime(~pid << 3 | _SCHEDULED)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes, to the nanosecond; of their children only those that were reaped, in ticks."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += own_cpu_seconds(pid)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[13]) + int(fields[14])) / _TICK
    return total


def shared_memory_mb(pids: Iterable[int]) -> float:
    """Proportional set size of these processes and all below them, in MB: what is shared is counted once."""
    total = 0
    for pid in tree(pids):
        with contextlib.suppress(OSError):
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
    return total / 1024


def resident_mb(pid: int) -> float:
    """Resident set size of one process, in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KB / 1024


def forget_peak(pid: int) -> None:
    """`peak_mb` counts from here on (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mb(pid: int) -> float:
    """The largest resident set size since `forget_peak`, in MB."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmHWM:")) / 1024


def running(mark: str) -> list[int]:
    """Processes with this text in their environment: a folder of ours names what we started, orphans included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def kill(pids: Iterable[int]) -> int:
    """End what is left of these children of ours. How many there were."""
    count = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count


def about() -> dict[str, str | int]:
    """The machine, as a reader of the numbers needs to know it."""
    models = [row for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory) / 1024 / 1024),
        "load_before": f"{os.getloadavg()[0]:.2f}",
    }
