"""Reads the output of a confined CLI in a thread.

A program inside can write into its CLI's output. While the kernel copies what it writes, it holds a lock on the pipe,
and every reader waits for that, however the pipe is opened. A program can make it last: what it writes can be pages of
a file that is being shortened (15 s for one with 20,000 holes). The event loop must not wait for that.

A program can also pass its CLI's output on to another agent's program, over a socket in a folder that both write. So
the output may not end with its CLI, and a reader that is closed does not wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from threading import Event, Lock, Thread
from typing import IO

from .frames import READ_SIZE


class ThreadReader(asyncio.ReadTransport):
    """Hands what it reads to an asyncio protocol. At most one piece is read that the protocol did not get yet.

    The thread closes the pipe, at its end: a descriptor that is closed while it is read may be another one's by then.
    """

    def __init__(self, pipe: IO[bytes], protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._pipe = pipe
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._go_on = Event()
        self._closed = os.eventfd(0, os.EFD_CLOEXEC)  # readable from then on
        self._closed_lock = Lock()  # its descriptor may be another file's after the thread
        self._paused = self._closing = False
        protocol.connection_made(self)
        try:
            Thread(target=self._read, name=f"output-{pipe.fileno()}", daemon=True).start()
        except BaseException:  # the system has no more threads
            os.close(self._closed)
            raise
        self._go_on.set()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._lose(None)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._go_on.set()

    def _read(self) -> None:
        failed: Exception | None = None
        any_data = select.poll()
        any_data.register(self._pipe, select.POLLIN)
        any_data.register(self._closed, select.POLLIN)
        try:
            while self._go_on.wait() and any_data.poll() and not self._closing and (data := self._pipe.read(READ_SIZE)):
                self._go_on.clear()
                self._loop.call_soon_threadsafe(self._receive, data)
        except (OSError, RuntimeError) as exc:  # a RuntimeError: the loop is closed
            failed = exc
        finally:
            self._pipe.close()
            with self._closed_lock:
                os.close(self._closed)
                self._closed = -1
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lose, failed)

    def _receive(self, data: bytes) -> None:
        if not self._closing:
            try:
                self._protocol.data_received(data)
            except Exception as exc:
                self._lose(exc)
                raise
        if self._closing or not self._paused:
            self._go_on.set()

    def _lose(self, failed: Exception | None) -> None:
        """Once."""
        if not self._closing:
            self._closing = True
            self._go_on.set()
            with self._closed_lock:
                if self._closed >= 0:
                    os.eventfd_write(self._closed, 1)
            self._loop.call_soon(self._protocol.connection_lost, failed)
