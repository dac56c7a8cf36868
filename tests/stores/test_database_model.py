"""Whatever is asked of the database, in whatever order: it is what a list of words would be."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import Connection

from cli_session_proxy.errors import InvalidRequest, StoreUnavailable
from cli_session_proxy.stores.sql.database import Urgency
from cli_session_proxy.stores.sqlite.database import SqliteDatabase

T = TypeVar("T")

# Bounds a hang, however busy the machine is; the holder's lock is waited for as long.
PATIENCE = 300


def _prepare(conn: Connection) -> None:
    conn.exec_driver_sql("CREATE TABLE IF NOT EXISTS said (n INTEGER PRIMARY KEY AUTOINCREMENT, word INT UNIQUE)")


def _said(conn: Connection) -> list[int]:
    return list(conn.exec_driver_sql("SELECT word FROM said ORDER BY n").scalars())


class Asked:
    """A write on its way. `ends`: what becomes of it, unless its caller leaves."""

    def __init__(self, word: int, ends: str, urgency: Urgency, *, quick: bool) -> None:
        self.word, self.ends, self.urgency, self.quick = word, ends, urgency, quick
        self.left = False
        self.task: asyncio.Task[int]

    def work(self, conn: Connection) -> int:
        conn.exec_driver_sql("INSERT INTO said (word) VALUES (?)", (self.word,))
        if self.ends == "is refused":
            raise InvalidRequest("not this word")
        if self.ends == "breaks":
            conn.exec_driver_sql("INSERT INTO said (word) VALUES (?)", (self.word,))
        return self.word


class OneDatabase(RuleBasedStateMachine):
    """Two databases on one file, and a program that holds its lock now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "words.sqlite3"
        self.dbs = [SqliteDatabase(self.path, busy_timeout=float(PATIENCE)) for _ in range(2)]
        for db in self.dbs:
            self.run(db.open(_prepare))
        self.holder = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self.held = False
        self.asked: list[list[Asked]] = [[], []]  # of each database, in the order in which it was asked
        self.stored: set[int] = set()
        self.next = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    @rule(
        at=st.integers(0, 1),
        ends=st.sampled_from(["is kept"] * 3 + ["is refused", "breaks"]),
        urgency=st.sampled_from(Urgency),
        quick=st.booleans(),
    )
    def ask(self, at: int, ends: str, urgency: Urgency, *, quick: bool) -> None:
        self.next += 1
        asked = Asked(self.next, ends, urgency, quick=quick and urgency is not Urgency.LATER)
        db = self.dbs[at]
        write = db.write(asked.work, asked.urgency, quick=asked.quick)
        asked.task = self.loop.create_task(write)
        self.run(asyncio.sleep(0))  # it has asked
        self.asked[at].append(asked)

    @precondition(lambda self: not self.held)
    @rule()
    def hold(self) -> None:
        self.everything_ends()
        self.holder.execute("BEGIN IMMEDIATE")
        self.held = True

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        self.holder.execute("ROLLBACK")
        self.held = False

    @rule(at=st.integers(0, 1), which=st.integers(0, 5))
    def leave(self, at: int, which: int) -> None:
        waiting = [asked for asked in self.asked[at] if not asked.task.done()]
        if which < len(waiting):
            waiting[which].left = True
            waiting[which].task.cancel()

    @precondition(lambda self: not self.held)
    @rule()
    def everything_ends(self) -> None:
        tasks = [asked.task for line in self.asked for asked in line]
        if tasks:
            self.run(_gathered(tasks))
        for db in self.dbs:  # a write whose caller has left may still be under way: this one comes after it
            self.run(db.write(_nothing))
        self._judge()
        self.asked = [[], []]

    @precondition(lambda self: not self.held)
    @rule(at=st.integers(0, 1))
    def reopen(self, at: int) -> None:
        """Closing ends what was asked for, and the file can be opened again."""
        self.run(self.dbs[at].close())
        self.run(asyncio.sleep(0))  # the callers hear of it
        assert all(asked.task.done() for asked in self.asked[at])
        self.run(self.dbs[at].open(_prepare))
        self.everything_ends()

    @invariant()
    def what_was_acknowledged_is_seen_by_every_read(self) -> None:
        done = {a.word for line in self.asked for a in line if a.task.done() and not a.task.cancelled() and _kept(a)}
        for db in self.dbs:
            assert done <= set(self.run(db.read(_said, quick=True)))
            assert done <= set(self.run(db.read(_said)))

    def _judge(self) -> None:
        """All have ended: each got what is its own, in order, and only that is there."""
        found = self.run(self.dbs[0].read(_said))
        assert len(found) == len(set(found))
        expected = set(self.stored)
        unsure = set()
        for line in self.asked:
            for asked in line:
                if asked.left:
                    unsure |= {asked.word} if asked.ends == "is kept" else set()
                elif asked.ends == "is kept":
                    assert asked.task.result() == asked.word
                    expected.add(asked.word)
                else:
                    wanted = InvalidRequest if asked.ends == "is refused" else StoreUnavailable
                    assert type(asked.task.exception()) is wanted
            self._in_order(line, found)
        assert expected <= set(found) <= expected | unsure
        self.stored = set(found)

    def _in_order(self, line: list[Asked], found: list[int]) -> None:
        """Nothing goes ahead of what was asked for before it; but what is put off is done after a quick one."""
        place = {word: n for n, word in enumerate(found)}
        there = [asked for asked in line if asked.word in place]
        for n, first in enumerate(there):
            for second in there[n + 1 :]:
                if not (first.urgency is Urgency.LATER and second.quick):
                    assert place[first.word] < place[second.word]

    def teardown(self) -> None:
        if self.held:
            self.let_go()
        self.everything_ends()
        for db in self.dbs:
            self.run(db.close())
        assert not any(db._waiting or db._delayed or db._timer or db._awaiting_sync for db in self.dbs)
        self.holder.close()
        with closing(sqlite3.connect(self.path)) as file:
            assert {word for (word,) in file.execute("SELECT word FROM said")} == self.stored
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()


def _nothing(conn: Connection) -> None:
    """A write that changes nothing."""


def _kept(asked: Asked) -> bool:
    return asked.task.exception() is None


async def _gathered(tasks: list[asyncio.Task[int]]) -> None:
    await asyncio.wait(tasks)


TestOneDatabase = OneDatabase.TestCase
TestOneDatabase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
