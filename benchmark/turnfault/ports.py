"""Ports for programs that are told theirs before they listen.

The kernel's own choice (port 0) is no good for these: between its being found and the program's listening, the system
can give the same port to somebody's outgoing connection.
"""

from __future__ import annotations

import atexit
import itertools
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

# Below those that Linux (32768), macOS and Windows (49152) give to outgoing connections.
_FIRST, _LAST, _BLOCK = 20_000, 32_000, 100


@cache
def _own_block() -> Iterator[int]:
    """The ports of a block that no other process has: while this one runs, it listens on the first of them."""
    for first in range(_FIRST, _LAST, _BLOCK):
        with suppress(OSError):
            atexit.register(socket.create_server(("127.0.0.1", first)).close)
            return itertools.cycle(range(first + 1, first + _BLOCK))
    raise OSError(f"every block of {_BLOCK} ports from {_FIRST} to {_LAST} is in use: end programs that hold them")


def free_port() -> int:
    """A port on which nobody listens, and which no other process gets from here.

    Raises OSError where all ports of the range are in use.
    """
    for port in itertools.islice(_own_block(), _BLOCK):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError(f"all {_BLOCK} ports of this process are in use: end programs that hold them")
