"""A thread beside the event loop: it logs what blocks the loop, and ends the process at the deadline of its stop.

The loop beats ten times a second. If a beat is late, the thread notes the stack of the loop's thread; afterwards the
loop logs and counts the delay, with the note. While one call into C holds the interpreter (a large `json.loads`, a
regular expression), the thread is blocked too: then only the delay is known.

The deadline of a stop begins when SIGTERM arrives, even if the loop is blocked then. At the deadline the process ends,
whatever still hangs: threads, connections, a disk. A second later Python's own watchdog (`faulthandler`) would end it,
which does not need the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from .. import logs

log = logs.get(__name__)

# Seconds between two beats, and between two checks of them.
BEAT = 0.1
CHECK = 0.1
# Seconds that a beat may be late: a person notices a longer delay.
LATE = 0.25
# Seconds between two log lines of a loop that is blocked again and again; every time is counted.
LOG_EVERY = 10.0
# Innermost stack frames that a log line names.
FRAMES = 12
# Below this share of processor time the loop was not blocked: the process was paused or got no processor.
PAUSED = 0.1
# Seconds for the last log line: a hanging thread may hold the log's lock.
LAST_LOG = 0.5
# Seconds after the deadline until Python's own watchdog ends the process.
AFTER = 1.0

OnDelay = Callable[[float], None]


class Watchdog:
    """One per process. `leave` ends the process with an exit code; `kill` is called before."""

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self.kill: Callable[[], None] = lambda: None
        logs.load()  # not later, when the loop may be blocked
        self._leave = leave
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._beat: float | None = None  # time of the last beat; None: no loop is watched
        self._used = 0.0  # the process's processor time at the last beat
        self._timer: asyncio.TimerHandle
        self._loop_thread = 0
        self._note = ""  # the stack of the loop's thread during a late beat
        self._deadline: float | None = None
        self._logged = 0.0
        self._unlogged = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, for a process that goes on. `serve` never calls it."""
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    # --- on the event loop

    @contextlib.contextmanager
    def watching(self, on_delay: OnDelay) -> Iterator[None]:
        """Watch the running loop. `on_delay` is called with the seconds of each delay."""
        loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beats(loop, on_delay)
        try:
            yield
        finally:
            self._timer.cancel()
            self._beat = None

    def _beats(self, loop: asyncio.AbstractEventLoop, on_delay: OnDelay) -> None:
        now, used = time.monotonic(), time.process_time()
        if self._beat is not None and (late := now - self._beat - BEAT) > LATE:
            on_delay(late)
            self._log_delay(now, late, used - self._used)
        self._beat, self._used, self._note = now, used, ""
        self._timer = loop.call_later(BEAT, self._beats, loop, on_delay)

    def _log_delay(self, now: float, late: float, used: float) -> None:
        if now - self._logged < LOG_EVERY:
            self._unlogged += 1
            return
        by = self._note
        if not by:
            paused = used < late * PAUSED
            by = "the process was paused, or had no processor" if paused else "a call into C held the interpreter"
        log.warning("event_loop_held", seconds=round(late, 3), by=by, more_since=self._unlogged)
        self._logged, self._unlogged = now, 0

    # --- on its own thread

    def _run(self) -> None:
        while not self._stopped.wait(CHECK):
            now = time.monotonic()
            beat = self._beat
            if beat is not None and now - beat > BEAT + LATE and not self._note:
                self._note = where(sys._current_frames().get(self._loop_thread))
            if self._deadline is not None and now >= self._deadline:
                last_log = threading.Thread(target=self._log_and_kill, daemon=True)
                last_log.start()
                last_log.join(LAST_LOG)
                self._leave(1)
                return

    def _log_and_kill(self) -> None:
        self.kill()
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        own = threading.get_ident(), self._thread.ident
        left = {names.get(ident, str(ident)): where(frame) for ident, frame in frames.items() if ident not in own}
        log.error("stop_forced", threads=left)

    # --- the end

    def end_within(self, seconds: float) -> None:
        """End the process after this time, whatever still runs. Safe in a signal handler; the first call counts."""
        if self._deadline is None:
            with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):  # no stderr to write to
                faulthandler.dump_traceback_later(seconds + AFTER, exit=True)
            self._deadline = time.monotonic() + seconds


@contextlib.contextmanager
def on_signals(do: Callable[[], None], at_once: Callable[[], None]) -> Iterator[None]:
    """On SIGTERM and SIGINT call `at_once` in the signal handler, and `do` on the event loop."""
    loop = asyncio.get_running_loop()

    def arrived(_number: int, _frame: FrameType | None) -> None:
        at_once()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, do)
        signal.signal(number, arrived)  # not the loop's handler, which does nothing: a descriptor wakes the loop
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def where(frame: FrameType | None) -> str:
    """The innermost frames, as `file:line function`, without their variables."""
    frames: list[str] = []
    while frame is not None and len(frames) < FRAMES:
        code = frame.f_code
        frames.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(frames)
