"""One thread at a time parses a transcript of very many values: in memory they take twenty times as many bytes as in
the file. Agents can write such files, and several could ask for more memory than there is.

The place is kept until what was parsed is gone. Whoever has it waits for no file: an agent's program could hold one.
"""

from __future__ import annotations

from threading import Condition, get_ident

from ....errors import SessionBusy

# Values that are parsed without a place: 60,000 of ordinary records take 9 MB. 10,000 ordinary records.
MANY_VALUES = 250_000
# Seconds that a thread waits for its place. Such a transcript usually takes a few.
PATIENCE = 120.0
RETRY_AFTER = 10.0  # seconds


class Place:
    """The place of one thread, until this object is gone. A thread that has one gets more: it never waits for itself.
    Raises `SessionBusy` after `PATIENCE`: such a transcript is not unreadable, and must not be written again."""

    _free = Condition()
    _holder = 0  # a thread's identifier
    _count = 0

    def __init__(self) -> None:
        cls = type(self)
        self._taken = False
        with self._free:
            if not self._free.wait_for(lambda: not cls._count or cls._holder == get_ident(), PATIENCE):
                why = "its transcript is very long, and others like it are being read: send this again"
                raise SessionBusy(why, retry_after=RETRY_AFTER)
            cls._holder, self._taken = get_ident(), True
            cls._count += 1

    def __del__(self) -> None:
        if self._taken:
            with self._free:
                type(self)._count -= 1
                self._free.notify()
