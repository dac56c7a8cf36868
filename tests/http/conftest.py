"""Both event loops that the server runs on, and hosts that are there however slow the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from cli_session_proxy.engine import readiness
from cli_session_proxy.http import relay
from cli_session_proxy.stores import redis

from .cluster import opened

SOON = 60.0
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(autouse=True)
def patient_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn runs where its client asked if the other host does not answer a probe within a second, or its store does
    not within two. A registry that does not answer within a quarter of one is not asked."""
    monkeypatch.setattr(redis, "PATIENCE", 5.0)
    monkeypatch.setattr(readiness, "PATIENCE", 5.0)
    monkeypatch.setattr(relay, "PROBE_TIMEOUT", 5.0)  # some tests wait for its end


@pytest.fixture(autouse=True)
def no_socket_is_left() -> Iterator[None]:
    """A test that fails leaves none to the tests after it, which would fail by its warning."""
    yield
    opened.close()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a case from its start to its end, in `SOON` seconds, on a loop of its own."""

    def within(case: Coroutine[Any, Any, None]) -> None:
        request.param(asyncio.wait_for(case, SOON))

    return within
