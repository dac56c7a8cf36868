"""The output of a CLI process: its frames for the present turn, and the tail of its stderr.

Both are read by tasks of their own, whoever listens: a process never waits for a reader that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ....domain.models import JSON
from . import frames
from .child import Child

STDERR_TAIL = 16 * 1024
READ_SIZE = 256 * 1024
INBOX = 256  # frames read ahead of the listener; then the pipe, and so the CLI, waits
DRAIN_WAIT = 1.0  # seconds for the last bytes of a dead process; a stranger may hold its pipes open for ever


class End:
    """In the inbox: nothing follows."""


Inbox = asyncio.Queue[JSON | End | None]  # None: a line that was no frame


class Output:
    """`asked` gets each request of the CLI's, before the listener does; `broken` is called when what it prints is no
    stream of frames any more (see `failure`), `ended` when its stdout is at its end.
    """

    def __init__(
        self,
        child: Child,
        *,
        asked: Callable[[JSON], Awaitable[None]],
        broken: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.started = asyncio.Event()  # it has said its first word, or never will
        self.spoke = False  # it has said a word
        self.ended = False
        self.failure: str | None = None
        self.inbox: Inbox | None = None  # of who listens now
        self._child = child
        self._asked = asked
        self._broken = broken
        self._tell_end = ended
        self._tail = bytearray()
        self.reading = asyncio.create_task(self._read_stdout())
        self._reading_stderr = asyncio.create_task(self._read_stderr())

    @property
    def stderr(self) -> str:
        """The last 16 KB of what it printed there."""
        return self._tail.decode(errors="replace")

    def listen(self) -> Inbox:
        """What it says from now on."""
        self.inbox = Inbox(INBOX)
        return self.inbox

    def leave(self) -> Inbox | None:
        """From now on what it says is dropped; a reader that waits for room is let go."""
        inbox, self.inbox = self.inbox, None
        while inbox is not None and not inbox.empty():
            inbox.get_nowait()
        return inbox

    async def last_words(self) -> None:
        """Wait for the end of its stderr."""
        await asyncio.wait([self._reading_stderr], timeout=DRAIN_WAIT)

    async def drained(self) -> None:
        """Wait for the end of both."""
        await asyncio.wait([self.reading, self._reading_stderr], timeout=DRAIN_WAIT)

    async def close(self) -> None:
        for task in (self.reading, self._reading_stderr):
            task.cancel()
        await asyncio.wait([self.reading, self._reading_stderr])
        self.started.set()

    async def _read_stdout(self) -> None:
        splitter = frames.LineSplitter()
        try:
            while chunk := await self._child.stdout.read(READ_SIZE):
                self.spoke = True
                self.started.set()
                if self.failure is not None:
                    continue  # drained only
                try:
                    for line in splitter.feed(chunk):
                        await self._put(line)
                except frames.Unreadable as exc:
                    self.failure = f"it printed {exc}"
                    self._broken()
        finally:
            self.ended = True
            self.started.set()
            self._tell_end()
            if self.inbox is not None:
                await self.inbox.put(End())

    async def _put(self, line: bytes) -> None:
        frame = frames.parse(line) if line.strip() else None
        if frame is not None and frame.get("type") == "control_request":
            await self._asked(frame)
        if self.inbox is not None and line.strip():
            if self.inbox.full():
                await self.inbox.put(frame)
            else:
                self.inbox.put_nowait(frame)

    async def _read_stderr(self) -> None:
        while chunk := await self._child.stderr.read(READ_SIZE):
            self._tail += chunk
            del self._tail[:-STDERR_TAIL]
