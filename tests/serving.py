"""The HTTP door on a loopback port: in a task of the test, or a real `serve` in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cli_session_proxy.cli import main
from cli_session_proxy.engine import readiness
from cli_session_proxy.http import relay
from cli_session_proxy.http import server as http_server
from cli_session_proxy.http.binding import bind
from cli_session_proxy.http.server import Server, create_app
from cli_session_proxy.selfcheck import running
from cli_session_proxy.settings import Settings
from cli_session_proxy.wires import answers
from cli_session_proxy.wires.base import Wire
from cli_session_proxy.wires.registry import WIRES

from .forked import Forked, forked

# Seconds in which a process of ours starts, or ends.
START = 120.0
# Seconds for a self-check, which runs at a low priority beside all else.
CHECK = 200.0


@asynccontextmanager
async def server_of(app: Any, settings: Settings, listener: socket.socket) -> AsyncIterator[Server]:
    """A server of this app in a task of the test."""
    server = Server(app, settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.ready.wait()
    try:
        yield server
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def serving(engine: Any, settings: Settings, wires: Sequence[Wire] = WIRES) -> AsyncIterator[str]:
    """The address of a server over a started engine (`settings.port` 0: any), as `base_url` and `api_base` take it."""
    with contextlib.closing(bind(settings)) as listener:
        app = create_app(engine, settings, wires)
        try:
            async with server_of(app, settings, listener):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            if app.state.relay is not None:
                await app.state.relay.close()


@asynccontextmanager
async def started(engine: Any, settings: Settings) -> AsyncIterator[str]:
    """An engine that runs for as long as its server: the address."""
    await engine.start()
    try:
        async with serving(engine, settings) as url:
            yield url
    finally:
        await engine.stop()


def unhurried() -> None:
    """`cli-session-proxy` that gives up no self-check, no other host, nor its own end before a loaded machine is done
    with it, and begins no stream before the headers say what the turn did."""
    answers.FIRST_SIGN = START
    readiness.PATIENCE = relay.PROBE_TIMEOUT = 5.0  # some tests wait for its end
    running.SECONDS = CHECK
    http_server.LAST_BYTES, http_server.LAST_RESORT = int(START), 2 * START
    main()


@asynccontextmanager
async def serve(
    settings: Settings, cwd: Path, program: Callable[[], None] = unhurried
) -> AsyncIterator[tuple[str, Forked]]:
    """`cli-session-proxy serve` in the built-up environment of the test, and its address. SIGTERM at the end."""
    named = {
        "port": settings.port, "var": settings.var, "claude_bin": settings.claude_bin,
        "claude_config_dir": settings.claude_config_dir, "claude_env": json.dumps(settings.claude_env),
        "drain_timeout": settings.drain_timeout, "turn_timeout": settings.turn_timeout, "lease": settings.lease,
        "spares": settings.spares, "keepalive": settings.keepalive, "self_check": settings.self_check,
        "backend": settings.backend,
    }  # fmt: skip
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    if settings.store is not None:
        named["store"] = settings.store.get_secret_value()
    if settings.otel.endpoint is not None:
        named["otel__endpoint"] = settings.otel.endpoint
    if settings.advertise is not None and settings.cluster_key is not None:
        named |= {"advertise": settings.advertise, "cluster_key": settings.cluster_key.get_secret_value()}
    env |= {f"CLI_SESSION_PROXY_{name.upper()}": str(value) for name, value in named.items()}
    process = await forked(program, "serve", env=env, cwd=cwd, stderr=True)
    try:
        async with asyncio.timeout(START):
            while b"listening on" not in (line := await process.stdout.readline()):
                assert line, "serve ended before it listened"
        yield line.decode().split("listening on ")[1].split()[0], process
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START):
            await process.stdout.read()
            await process.wait()
        process.close()
