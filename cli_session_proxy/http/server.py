"""The HTTP server: builds the app, starts it and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware

from .. import logs
from ..backends.base import Login
from ..engine.engine import Engine
from ..errors import ConfigError
from ..settings import Settings
from ..stores.auto import store_for
from ..stores.base import MigrationProgress, Store
from ..stores.sql.store import logged
from ..tasks import Tasks
from ..wires.asgi import Exact, Table
from ..wires.base import Wire
from ..wires.registry import WIRES
from .audit import Audit, archives, audit_of, expires
from .binding import bound, served_already
from .bounds import Bounds
from .connection import Connection
from .gate import Gate
from .keys import KEY_FILE, Keys, make_key
from .listening import Listening
from .metrics import TelemetryMetrics, add_metrics
from .openapi import add_openapi
from .origins import Origins
from .repair_lines import RepairLines
from .routes import Routes
from .search import add_search
from .served import Served, announced, place_of
from .systemd import Systemd
from .ui.overview import AskLogin
from .ui.routes import Ui
from .watchdog import Watchdog, on_signals

if TYPE_CHECKING:  # it needs the extra `otel`
    from ..telemetry.exporting import Telemetry

# Seconds; longer than clients keep idle connections (httpx: 5 s, requests and browsers: about 60 s), so that the client
# closes first and no request meets a closing connection.
IDLE_CONNECTION = 75
# Seconds after the drain in which clients get their last bytes. The contract: after SIGTERM the service ends within
# `drain_timeout` and five seconds.
LAST_BYTES = 2
LAST_RESORT = 4.0

Say = Callable[[str], None]
# Lines about what the backend lacks, for the person who starts the server.
Report = Callable[[Settings, Keys], AsyncIterator[str]]
# A service that runs beside the server.
Beside = Callable[[Settings, Store, Say], Awaitable[None]]
# A service that archives chains.
Archive = Callable[[Engine], Coroutine[Any, Any, None]]
log = logs.get(__name__)


async def nobody_asked() -> Login:
    """An unknown login: see `AskLogin`."""
    return Login("unknown", None)


def create_app(
    engine: Engine,
    settings: Settings,
    wires: Sequence[Wire] = WIRES,
    ask: AskLogin = nobody_asked,
    keys: Keys | None = None,
) -> Starlette:
    """The app on a started engine. The caller starts and stops the engine. `keys`: those of the settings."""
    app = Starlette()
    app.router.redirect_slashes = False
    app.state.aside = engine.aside
    table = Table(wires)
    add_openapi(app, table)
    keys = Keys(settings) if keys is None else keys
    add_metrics(app, engine, keys)
    add_search(app, engine)
    Ui(app, engine, keys, ask)
    relay = None
    if (secret := settings.cluster_secret()) is not None:
        from .relay import Relay  # noqa: PLC0415 - its HTTP client takes 60 ms: only for a cluster

        relay = Relay(engine, secret, settings.lease, app.state.metrics.passed_on)
    Routes(app, engine, settings, relay)
    for wire in table.wires:
        wire.routes(app, engine, settings)
    app.state.relay = relay
    origins = Origins(settings.host, settings.allowed_origins, locked=bool(keys))
    # Replaces Starlette's own stack, whose outermost layer answers errors: here the gate does.
    routed = Exact(ExceptionMiddleware(app.router, app.exception_handlers), app.routes)
    bounds = Bounds.of(settings)
    app.middleware_stack = Gate(
        routed, wires=table, origins=origins, keys=keys, bounds=bounds, holds=engine.holds, relay=relay,
        plan=engine.plan.now, audit=audit_of(settings),
    )  # fmt: skip
    return app


async def serve(
    settings: Settings,
    say: Say,
    watchdog: Watchdog,
    progress: MigrationProgress = logged,
    report: Report | None = None,
    beside: Beside | None = None,
    ask: AskLogin = nobody_asked,
) -> None:
    """Listen until SIGTERM or SIGINT, then let running turns end. Raises `ConfigError` before listening.

    `progress` shows the progress of a store's migration. `beside` runs once the server is ready.
    """
    if settings.make_key:
        make_key(settings.var)
    # Read once: their files may change or go before the app is made, and nobody may get in who was not let in here.
    keys = Keys(settings)
    confined = sorted(name for name, profile in settings.profiles.items() if profile.confined)
    if confined and settings.uds is None and not keys:
        raise ConfigError(
            f"profile {confined[0]} is confined, but its agents could ask this proxy for every chain over loopback: "
            "add --make-key (they do not see the key), or --uds PATH"
        )
    audit = audit_of(settings)
    if audit is not None:
        audit.keys(settings.var, keys.secrets)
    archive = _archive(settings, audit)
    with bound(settings, keys) as listener:
        engine = Engine(settings, store_for(settings, progress))
        repairs = RepairLines(engine.store, say)
        engine.observers.append(repairs)
        if audit is not None:
            engine.forgetting.expires = partial(expires, audit)
        telemetry: Telemetry | None = None
        if settings.otel.endpoint is not None:
            from ..telemetry import exporting  # noqa: PLC0415 - the SDK takes 0.2 s: only if configured

            telemetry = exporting.Telemetry(settings)
            engine.observers.append(telemetry)
        try:
            await engine.start()
            logs.configure(settings, quiet=("turn_failed", "event_loop_held"))
            app = create_app(engine, settings, ask=ask, keys=keys)
            if telemetry is not None:
                app.state.metrics.registry.register(TelemetryMetrics(partial(getattr, telemetry, "lost")))
            await _run(app, engine, settings, keys, listener, say, report, repairs, watchdog, beside, archive)
        finally:
            await engine.stop()
            if telemetry is not None:
                await asyncio.to_thread(telemetry.close)
            logs.shut_down()


async def _run(
    app: Starlette,
    engine: Engine,
    settings: Settings,
    keys: Keys,
    listener: socket.socket,
    say: Say,
    report: Report | None,
    repairs: RepairLines,
    watchdog: Watchdog,
    beside: Beside | None,
    archive: Archive | None,
) -> None:
    server = Server(app, settings)
    other_serve = served_already(settings)
    # Start-up objects are permanent, and reference counts free a turn's objects: collecting took 3 % of a turn's time.
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    stop = asyncio.Event()
    watchdog.kill = engine.kill
    start_deadline = partial(watchdog.end_within, settings.drain_timeout + LAST_RESORT)
    with (
        on_signals(stop.set, start_deadline),
        watchdog.watching(app.state.metrics.loop_held),
        announced(settings.var, listener) as app.state.served_secret,
    ):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        greeting = asyncio.create_task(_tell(server, settings, keys, listener, repairs, say, report, other_serve))
        services = Tasks()

        async def run_beside(service: Beside) -> None:
            await server.ready.wait()
            await service(settings, engine.store, say)

        if beside is not None:
            services.serve(run_beside(beside))
        if archive is not None:
            services.serve(archive(engine))
        systemd = Systemd.of(os.environ)
        systemd_task = asyncio.create_task(systemd.live(server.ready))
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            systemd.tell(STOPPING="1", STATUS="running turns end")
            # Concurrently: the server accepts no more connections, and the engine ends the turns of open ones.
            server.should_exit = True
            stopping.cancel()
            await asyncio.gather(engine.stop(), services.stop())
            greeting.cancel()
            await asyncio.gather(stopping, greeting, return_exceptions=True)
            await serving
            if app.state.relay is not None:
                await app.state.relay.close()
            systemd_task.cancel()
            await asyncio.gather(systemd_task, return_exceptions=True)


def _archive(settings: Settings, audit: Audit | None) -> Archive | None:
    """The service that archives chains once an hour; None if it is not configured. Raises `ConfigError`."""
    if settings.archive_after_days is None or settings.archive_to is None:
        return None
    from ..archive import archiving, places, sealed  # noqa: PLC0415 - boto3 takes 0.2 s

    place, key = places.place_at(settings.archive_to), sealed.ArchiveKey.of(settings)
    note = None if audit is None else partial(archives, audit, "serve")
    return partial(archiving.serve, days=settings.archive_after_days, place=place, key=key, before_delete=note)


async def _tell(
    server: Server,
    settings: Settings,
    keys: Keys,
    listener: socket.socket,
    repairs: RepairLines,
    say: Say,
    report: Report | None,
    other_serve: str | None,
) -> None:
    await server.ready.wait()
    try:
        for line in banner(place_of(listener), needs_key=bool(keys.owners)):
            say(line)
        if other_serve is not None:
            say(f"{other_serve}: the two share its agents, and commands ask the newer one")
        if report is not None:
            async for line in report(settings, keys):
                say(line)
        for line in notices(settings, keys):
            say(line)
        await repairs.run()
    except OSError as exc:  # the terminal is gone; the server goes on
        log.warning("nothing_more_is_said", error=str(exc))


class Server(Listening):
    """Keeps idle connections open, and drains as long as the engine."""

    def __init__(self, app: Starlette, settings: Settings) -> None:
        patience = settings.drain_timeout + LAST_BYTES
        super().__init__(
            uvicorn.Config(
                app, loop="none", http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, proxy_headers=False, timeout_keep_alive=IDLE_CONNECTION,
                timeout_graceful_shutdown=int(patience), ws_max_size=settings.max_body, ws_per_message_deflate=False,
            )
        )  # fmt: skip

    def has_room(self, accepted: int = 0) -> bool:
        return Connection.has_room(self.server_state.connections, accepted)


def banner(place: Served, *, needs_key: bool) -> Iterator[str]:
    """The address, the page, and a command to paste. `prerequisites.report` adds what the CLI lacks."""
    key = " -H 'Authorization: Bearer YOUR-KEY'" if needs_key else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'
    over = ""
    if place.uds is None:
        yield f"listening on {place.url}  (OpenAI clients: base_url={place.url}/v1)"
        yield f"page: {place.url}/ui"
    else:
        yield f"listening on {place}"
        over = f"--unix-socket {place.uds} "
    yield f"try: curl -s {over}{place.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def notices(settings: Settings, keys: Keys) -> Iterator[str]:
    """Warnings about the settings, for the person who starts the server. Reads no credential, only names."""
    if not keys and settings.uds is None:
        yield (
            "no key: every user and every program of this machine can use this proxy and read its chains; start it "
            "with --make-key to ask for a key, or with --uds PATH to be alone"
        )
    elif (made := settings.var / KEY_FILE).exists():
        yield f"the key is in {made}: send it as Authorization: Bearer; our own commands use it by themselves"
    if any(network.is_loopback for network in settings.trusted_header_from):
        yield (
            f"trusted_header_from names loopback: every user and every program of this machine can be any owner by "
            f"sending {settings.trusted_header}; name other addresses where the gateway runs elsewhere"
        )
    if (hours := settings.forget_unnamed) != "never":
        after = f"{hours / 24:g} days" if hours >= 48 else f"{hours:g} hours"
        yield (
            "one-shots (unnamed agents of a single turn that nobody continues) are forgotten after "
            f"{after}; the setting forget_unnamed changes that"
        )
    memories = {one.git_memory.repo.resolve() for one in settings.profiles.values() if one.git_memory is not None}
    ours = os.stat(uvicorn.__file__)
    for name, profile in sorted(settings.profiles.items()):
        added_dirs = [folder.resolve() for folder in profile.add_dirs]
        for memory, added in ((one, at) for one in sorted(memories) for at in added_dirs if one.is_relative_to(at)):
            yield (
                f"profile {name}: its agents write {added}, and with it the git memory {memory}: what they put there "
                "is told to later attempts; name a folder beside it in add_dirs, or another repository"
            )
        for at, what in sorted(settings.named_programs().items()) if profile.confined else ():
            if at.is_dir() and any(at.resolve().is_relative_to(folder) for folder in added_dirs):
                yield (
                    f"profile {name}: its agents write {at}, which {what} names: programs from there have no boundary"
                )
        # uv and pnpm link a package's files from their cache, all or none: written in place, they change everywhere.
        for folder in added_dirs if profile.confined and ours.st_nlink > 1 else ():
            with contextlib.suppress(OSError):  # it is not there yet, or this user may not look
                if folder.stat().st_dev == ours.st_dev:
                    yield (
                        f"profile {name}: this program's packages are hard links, as uv makes them. Its agents write "
                        f"{folder}, and could change this program by a link to the same file there: install it with "
                        "UV_LINK_MODE=copy"
                    )
        if profile.tools and not profile.confined:
            yield (
                f"profile {name}: the CLI's tools run with all of your rights; an agent's sandbox is a directory, "
                "not a boundary (confined = true makes one, with bubblewrap)"
            )
