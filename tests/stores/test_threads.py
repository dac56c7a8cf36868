"""The threads that a store's transactions run on."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from functools import partial

import pytest

from cli_session_proxy.stores.sql.database import ThreadPool


@pytest.fixture
async def threads() -> AsyncIterator[ThreadPool]:
    made = ThreadPool(1, "here")
    yield made
    await asyncio.to_thread(made.stop)


async def test_what_is_given_runs_in_its_order_and_beside_the_event_loop(threads: ThreadPool) -> None:
    ran: list[int] = []
    done = [threads.run(partial(ran.append, n)) for n in range(5)]
    assert await asyncio.gather(*done) == [None] * 5
    assert ran == list(range(5))
    assert (await threads.run(threading.current_thread)).name == "here_0"


async def test_what_it_raises_is_raised_where_it_is_waited_for(threads: ThreadPool) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 1) == 1


async def test_what_is_cancelled_in_time_is_not_run_and_what_has_begun_ends(threads: ThreadPool) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        begun.set()
        goes_on.wait()
        ran.append("first")

    one, two = threads.run(first), threads.run(partial(ran.append, "second"))
    await asyncio.to_thread(begun.wait)
    one.cancel()
    two.cancel()
    goes_on.set()
    await threads.run(partial(ran.append, "third"))
    assert ran == ["first", "third"]
    assert one.cancelled()
    assert two.cancelled()


async def test_stopping_waits_for_all_that_was_given() -> None:
    threads = ThreadPool(2, "here")
    goes_on = threading.Event()
    ran: list[int] = []
    threads.run(goes_on.wait)
    for n in range(10):
        threads.run(partial(ran.append, n))
    stopping = asyncio.create_task(asyncio.to_thread(threads.stop))
    goes_on.set()
    await stopping
    assert sorted(ran) == list(range(10))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("here")]


async def test_nothing_of_what_was_run_is_kept(threads: ThreadPool) -> None:
    class Work:
        def __call__(self) -> Work:
            return self

    work = Work()
    kept = weakref.ref(work)
    await threads.run(work)
    del work
    await threads.run(lambda: None)
    await threads.run(lambda: None)
    assert kept() is None


def test_a_loop_that_has_ended_keeps_no_thread() -> None:
    goes_on = threading.Event()

    async def given() -> ThreadPool:
        threads = ThreadPool(1, "here")
        threads.run(goes_on.wait)
        return threads

    threads = asyncio.run(given())
    goes_on.set()
    threads.stop()
