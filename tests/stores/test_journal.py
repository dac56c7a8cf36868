"""What is in the file reaches the disk, and what was submitted ends: also where something fails, or all is closed."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest
from sqlalchemy import Connection

from cli_session_proxy.errors import InvalidRequest, StoreUnavailable
from cli_session_proxy.stores.sql.database import Urgency
from cli_session_proxy.stores.sqlite import database as sqlite

from ..talking import events
from .words import Words, say

PATIENCE = 60


class Disk:
    """Counts how often the journal is taken to the disk by itself; `fails` says that it cannot be, and it takes as long
    as it is not `free`."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self.fails = False
        self.free = threading.Event()
        self.free.set()
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def sync(self, file: str) -> None:
        self._loop.call_soon_threadsafe(self.asked.set)
        if self.fails:
            raise OSError("no such disk")
        assert self.free.wait(PATIENCE)
        self.synced.append(file)

    async def was_asked(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.asked.wait()
        self.asked.clear()


@pytest.fixture
async def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(sqlite, "sync", disk.sync)
    return disk


def _nothing(_conn: Connection) -> None:
    pass


def _unknown(_conn: Connection) -> None:
    raise InvalidRequest("there is no such row")


@pytest.mark.parametrize("work", [_nothing, _unknown], ids=["changes nothing", "fails"])
@pytest.mark.parametrize("urgency", [Urgency.DURABLE, Urgency.LATER])
async def test_a_write_that_leaves_nothing_takes_no_journal_with_it(
    words: Words, disk: Disk, work: Callable[[Connection], None], urgency: Urgency
) -> None:
    await words.note("begun")
    await asyncio.gather(words.db.write(work, urgency), return_exceptions=True)
    await disk.was_asked()


async def test_a_journal_that_the_disk_refused_is_tried_again_with_what_is_asked_for_next(
    words: Words, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fails = True
    await words.note("begun")
    await disk.was_asked()
    await words.db.write(_nothing, Urgency.LATER)  # its answer comes after the failure was noted
    assert "store_not_synced" in [entry["event"] for entry in events(caplog)]
    await disk.was_asked()
    disk.fails = False
    await words.db.close()
    assert disk.synced == [f"{words.path}-wal"]


async def test_a_durable_write_on_the_loop_is_acknowledged_when_it_is_on_the_disk(words: Words, disk: Disk) -> None:
    """What comes while the disk is waited for is written at once, and waits for the disk's next turn."""
    disk.free.clear()
    first = asyncio.ensure_future(words.quickly(lambda conn: say(conn, "a"), Urgency.DURABLE))
    await disk.was_asked()
    assert await words.note("b") == "b"
    second = asyncio.ensure_future(words.quickly(lambda conn: say(conn, "c"), Urgency.DURABLE))
    later = asyncio.ensure_future(words.write("d", Urgency.LATER))
    assert await later == "d"  # a moment behind the second
    assert await words.read() == {"a", "b", "c", "d"}
    assert not first.done()
    assert not second.done()
    disk.free.set()
    assert [await first, await second] == ["a", "c"]
    assert len(disk.synced) == 2


async def test_a_durable_write_that_the_disk_refuses_is_told_to_its_caller(words: Words, disk: Disk) -> None:
    disk.fails = True
    with pytest.raises(StoreUnavailable, match="no such disk"):
        await words.quickly(lambda conn: say(conn, "a"), Urgency.DURABLE)
    disk.fails = False
    assert await words.quickly(lambda conn: say(conn, "b"), Urgency.DURABLE) == "b"
    assert len(disk.synced) == 1


@pytest.mark.parametrize("tells", ["the journal", "a commit"])
async def test_what_is_written_behind_a_part_that_the_disk_refused_outlives_a_power_cut(
    words: Words, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: str
) -> None:
    """A disk that promises more than it has, such as a thin one, refuses what was written already, and says so once.
    Then an acknowledged turn was lost with the part before it."""
    journal, after = Path(f"{words.path}-wal"), tmp_path / "after.sqlite3"
    await words.quickly(partial(say, word="a"), Urgency.DURABLE)
    start = _size(journal)
    if tells == "a commit":
        await words.note("b")
        with monkeypatch.context() as patch:
            patch.setattr(sqlite, "transaction", _not_on_the_disk)
            with pytest.raises(StoreUnavailable, match="disk I/O error"):
                await words.write("x")
    else:
        disk.fails = True
        with pytest.raises(StoreUnavailable, match="no such disk"):
            await words.quickly(partial(say, word="b"), Urgency.DURABLE)
        disk.fails = False
    end, written = _size(journal), []
    copyfileobj = shutil.copyfileobj

    def copied(kept: BinaryIO, again: BinaryIO) -> None:
        copyfileobj(kept, again)
        written.append(again.name)

    monkeypatch.setattr(shutil, "copyfileobj", copied)
    assert await words.quickly(partial(say, word="c"), Urgency.DURABLE) == "c"
    _cut_power(words.path, after, slice(start, end) if str(journal) not in written else slice(0))
    assert await asyncio.to_thread(_words_in, after) >= {"a", "c"}


async def test_who_reads_does_not_hold_up_the_writes_behind_a_part_that_the_disk_refused(
    words: Words, disk: Disk
) -> None:
    """Each was refused for as long as another program read."""
    await words.quickly(partial(say, word="a"), Urgency.DURABLE)
    with closing(sqlite3.connect(words.path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM said").fetchall()
        disk.fails = True
        for word in ("b", "c"):
            with pytest.raises(StoreUnavailable, match="no such disk"):
                await words.quickly(partial(say, word=word), Urgency.DURABLE)
        disk.fails = False
        assert await words.quickly(partial(say, word="d"), Urgency.DURABLE) == "d"
        assert await words.write("e") == "e"


def _cut_power(path: Path, after: Path, refused: slice) -> None:
    """Copy what is on the disk: not what was refused, unless it was written again."""
    journal = bytearray(_read(Path(f"{path}-wal")))
    journal[refused] = bytes(len(journal[refused]))
    Path(f"{after}-wal").write_bytes(journal)
    after.write_bytes(_read(path))


def _not_on_the_disk(*_: object) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    raise error


async def test_writes_on_the_loop_alone_do_not_let_the_log_grow(words: Words) -> None:
    sizes = []
    for number in range(10 * sqlite.CHECKPOINT):
        await words.quickly(partial(say, word=str(number)), Urgency.DURABLE)
        sizes.append(_size(Path(f"{words.path}-wal")))
    assert max(sizes) < 3 * sizes[sqlite.CHECKPOINT]


async def test_a_delayed_write_that_fails_leaves_the_others_as_they_are(words: Words) -> None:
    writes = [asyncio.ensure_future(words.write(word, Urgency.LATER)) for word in ("a", "never", "a", "b")]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(result) for result in results] == [str, InvalidRequest, StoreUnavailable, str]
    assert await words.read() == {"a", "b"}


async def test_a_closed_file_that_another_proxy_holds_open_is_on_the_disk(words: Words, disk: Disk) -> None:
    with closing(sqlite3.connect(words.path)) as other:
        other.execute("SELECT * FROM said").fetchall()
        await words.write("begun", Urgency.JOURNAL)
        await words.db.close()
        assert disk.synced == [f"{words.path}-wal"]


@pytest.mark.parametrize("urgency", list(Urgency))
async def test_what_comes_while_it_closes_is_refused_and_what_was_there_is_written(
    words: Words, urgency: Urgency
) -> None:
    with closing(sqlite3.connect(words.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        running = asyncio.ensure_future(words.write("running"))
        later = asyncio.ensure_future(words.write("later", Urgency.LATER))
        await words.read()
        closed = asyncio.ensure_future(words.db.close())
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            for call in (
                words.write("late", urgency),
                words.note("late"),
                words.read(),
                words.db.read(_nothing, quick=True),
            ):
                with pytest.raises(StoreUnavailable, match="closed"):
                    await call
        other.execute("ROLLBACK")
    await closed
    assert (await running, await later) == ("running", "later")
    assert await asyncio.to_thread(_words_in, words.path) == {"running", "later"}


async def test_a_close_that_was_left_is_waited_for_by_the_next(words: Words) -> None:
    with closing(sqlite3.connect(words.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        running = asyncio.ensure_future(words.write("running"))
        await words.read()
        left = asyncio.ensure_future(words.db.close())
        await asyncio.sleep(0)
        left.cancel()
        second = asyncio.ensure_future(words.db.close())
        await asyncio.wait([left])
        assert not second.done()
        other.execute("ROLLBACK")
    await second
    assert await running == "running"
    assert words.db._engines == []


async def test_what_is_put_off_is_done_in_a_file_that_was_closed_once(words: Words) -> None:
    await words.note("a")  # its timer has not run yet
    closed = asyncio.ensure_future(words.db.close())
    await asyncio.sleep(0)
    await words.db.open(_nothing)  # it is not yet closed
    await closed
    async with asyncio.timeout(PATIENCE):
        assert await words.write("b", Urgency.LATER) == "b"
    assert await words.read() == {"a", "b"}


def _breaks_at_the_end(conn: Connection) -> str:
    """The transaction is refused at its commit, and is still open then."""
    conn.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
    conn.exec_driver_sql("INSERT INTO echo VALUES ('never said')")
    return "broken"


async def test_a_commit_that_is_refused_is_told_to_its_own_caller_alone(words: Words) -> None:
    await words.db.write(
        lambda conn: conn.exec_driver_sql("CREATE TABLE echo (word REFERENCES said (word))").close(), alone=True
    )
    results = await words.together(
        lambda: words.write("a"), lambda: words.db.write(_breaks_at_the_end), lambda: words.write("b")
    )
    assert [type(result) for result in results] == [str, StoreUnavailable, str]
    with pytest.raises(StoreUnavailable):
        await words.quickly(_breaks_at_the_end)
    assert await words.note("c") == "c"
    assert await words.read() == {"first", "a", "b", "c"}


async def test_who_waits_behind_a_write_is_told_what_held_that_up(tmp_path: Path) -> None:
    words = Words(tmp_path / "words.sqlite3", busy_timeout=0.1)
    await words.open()
    with closing(sqlite3.connect(words.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writes = [words.write("a"), words.note("b"), words.write("c")]
        results = await asyncio.gather(*writes, return_exceptions=True)
    for result in results:
        assert isinstance(result, StoreUnavailable)
        assert "locked by another program" in result.message
    await words.db.close()


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _size(path: Path) -> int:
    return path.stat().st_size


def _words_in(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as file:
        return {word for (word,) in file.execute("SELECT word FROM said")}
