"""Both event loops that the server runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

SOON = 60.0
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a case from its start to its end, in `SOON` seconds, on a loop of its own."""

    def within(case: Coroutine[Any, Any, None]) -> None:
        request.param(asyncio.wait_for(case, SOON))

    return within
