"""One line for each failed, repaired or adopted turn, for the person at `serve`'s terminal.

A task of its own prints them on a thread: a terminal that nobody reads blocks neither turns, nor the event loop, nor
the end of the program. The lines have no texts of conversations.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from .. import redact
from ..domain import times
from ..domain.models import Link, Turn
from ..engine.live import Observer
from ..errors import DamagedRow, StoreUnavailable, printable
from ..export import explain, words
from ..export.words import KINDS, count
from ..stores.base import Store

# The most turns whose lines wait. While the terminal is blocked, older ones are only counted.
WAITING = 256

Say = Callable[[str], None]


class RepairLines(Observer):
    """An observer of the engine's turns; `run` prints the lines."""

    def __init__(self, store: Store, say: Say) -> None:
        self._store = store
        self._say = say
        self._waiting: deque[tuple[Turn, tuple[Link, ...]]] = deque()
        self._left_out = 0
        self._something = asyncio.Event()

    def adopted(self, turn: Turn, link: Link) -> None:
        self.turn_ended(turn, (link,))

    def turn_ended(self, turn: Turn, links: Sequence[Link], *_: object) -> None:
        if not any(_sentences(turn, links)):
            return
        if len(self._waiting) == WAITING:
            self._waiting.popleft()
            self._left_out += 1
        self._waiting.append((turn, tuple(links)))
        self._something.set()

    async def run(self) -> None:
        """Print lines until it is cancelled. Raises `OSError` when the terminal is gone."""
        while True:
            await self._something.wait()
            self._something.clear()
            while self._waiting:
                turn, links = self._waiting.popleft()
                try:
                    agent = await self._store.agent_by_key(turn.agent_key)
                except (DamagedRow, StoreUnavailable):
                    agent = None
                name = "(its name cannot be read)" if agent is None else agent.agent_id
                at = times.written(turn.finished_at or turn.created_at)
                lines = [
                    printable(f"{at}  {what:8}  agent {name}, {turn_id}: {sentence}")
                    for turn_id, what, sentence in _sentences(turn, links)
                ]
                if self._left_out:
                    lines.append(
                        f"{count(self._left_out, 'more line')} left out: see `find --repaired`, `find --status failed`"
                    )
                    self._left_out = 0
                await _aside(self._say, lines)


async def _aside(say: Callable[[str], None], lines: list[str]) -> None:
    """Print the lines on a daemon thread: the program's exit would wait for a thread of `to_thread`."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            for line in lines:
                say(line)
        except Exception as exc:  # noqa: BLE001 - raised in the caller
            done.set_exception(exc)
        else:
            done.set_result(None)

    threading.Thread(target=run, daemon=True, name="repair-lines").start()
    await asyncio.wrap_future(done)


def _sentences(turn: Turn, links: Sequence[Link]) -> Iterator[tuple[str, str, str]]:
    """(turn, kind, sentence); an adoption has one for each adopted turn."""
    if turn.status == "failed" and turn.error is not None:
        why = redact.text(explain.why(turn.error))
        yield turn.id, "failed", why
    for one in words.in_brief(turn, links):
        adopted = [link.detail.get("turns") for link in links if link.reason == "adopted"]
        if one.kind == "adopted" and adopted and isinstance(adopted[0], list):
            yield from ((turn_id, KINDS[one.kind], one.says) for turn_id in adopted[0])
        elif one.kind not in ("branch", "note"):
            yield turn.id, KINDS[one.kind], one.says
