"""The provider's prompt cache as its documentation describes it.

An entry ends at a breakpoint (`cache_control`), and is found from a breakpoint by looking back over a bounded number of
blocks. Limits of time and size are left out.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from .seen import Seen, marked_lines

# Blocks in which an entry is looked for at each breakpoint, the block of the breakpoint among them.
LOOK_BACK = 20


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Bytes of one prompt. `read`: of the longest entry that is found. `written`: up to its last breakpoint."""

    size: int
    read: int
    written: int


class PromptCache:
    """Entries of all requests that were noted, for ever."""

    def __init__(self) -> None:
        self._entries: set[bytes] = set()

    def clear(self) -> None:
        self._entries.clear()

    def use(self, body: dict[str, Any]) -> CacheUse:
        """What this request reads and writes; what it writes is there for the next one."""
        digest = hashlib.sha256()
        size = read = written = 0
        near: deque[tuple[bytes, int]] = deque(maxlen=LOOK_BACK)
        marks: set[bytes] = set()
        for line in marked_lines(body):
            digest.update(line.text)
            size += len(line.text)
            if not line.block:
                continue
            near.append((digest.digest(), size))
            if line.marked:
                written = size
                marks.add(digest.digest())
                read = max([read, *(end for key, end in near if key in self._entries)])
        self._entries |= marks
        return CacheUse(size, read, written)


def share_read(seen: Seen, previous: Seen) -> float:
    """Of what the previous request wrote into the cache, the share that this one reads."""
    cache = PromptCache()
    written = cache.use(previous.body).written
    return cache.use(seen.body).read / written if written else 1.0
