"""What helper processes are asked to do in the tests: each is imported there by its name."""

from __future__ import annotations

import os
import re
import time

from cli_session_proxy.errors import InvalidRequest


def double(number: int) -> int:
    return 2 * number


def pid() -> int:
    return os.getpid()


def prints_then(answer: str) -> str:
    print("no answer of ours")
    os.write(1, b"nor this")
    return answer


def refuse(message: str) -> None:
    raise InvalidRequest(message, param="there")


def spin() -> None:
    while True:
        pass


def backtrack() -> bool:
    """One call into C that never comes back: no Python code runs meanwhile."""
    return re.match("^(a+)+$", "a" * 60 + "!") is not None


def sleep(path: str) -> None:
    """Says that it has begun, and waits without using the processor."""
    with open(path, "x"):
        pass
    time.sleep(3600)


def eat() -> int:
    return len(bytes(64 * 1024**3))


def die() -> None:
    os._exit(3)


def large(size: int) -> bytes:
    return bytes(size)
