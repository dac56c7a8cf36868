"""What is written in one turn of the loop leaves as one piece."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from cli_session_proxy.http_door.connection import Corked


class Wire:
    """A transport that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def corked() -> tuple[Wire, Corked]:
    wire = Wire()
    return wire, Corked(cast(Any, wire))


async def test_a_head_and_its_body_are_sent_together_and_at_once() -> None:
    wire, connection = corked()
    connection.write(b"head ")
    connection.write(b"body")
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [b"head body"]
    connection.write(b"more")
    await asyncio.sleep(0)
    assert wire.sent == [b"head body", b"more"]


async def test_what_was_written_is_sent_before_the_end() -> None:
    wire, connection = corked()
    connection.write(b"last words")
    connection.close()
    assert wire.sent == [b"last words"]
    assert connection.is_closing()
    await asyncio.sleep(0)
    assert wire.sent == [b"last words"]
