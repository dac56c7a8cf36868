"""The HTTP door on a loopback port, in a task of the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cli_session_proxy.http.server import Server, bind, create_app
from cli_session_proxy.settings import Settings


@asynccontextmanager
async def serving(engine: Any, settings: Settings) -> AsyncIterator[str]:
    """The address of a server over a started engine (`settings.port` 0: any), as `base_url` and `api_base` take it."""
    with contextlib.closing(bind(settings)) as listener:
        server = Server(create_app(engine, settings), settings)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.ready.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await task
