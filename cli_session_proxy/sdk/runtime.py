"""One engine per process, on an event loop of its own in a background thread.

LiteLLM calls from any loop and from plain threads, but an engine belongs to one loop. So all work runs here, in async
generators, and callers request one item at a time, without a buffer in between. If a caller stops, is cancelled or is
garbage collected, its generator is closed, which counts as a disconnect from the turn.

The engine is stopped at the interpreter's exit. A host that dies of a signal (as a LiteLLM proxy does: uvicorn ends its
requests, then raises it again) runs no exit hook: then the guardian kills the CLIs.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - registers its exit hook before ours: see `_close_at_exit`
import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError as CallCancelled
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import httpx

from .. import logs
from ..errors import ClaudeUnavailable, ProxyError
from ..machine import check_system
from ..settings import Settings, load

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")
EngineFactory = Callable[[Settings], "Engine"]
Source = Callable[["Runtime"], AsyncGenerator[T, None]]

# Seconds to wait for the stop, beyond `drain_timeout` and the grace periods of the children.
STOP_SLACK = 10.0
# Seconds to wait for the thread's end. A loop whose engine has stopped ends at once.
JOIN_SLACK = 5.0

_END: Final = object()
_CLOSED = "the proxy's engine in this process was closed: make the call again"
_log = logs.get(__name__)


class Runtime:
    """The loop, the engine and the client for a running `serve`; these two are created at their first use."""

    def __init__(self, settings: Settings | None = None, engine_factory: EngineFactory | None = None) -> None:
        self._settings = settings
        self._factory = engine_factory
        self._starting: asyncio.Task[Engine] | None = None
        self._client: httpx.AsyncClient | None = None
        self._stop = asyncio.Event()
        self._state = threading.Lock()
        self._closed = False
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="cli-session-proxy", daemon=True)
        self._thread.start()
        self._loop = self._ready.result()

    # --- for the sources, on the loop -----------------------------------------------------------------------

    async def engine(self) -> Engine:
        """The started engine. Raises `ConfigError`, `StoreUnavailable`; the next call then tries again."""
        if self._stop.is_set():
            raise ClaudeUnavailable(_CLOSED)
        starting = self._starting
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception() is not None)):
            starting = self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(starting)  # the first caller may be cancelled; others still wait

    def client(self) -> httpx.AsyncClient:
        """The HTTP client of all calls with an `api_base`. The callers set the timeouts."""
        if self._client is None:
            # httpx would also send requests to loopback through HTTP_PROXY.
            direct = dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]"))
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(None), mounts=direct)
        return self._client

    # --- for LiteLLM's callers, anywhere --------------------------------------------------------------------

    async def aitems(self, source: Source[T]) -> AsyncGenerator[T, None]:
        """The items of `source`, for a coroutine on any loop."""
        drawn = _Drawn(source(self))
        try:
            while (item := await self._awaited(drawn.next())) is not _END:
                yield item
        finally:
            closing = self._submit(drawn.close())
            if closing is not None:
                # Shielded: a second cancellation (as by anyio's scopes) must not prevent the close.
                await asyncio.shield(asyncio.wrap_future(closing))

    def items(self, source: Source[T]) -> Generator[T, None, None]:
        """The items of `source`, for a plain thread."""
        drawn = _Drawn(source(self))
        try:
            while (item := self._waited(drawn.next())) is not _END:
                yield item
        finally:
            closing = self._submit(drawn.close())
            # A generator may be garbage collected on the loop's own thread, which must not wait for itself.
            if closing is not None and threading.current_thread() is not self._thread:
                closing.result()

    def close(self) -> None:
        """Stop the engine, end its children, end the loop. Bounded and idempotent; open calls fail."""
        with self._state:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._stop_bound() + JOIN_SLACK)
        if self._thread.is_alive():
            _log.error("the engine in this process did not stop in time")

    # --- between the threads --------------------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Run `work` on the loop; None if the loop is closed, which has also closed all generators."""
        with self._state:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        return None

    def _waited(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        if future is None:
            raise ClaudeUnavailable(_CLOSED)
        try:
            return future.result()
        except CallCancelled as exc:
            raise ClaudeUnavailable(_CLOSED) from exc
        except BaseException:
            future.cancel()  # an interrupt (Ctrl-C) while waiting; a no-op once the work has ended
            raise

    async def _awaited(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        if future is None:
            raise ClaudeUnavailable(_CLOSED)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # our caller is cancelled, not the work
            raise ClaudeUnavailable(_CLOSED) from exc

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as exc:  # noqa: BLE001  # a thread cannot raise to its starter: `__init__` or the log gets it
            if self._ready.done():
                _log.exception("the engine in this process could not be stopped cleanly")
            else:
                self._ready.set_exception(exc)

    async def _main(self) -> None:
        """Wait for `close`. After that `asyncio.run` cancels the remaining tasks."""
        self._ready.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        try:
            async with asyncio.timeout(self._stop_bound()):
                engine = None
                with contextlib.suppress(ProxyError):  # else it never started, and its callers got the error
                    engine = await self._starting if self._starting is not None else None
                if engine is not None:
                    await engine.stop()
        finally:
            if self._client is not None:
                await self._client.aclose()

    async def _start(self) -> Engine:
        check_system()
        if self._settings is None:
            self._settings = await asyncio.to_thread(load)
        factory = self._factory
        if factory is None:
            from ..engine.engine import Engine  # noqa: PLC0415  # the store and its libraries: not needed with an `api_base`

            factory = Engine
        engine = factory(self._settings)
        await engine.start()
        return engine

    def _stop_bound(self) -> float:
        settings = self._settings
        return STOP_SLACK + (settings.drain_timeout + 3 * settings.stop_grace if settings else 0.0)


class _Drawn(Generic[T]):
    """Steps an async generator from another thread. It is closed only after a cancelled step has ended."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        self._turnstile = asyncio.Lock()

    async def next(self) -> Any:
        async with self._turnstile:
            return await anext(self._source, _END)

    async def close(self) -> None:
        async with self._turnstile:
            await self._source.aclose()


# --- the one of this process ------------------------------------------------------------------------------


class _Process:
    """The runtime of this process, and its lock."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.guard = threading.Lock()
        self.runtime: Runtime | None = None
        self.closes_at_exit = False


_process = _Process()
if sys.platform != "win32":  # Windows has no fork
    # Threads do not survive a fork: a child starts its own.
    os.register_at_fork(after_in_child=_process.reset)


def current() -> Runtime:
    """The runtime of this process, created at its first use and closed at the interpreter's exit."""
    with _process.guard:
        if _process.runtime is None:
            _process.runtime = Runtime()
        _close_at_exit()
        return _process.runtime


def configure(settings: Settings | None = None, *, engine_factory: EngineFactory | None = None) -> None:
    """Use these settings (None: environment and file) from the next call on. Closes the present runtime."""
    close()
    with _process.guard:
        _process.runtime = Runtime(settings, engine_factory)


def close() -> None:
    """Stop the engine of this process, bounded. A later call starts a new one."""
    with _process.guard:
        runtime, _process.runtime = _process.runtime, None
    if runtime is not None:
        runtime.close()


def _close_at_exit() -> None:
    if _process.closes_at_exit:
        return
    # `threading`'s exit hooks run while threads still work, in reverse order of registration. The hook that shuts the
    # executors down is registered at the import of concurrent.futures.thread. Ours must be registered later, because an
    # engine needs executors to end its children. `atexit` would run after all of these hooks.
    getattr(threading, "_register_atexit", atexit.register)(close)
    _process.closes_at_exit = True
