"""One helper process, from the side of the service: started, called, killed, reaped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from itertools import chain

from .program import ANSWER, CALL

# Bytes per write: a body of 64 MiB must not be copied into the pipe's buffer as a whole.
PIECE = 256 * 1024


class Ended(Exception):
    """The process ended before it had answered. `by` is the signal that ended it; None: it ended by itself."""

    def __init__(self, by: int | None) -> None:
        super().__init__(f"a helper process was ended by {signal.Signals(by).name}" if by else "a helper process ended")
        self.by = by

    @property
    def took_too_long(self) -> bool:
        return self.by == signal.SIGPROF


class Helper:
    """Create it with `start`, and await `end` once."""

    def __init__(self, child: Process) -> None:
        self._child = child

    @staticmethod
    async def start(memory: int) -> Helper:
        """`memory`: its limit in bytes. Raises OSError."""
        boot = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.program import main; main({memory})"
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", boot, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        return Helper(child)

    async def call(self, pickled: bytes, seconds: float) -> bytes:
        """The answer to one call. `seconds` bounds its processor time. Raises `Ended`."""
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pieces = (pickled[at : at + PIECE] for at in range(0, len(pickled), PIECE))
            for piece in chain([CALL.pack(len(pickled), seconds)], pieces):
                if stdin.is_closing():  # it has ended: uvloop raises RuntimeError at a write
                    raise BrokenPipeError
                stdin.write(piece)
                await stdin.drain()
            (size,) = ANSWER.unpack(await stdout.readexactly(ANSWER.size))
            return await stdout.readexactly(size)
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError) as exc:
            code = await self._child.wait()
            raise Ended(-code if code < 0 else None) from exc

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()

    async def end(self) -> None:
        """Kill and reap it."""
        self.kill()
        await self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
