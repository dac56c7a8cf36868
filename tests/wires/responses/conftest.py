"""A server, and OpenAI's own client of it: `door` has no CLI behind it, `cli_door` the real CLI 2.1.x."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...serving import serving
from ...talking import running
from ...without_cli import running_without_cli

ANY_KEY = "any-key-will-do-here"


def client_of(url: str, key: str = ANY_KEY, **options: Any) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60)
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http, **options)


class Door:
    """A running server. `url` ends in /v1."""

    def __init__(self, engine: Engine, url: str, settings: Settings) -> None:
        self.engine = engine
        self.url = url
        self.settings = settings
        self.openai = client_of(url)
        self.http = httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=60)

    async def close(self) -> None:
        await self.openai.close()
        await self.http.aclose()


OpenDoor = Callable[..., AbstractAsyncContextManager[Door]]


@asynccontextmanager
async def door_to(engine: Engine, settings: Settings) -> AsyncIterator[Door]:
    async with serving(engine, settings) as url:
        door = Door(engine, url, settings)
        try:
            yield door
        finally:
            await door.close()


@pytest.fixture
def open_door(upstream: Upstream, make_settings: MakeSettings) -> OpenDoor:
    """Start a server without a CLI, with these settings; the same `var` when it is opened again."""

    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[Door]:
        settings = make_settings(**options)
        async with running_without_cli(settings, upstream) as engine, door_to(engine, settings) as door:
            yield door

    return start


@pytest.fixture
async def door(open_door: OpenDoor) -> AsyncIterator[Door]:
    async with open_door() as opened:
        yield opened


@pytest.fixture
async def cli_door(claude_2: Path, make_settings: MakeSettings) -> AsyncIterator[Door]:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine, door_to(engine, settings) as door:
        yield door
