"""A deadline that moves with every sign of life."""

from __future__ import annotations

import asyncio

import pytest

from cli_session_proxy.errors import TurnTimeout
from cli_session_proxy.tasks import LimitedByLife

from .until import until


async def test_silence_ends_it() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TurnTimeout, match="nothing came"):
        async with LimitedByLife(loop.time() + 0.01, "nothing came"):
            await asyncio.Event().wait()


async def test_every_sign_of_life_gives_it_new_time() -> None:
    loop = asyncio.get_running_loop()
    async with LimitedByLife(loop.time() + 0.02, "nothing came") as limit:
        first = limit.timer
        limit.move(loop.time() + 3600)
        await until(lambda: limit.timer is not first)  # the first deadline has passed


async def test_a_deadline_that_moves_back_counts_at_once() -> None:
    loop = asyncio.get_running_loop()

    async def moved_back() -> None:
        async with LimitedByLife(loop.time() + 3600, "nothing came") as limit:
            limit.move(loop.time() + 0.01)
            await asyncio.Event().wait()

    with pytest.raises(TurnTimeout):
        await moved_back()


async def test_what_ends_in_time_leaves_no_timer() -> None:
    loop = asyncio.get_running_loop()
    async with LimitedByLife(loop.time() + 3600, "nothing came") as limit:
        pass
    assert limit.timer.cancelled()


async def test_another_timeout_inside_is_not_taken_for_silence() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError) as caught:
        async with LimitedByLife(loop.time() + 3600, "nothing came"):
            raise TimeoutError("a disk")
    assert not isinstance(caught.value, TurnTimeout)
