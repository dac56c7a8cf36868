"""What this machine, or the container we are in, gives us."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes of memory: the machine's, or the least that a control group above us allows. None where nobody says."""
    try:
        words = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        total = int(words["MemTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([total, *_limits(proc, cgroups)])


def _limits(proc: Path, cgroups: Path) -> list[int]:
    """The limits of our control group and of those above it, version 2 (`memory.max`) and 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if kinds else (cgroups, "memory.max")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            found += _number(folder / name)
            if folder == root:
                break
    return found


def _number(file: Path) -> list[int]:
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):  # no such group here, or "max"
        return []


def half_of_memory() -> int | None:
    total = memory()
    return None if total is None else total // 2
