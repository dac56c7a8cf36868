"""A scripted Messages API, on a loopback port where nothing else is said, for the tests, the benchmarks and `demo`.

    async with Upstream() as upstream:
        ... ANTHROPIC_BASE_URL=upstream.url ...
        assert upstream.requests[-1].user_texts() == ["one", "two"]

It speaks POST /v1/messages (streamed or not) and /v1/messages/count_tokens; any other route is a 404, kept in
`others`. Its answers come from nothing but the request they belong to (see `script`). The one thing it remembers
is which prefixes it was sent, for the cache figures of `usage`, as the provider does. What the real API refuses, it
refuses (see `rules`).

By hand: `python -m turnfault.provider.upstream --port 8999`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from .exchange import GoneError, Receive, ScriptedRequest, Send, before, stream
from .prompt_cache import PromptCache
from .rules import BYTES_PER_TOKEN, Rules, refusal, sealed
from .script import Answer, Behaviour, Block, Cut, ErrorEvent, Fail, Reply, Rule, scripted_answer
from .seen import Seen
from .serving import Serving

Scope = dict[str, Any]
T = TypeVar("T")

STOP_TIMEOUT = 5.0  # seconds for the thread to start, answer and end


class Upstream:
    """The server. `requests` are the calls of the model in order of arrival, `others` everything else.

    `answer` is the model: (role, text) pairs to a text. `behave` chooses the behaviour of every request that no rule
    and nothing queued is for. At most `keep` requests are kept, the newest. `rules` may be replaced at any time; None:
    every request is taken. `refused` are those that the rules turned down, with the reason. `secret`: a folder that
    every path begins with; who does not know it gets a 404, and is not kept.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        answer: Answer = scripted_answer,
        behave: Callable[[Seen], Behaviour] | None = None,
        keep: int = 5000,
        rules: Rules | None = Rules(),  # noqa: B008 - it cannot be changed
        secret: str = "",
    ) -> None:
        self.host = host
        self.port = port
        self.answer = answer
        self.rules = rules
        self._below = f"/{secret}" if secret else ""
        self.refused: deque[tuple[Seen, str]] = deque(maxlen=keep)
        self.behave = behave
        self._seen: deque[Seen] = deque(maxlen=keep)
        self._others: deque[Seen] = deque(maxlen=keep)
        self._rules: list[Rule] = []
        self._queue: deque[Behaviour] = deque()
        self._cache = PromptCache()
        self._arrival = asyncio.Condition()
        self._closing = asyncio.Event()
        self._failures: list[Exception] = []
        self._serving: Serving | None = None

    # --- for the test ---------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}{self._below}"

    @property
    def requests(self) -> list[Seen]:
        return list(self._seen)

    @property
    def others(self) -> list[Seen]:
        return list(self._others)

    def next(self, *behaviours: Behaviour) -> None:
        """The next requests get these, one each, in order. (A retry of the CLI is a request too.)"""
        self._queue.extend(behaviours)

    def when(self, substring: str, behaviour: Behaviour, *, times: int | None = 1) -> None:
        """The next `times` requests (None: all) whose newest user text holds `substring`; goes before `next`."""
        self._rules.append(Rule(substring, behaviour, times))

    async def arrived(self, count: int = 1, *, text: str | None = None, timeout: float = 30.0) -> Seen:
        """Wait until `count` requests (of those whose newest user text holds `text`) are there; the count-th."""

        def matching() -> list[Seen]:
            return [seen for seen in self._seen if text is None or text in seen.prompt]

        async with asyncio.timeout(timeout), self._arrival:
            await self._arrival.wait_for(lambda: len(matching()) >= count)
            return matching()[count - 1]

    def forget(self, keep: int = 0) -> None:
        """Forget all requests but the newest `keep`: in a long run they are many megabytes."""
        while len(self._seen) > keep:
            self._seen.popleft()

    def heal(self) -> None:
        """Forget the behaviours that still wait: every answer is an ordinary one from now on."""
        self._rules.clear()
        self._queue.clear()

    def clear(self) -> None:
        """Forget the requests, the behaviours and the cache; not those being answered."""
        for kept in (self._seen, self._others, self._rules, self._queue, self._cache, self.refused):
            kept.clear()

    async def __aenter__(self) -> Self:
        listener = socket.create_server((self.host, self.port))
        self.port = listener.getsockname()[1]
        self._serving = await Serving.on(listener, self._app)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._serving is not None
        self._closing.set()
        await self._serving.stop()
        if self._failures:
            raise self._failures[0]

    # --- the server -----------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = ScriptedRequest(receive, send, self._closing)
        if not scope["path"].startswith(f"{self._below}/"):
            with contextlib.suppress(GoneError):
                async with exchange:
                    await exchange.json(404, Fail(404, message="no such route").error)
            return
        path = scope["path"].removeprefix(self._below)
        raw = await _body(receive)
        try:
            body = json.loads(raw)
        except ValueError:
            body = {}
        query = scope["query_string"].decode("latin-1")
        seen = Seen(
            method=scope["method"],
            path=path + (f"?{query}" if query else ""),
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
            raw=raw,
            body=body if isinstance(body, dict) else {},
        )
        try:
            async with exchange:
                await self._route(path, seen, exchange)
        except GoneError:
            seen.outcome = "left"
            await exchange.drop()
        except Exception as exc:
            self._failures.append(exc)  # a mistake of ours must fail the test, not look like a scripted 500
            raise
        finally:
            seen.done.set()

    async def _route(self, path: str, seen: Seen, exchange: ScriptedRequest) -> None:
        if seen.method == "POST" and path == "/v1/messages":
            async with self._arrival:
                self._seen.append(seen)
                self._arrival.notify_all()
            await self._model(seen, exchange)
            return
        self._others.append(seen)
        if seen.method == "POST" and path == "/v1/messages/count_tokens":
            size = sum(len(line) for line in seen.lines())
            await exchange.json(200, {"input_tokens": size // BYTES_PER_TOKEN})
            seen.outcome = "answered"
        else:
            await exchange.json(404, Fail(404, message=f"no such route: {path}").error)
            seen.outcome = "failed"

    async def _model(self, seen: Seen, exchange: ScriptedRequest) -> None:
        refused = None if self.rules is None else refusal(self.rules, seen.raw, seen.body)
        if refused is not None:
            self.refused.append((seen, refused.message))
        behaviour = refused or self._behaviour(seen)
        if isinstance(behaviour, Fail):
            seen.outcome = "failed"
            await exchange.json(behaviour.status, behaviour.error, dict(behaviour.headers))
            return
        await before(behaviour, exchange, streamed=bool(seen.body.get("stream")))
        reply = behaviour if isinstance(behaviour, Reply) else behaviour.reply
        message = self._message(seen, reply)
        if seen.body.get("stream"):
            seen.outcome = await stream(message, behaviour, exchange)
        elif isinstance(behaviour, Cut):
            seen.outcome = "cut"
            await exchange.drop()
        elif isinstance(behaviour, ErrorEvent):
            seen.outcome = "failed"
            await exchange.json(529, behaviour.error)
        else:
            await exchange.json(200, message, dict(reply.headers))
            seen.outcome = "answered"

    def _behaviour(self, seen: Seen) -> Behaviour:
        for rule in self._rules:
            if rule.matches(seen.prompt):
                return rule.use()
        if self._queue:
            return self._queue.popleft()
        return Reply() if self.behave is None else self.behave(seen)

    def _message(self, seen: Seen, reply: Reply) -> Block:
        blocks = sealed(seen.body, reply.blocks(seen.texts(), self.answer))
        output = max(1, sum(len(json.dumps(block)) for block in blocks) // BYTES_PER_TOKEN)
        return {
            "id": f"msg_{uuid.uuid4().hex[:24]}",  # of two messages with one id a CLI makes one (2.1.332)
            "type": "message",
            "role": "assistant",
            "model": seen.body.get("model", "scripted"),
            "content": blocks,
            "stop_reason": reply.stop_reason,
            "stop_sequence": reply.stop_sequence,
            **({} if reply.stop_details is None else {"stop_details": dict(reply.stop_details)}),
            **({} if reply.diagnostics is None else {"diagnostics": dict(reply.diagnostics)}),
            "usage": {**self._prompt_usage(seen.body), "output_tokens": output, **(reply.usage or {})},
        }

    def _prompt_usage(self, body: Block) -> dict[str, Any]:
        """Tokens of the prompt: read from the cache, written up to the last breakpoint, and the rest.

        An image counts by its bytes, many times what a real model counts. After a large one the CLI 1.0.120 compacts.
        """
        used = self._cache.use(body)
        parts = (used.size - max(used.read, used.written), used.read, max(0, used.written - used.read))
        tokens = [size // BYTES_PER_TOKEN for size in parts]
        return {
            "input_tokens": tokens[0] + 1,
            "cache_read_input_tokens": tokens[1],
            "cache_creation_input_tokens": tokens[2],
        }


async def _body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(pieces)


class UpstreamThread:
    """An `Upstream` on a loop in a thread of its own, for code that is not async.

    with UpstreamThread() as thread:
        ... thread.upstream.url ...
        thread.call(gate.open)      # runs a function on that loop and gives its result
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="scripted-upstream", daemon=True)
        self._failure: BaseException | None = None
        self.upstream: Upstream

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with Upstream(**self._options) as self.upstream:
                self._ready.set()
                await self._stop.wait()
        except OSError as exc:  # handed to the thread that waits in __enter__
            self._failure = exc
            self._ready.set()

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(STOP_TIMEOUT)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(STOP_TIMEOUT)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_TIMEOUT)


def serve(port: int) -> None:
    """Until Ctrl-C."""

    async def run() -> None:
        async with Upstream(port=port, keep=1) as upstream:
            print(f"scripted Messages API on {upstream.url} (Ctrl-C ends it)", flush=True)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A scripted Messages API on loopback.")
    parser.add_argument("--port", type=int, default=0)
    serve(parser.parse_args().port)
