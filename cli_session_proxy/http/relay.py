"""Forwards a request to another proxy, unchanged and over one hop only, and streams the answer back.

    client ──▶ gate: host, page, key, bounds ──▶ route ──▶ engine: placed, `Elsewhere` (see `engine.passing`)
                 │ relay: can the other proxy accept it?  no: the same request once more, and it runs here
                 └──────▶ gate of the other proxy: the cluster's key, the owner ──▶ route ──▶ engine: it runs there

- If the other proxy is not reached, cannot accept a turn, or refuses the hop, the request runs here. The other proxy
is probed first (`PROBE_TIMEOUT`): the kernel of a paused proxy accepts connections, and a proxy without its store
would block its agents.
- Once the request was sent, it is unknown whether it was accepted. After a broken connection the client has to retry:
the turn is then found by the contract's rules, here or there, and never run twice.
- Both proxies prove that they have the cluster's key, the other one first, and neither sends it (see `proof`). The
address comes from a live row of the store. The other proxy forwards nothing itself.
- An owner's limits are counted here. This proxy stores whether the answer arrived, unless the other one gave it to
another client, too, and stores that itself (see `live.Handover`).
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import quote, unquote, unquote_to_bytes

import httpx
from starlette.types import ASGIApp, Message, Scope

from .. import logs
from ..domain import limits
from ..domain.models import JSON, Agent
from ..engine.engine import Engine
from ..engine.ownership import steady_clock
from ..engine.passing import AWAITED, ORIGIN, VIA, Elsewhere
from ..engine.subscription import POLL
from ..errors import ClaudeUnavailable, Interrupted, InvalidRequest
from ..stores import held
from ..wires.asgi import at_once, raw_path
from ..wires.common import encoded_agent_id
from .connection import FIELDS, HEAD
from .gateway import OWNER_NAME
from .greeting import transport
from .hop import REFUSED, REPEATED, Incoming
from .proof import (
    ANSWERED,
    ANSWERING,
    AWAITING,
    FAILED,
    GREETING,
    HOP_MARK,
    LEFT,
    NOTHING,
    OLD_MARK,
    ONLY_HERE,
    OWNER,
    PROOF,
    TARGET,
    Peer,
    Signer,
    decisive,
    nonce_of,
    sent_at,
)

log = logs.get(__name__)

# The result of forwarding. `answered`: the other proxy answered, perhaps with an error. `ran_here`: it was not reached,
# could not accept a turn, or refused. `interrupted`: it is unknown whether it accepted the request. `left`: the client
# left early.
Result = Literal["answered", "ran_here", "interrupted", "left"]

# Timeout of a connection to another proxy, and of its readiness probe, in seconds. Usually both take milliseconds.
PROBE_TIMEOUT = 1.0
# Seconds for which a proxy counts as reachable after it sent anything, and as unreachable after a failed probe.
REACHABLE_FOR, UNREACHABLE_FOR = 0.5, 2.0
# Seconds between probes of the host that has the agent's files, while it is waited for.
PROBE_INTERVAL = 0.25
# Seconds until another proxy is asked again whether it has ended an answer; twice as long each time.
ENDING_INTERVAL = 0.02
# Seconds that an answer is still read after its client left, once it has begun: the client may have had all of it.
READ_ON = 0.1
# Seconds after which the proxy that forwarded a request is asked whether it still waits for the answer.
ON_ITS_WAY = 1.0
# How many other proxies are remembered; the least recently used one is dropped.
MOST_PROXIES = 1024
# How many of the last forwarded requests that were answered here are remembered, with their turns.
MOST_ANSWERED = 4096
# The most bytes of a `progress` event of another proxy: some 10 KB per turn, and approval requests.
LARGEST_EVENT = 1024 * 1024
# The most bytes of the answer to a probe; it has some hundred.
LARGEST_PROBE = 16 * 1024
# The most bytes and fields of a forwarded head: the other proxy's limits, minus our own fields.
LARGEST_HEAD, MOST_FIELDS = HEAD - 2048, FIELDS - 8
# Idle connections are closed before the other proxy closes them. Seconds.
IDLE = 15.0
# Headers that are not forwarded: hop-by-hop, or about the caller, whom `OWNER` names.
_NOT_PASSED_ON = frozenset({
    b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"content-length", b"expect", b"authorization", b"x-api-key", b"x-goog-api-key", b"cookie", b"origin", b"referer",
    b"x-request-id", b"proxy-authorization", b"proxy-authenticate", OLD_MARK.encode(),
})  # fmt: skip
# The same for an answer.
_NOT_PASSED_BACK = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"trailer", b"transfer-encoding", b"upgrade",
    b"proxy-authenticate", b"date", b"server", b"x-request-id", PROOF.encode(),
})  # fmt: skip


@dataclass(slots=True, eq=False)
class Hop:
    """A forwarded request and its answer."""

    address: str
    agent_key: int
    nonce: str  # of the forwarded request
    instance: str  # of the other proxy
    incoming: Incoming
    leaving: asyncio.Task[None]  # ends when the client disconnects
    last_heard: float  # when the other proxy last sent something, or showed that it runs, by the loop's time
    giving: bool = False  # the client is given a piece of the answer, and the other proxy is not read meanwhile
    refused: bool = False  # nothing was done there
    turn_id: str | None = None  # of the answered turn
    is_stream: bool = False  # the answer came in pieces, the last of which may be an error
    failed: bool | None = None  # whether it was one, if the other proxy knows
    delivered: bool | None = None  # whether the client got the whole answer; None: not known here
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # `delivered` is stored

    def is_lost(self) -> bool:
        """Whether the client left before it had the whole answer, or the other proxy was lost."""
        return not self.delivered and (self.leaving.done() or self.incoming.has_left())


@dataclass(slots=True, eq=False)
class _OtherProxy:
    """Connections to another proxy, and what is known of it. Times are the loop's."""

    client: httpx.AsyncClient = field(init=False)
    uses: int = 0  # how many requests use the client now
    peer: Peer | None = None  # its last proven identity
    last_heard: float = -REACHABLE_FOR  # when it last sent something
    unreachable_until: float = 0.0


class _BrokenError(Exception):
    """The request was sent, and the answer is missing or incomplete."""


class Relay:
    """One per app. `count` counts the result of each forwarded request."""

    def __init__(self, engine: Engine, secret: str, lease: float, count: Callable[[Result], None]) -> None:
        self._engine = engine
        self.signer = Signer(secret, engine.settings.advertise, engine.instance_id)
        self._lease = lease  # seconds of silence after which the other proxy is probed
        self._count = count
        self._proxies: OrderedDict[str, _OtherProxy] = OrderedDict()  # by address, in order of use
        self._trusted: ssl.SSLContext | None = None
        self._hops: set[Hop] = set()
        if engine.passing is not None:
            of_whom = {True: "", False: f"&{ONLY_HERE}=1"}
            engine.passing.settle = lambda address, turn_id, others: self._probe(
                address, f"{GREETING}?{LEFT}={turn_id}{of_whom[others]}", lease
            )
        # Requests that other proxies have forwarded, by their nonces: a client chooses its request's id.
        self._answering: set[str] = set()
        self._answered: OrderedDict[str, dict[str, str]] = OrderedDict()  # with what is told of them

    async def close(self) -> None:
        for other in self._proxies.values():
            await other.client.aclose()
        self._proxies.clear()

    async def others(self) -> frozenset[str]:
        """The addresses of this store's proxies. Raises `StoreUnavailable`."""
        return await self._engine.store.addresses()

    def owner_of(self, headers: Mapping[str, str]) -> str:
        """The owner of a forwarded, signed request; "" for a question, which is answered until the end. Raises
        `ClaudeUnavailable` for others while this proxy stops."""
        owner = unquote(headers.get(OWNER, ""))
        if owner and not self._engine.ready:
            raise ClaudeUnavailable("the proxy is shutting down: send this again in a moment", retry_after=5.0)
        if owner and not OWNER_NAME.fullmatch(owner):
            raise InvalidRequest(f"{OWNER} holds no owner: up to 64 letters, digits and . _ @ -", param=OWNER)
        return owner

    async def answered(self, nonce: str) -> dict[str, str] | None:
        """Headers about a request that another proxy has forwarded, once it is stored what became of its answer. None
        while it is answered here."""
        if nonce in self._answering:
            return None
        ended = self._answered.get(nonce, {})
        await self._engine.delivery_stored(ended.get(ANSWERED, ""))
        return ended

    def awaits(self, nonce: str) -> bool:
        """Whether this proxy has forwarded this request, and waits for the answer."""
        return any(hop.nonce == nonce and not hop.is_lost() for hop in self._hops)

    def _is_awaited(self, via: str, headers: Mapping[str, str]) -> Callable[[], Awaitable[bool]]:
        """See `AWAITED`. A request comes late if its line carried nothing for a while, or if this proxy was paused. If
        its client has left by then, a load balancer between the two proxies may keep the connection open."""
        known_at, clock = sent_at(headers), steady_clock()
        question = f"{GREETING}?{AWAITING}={nonce_of(headers)}"

        async def is_awaited() -> bool:
            nonlocal known_at
            if (now := clock()) - known_at < ON_ITS_WAY:
                return True
            proxy = await self._engine.store.proxy(via)
            if proxy is None or not (proxy.address is None or await self._probe(proxy.address, question, self._lease)):
                return False
            known_at = now
            return True

        return is_awaited

    async def settle(self, turn_id: str, *, others: bool) -> bool:
        """Store which clients have left this turn; see `Engine.settled`. The same request has come to another proxy."""
        turn = await self._engine.store.turn(turn_id)
        if turn is None:
            return True
        return await self._settle(turn.agent_key) and await self._engine.settled(turn_id, others=others)

    async def _settle(self, agent_key: int) -> bool:
        """Store that answers of this agent did not arrive, if their clients have left: what comes next may be a
        retry. False if it could not be stored in time."""
        lost = [hop for hop in self._hops if hop.agent_key == agent_key and hop.is_lost()]
        for hop in lost:
            hop.leaving.cancel()  # the server may not know yet
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease):
                for hop in lost:
                    await hop.settled.wait()
        return all(hop.settled.is_set() for hop in lost)

    async def serve(self, app: ASGIApp, incoming: Incoming, *, via: str | None) -> None:
        """Answer the request here, or forward it to another proxy. `via`: see `VIA`."""
        state = incoming.inner["state"]
        token, token_via = ORIGIN.set("from_client" if via is None else "forwarded"), VIA.set(via)
        token_awaited = AWAITED.set(None if via is None else self._is_awaited(via, state["headers"]))
        try:
            if via is not None:
                await self._answer_here(app, incoming, nonce_of(state["headers"]))
                return
            try:
                # Routes write into their scope: each attempt gets a copy.
                await app({**incoming.inner, "state": dict(state)}, incoming.recorded, incoming.answer)
                return
            except Elsewhere as there:
                held.release()  # it only waits now, or begins again
                if await self._forward(incoming, there, state):
                    return
            ORIGIN.set("local_only")
            state["held"].read_again()
            with self._engine.holds.hold(state["owner"]):
                await app(incoming.inner, incoming.again(), incoming.send)
        finally:
            ORIGIN.reset(token)
            VIA.reset(token_via)
            AWAITED.reset(token_awaited)

    async def _answer_here(self, app: ASGIApp, incoming: Incoming, nonce: str) -> None:
        """Answer a request that another proxy has forwarded, which may ask for it (see `answered`)."""
        turn_id = ""

        async def send(message: Message) -> None:
            nonlocal turn_id
            if message["type"] == "http.response.start":
                turn_id = dict(message.get("headers", ())).get(b"x-turn-id", b"").decode()
            await incoming.send(message)

        self._answering.add(nonce)
        try:
            await app(incoming.inner, incoming.receive, send)
        finally:
            self._answering.discard(nonce)
            failed = {FAILED: "1"} if incoming.inner["state"].get("failed") else {}
            self._answered[nonce] = {ANSWERED: turn_id, **failed}
            if len(self._answered) > MOST_ANSWERED:
                self._answered.popitem(last=False)

    # --- forwarding

    async def _forward(self, incoming: Incoming, target: Elsewhere, state: Mapping[str, Any]) -> bool:
        """Forward the request. False if nothing was sent, or nothing was done there. Raises `Interrupted` if the result
        is unknown."""
        await self._settle(target.agent_key)
        if not _fits(incoming.outer) or not await self._can_accept(target):
            log.warning("not_passed_on", address=target.address)
            self._count("ran_here")
            return False
        await self._engine.seen_alive()  # else the other proxy takes this client for one that has left
        if incoming.has_left():
            # As at the acceptance of a turn: the client may have sent it again to another proxy, and have its answer.
            self._count("left")
            raise Interrupted("the client left before its request was forwarded: nothing was run", retry_after=0.0)
        body = b"".join(message.get("body", b"") for message in incoming.body)
        incoming.body.clear()
        request = self._request(target.address, incoming.outer, body, state["owner"], state["request_id"])
        leaving = asyncio.create_task(incoming.left())
        now = asyncio.get_running_loop().time()
        instance = request.headers[TARGET].partition("@")[0]
        hop = Hop(target.address, target.agent_key, nonce_of(request.headers), instance, incoming, leaving, now)
        self._hops.add(hop)
        self._engine.forwarded(hop.settled)
        answering = asyncio.create_task(self._answer(hop, request))
        silence = asyncio.create_task(self._until_silent(hop))
        result: Result = "left"
        try:
            await asyncio.wait({answering, leaving, silence}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and hop.turn_id is not None:  # it has begun to answer: the rest may still come
                await asyncio.wait({answering}, timeout=READ_ON)
            if answering.done():
                await answering
                result = "ran_here" if hop.refused else "answered" if hop.delivered else "left"
            elif silence.done() and not leaving.done():
                quiet = asyncio.get_running_loop().time() - hop.last_heard
                raise _BrokenError(f"it has not responded for {quiet:.0f} s")
        except _BrokenError as exc:
            result = "interrupted"
            log.warning("hop_broken", address=target.address, why=str(exc))
            raise Interrupted(
                "the connection to the proxy that runs this was lost: send it again; a turn that was accepted there is "
                "the same turn",
                retry_after=1.0,
            ) from exc
        finally:
            for task in (answering, leaving, silence):
                task.cancel()
            try:
                await asyncio.gather(answering, leaving, silence, return_exceptions=True)
                self._count(result)
            finally:
                noting = self._engine.note(hop.turn_id or hop.nonce, partial(self._note, hop, target.fingerprint))
                noting.add_done_callback(lambda _: self._hops.discard(hop))
                noting.add_done_callback(lambda _: hop.settled.set())
            await asyncio.wait([noting], timeout=self._lease)  # with a store that is away it takes longer
        if hop.refused:
            incoming.body.append({"type": "http.request", "body": body, "more_body": False})
        return not hop.refused

    async def _note(self, hop: Hop, fingerprint: str | None) -> None:
        """Store what became of the answer. Raises `StoreUnavailable`."""
        if hop.refused:
            return
        if hop.delivered:
            # The other proxy alone knows whether a stream ended with an error. If it does not say so in time, nothing
            # is stored here: it stores itself that it has handed the answer on, or what became of the turn.
            is_known = not hop.is_stream or (await self._has_stored(hop) and hop.failed is not None)
            arrived = not hop.failed if is_known else await self._engine.has_been_handed(hop.turn_id or "")
            if arrived and hop.turn_id is not None:
                await self._engine.note_arrival(hop.turn_id, arrived=True)
            return
        # The other proxy stores first whether it has handed the answer on: it may have other clients.
        stored = await self._has_stored(hop)
        if stored and hop.failed:
            return
        turn = await self._engine.store.turn(hop.turn_id) if hop.turn_id is not None else None
        if stored and hop.delivered is False and turn is not None and not turn.in_background:
            await self._engine.note_arrival(turn.id, arrived=False)
        else:
            await self._engine.note_lost(hop.agent_key, hop.instance, hop.turn_id, fingerprint)

    async def _answer(self, hop: Hop, request: httpx.Request) -> None:
        """Send the request, and stream the answer to the client."""
        async with self._use(hop.address) as other:
            try:
                response = await other.client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:  # it has just ended: nothing was sent
                other.unreachable_until = asyncio.get_running_loop().time() + UNREACHABLE_FOR
                log.warning("not_passed_on", address=hop.address, error=type(exc).__name__)
                hop.refused = True
                return
            except httpx.HTTPError as exc:
                raise _BrokenError(type(exc).__name__) from exc
            try:
                await self._stream(hop, response, other)
            except httpx.HTTPError as exc:
                raise _BrokenError(type(exc).__name__) from exc
            finally:
                await response.aclose()

    async def _stream(self, hop: Hop, response: httpx.Response, other: _OtherProxy) -> None:
        clock = asyncio.get_running_loop().time
        if not self._proved(hop.address, response):
            raise _BrokenError("its answer is not signed")
        hop.last_heard = other.last_heard = clock()
        if REPEATED in response.headers:
            raise _BrokenError("it has this request already, or it is old")
        if REFUSED in response.headers:
            log.error("hop_refused", address=hop.address, status=response.status_code)
            other.last_heard, other.unreachable_until = -REACHABLE_FOR, clock() + UNREACHABLE_FOR
            hop.refused = True
            return
        headers = [(name.lower(), value) for name, value in response.headers.raw]
        kept_back = _NOT_PASSED_BACK | _named_by_connection(headers)
        head = [pair for pair in headers if pair[0] not in kept_back]
        if response.status_code == 200:
            hop.turn_id = response.headers.get("x-turn-id")
            hop.is_stream = hop.turn_id is not None and "content-length" not in response.headers

        async def give(message: Message) -> None:
            hop.giving = True
            await hop.incoming.send(message)
            hop.giving, hop.last_heard = False, clock()

        await give({"type": "http.response.start", "status": response.status_code, "headers": head})
        async for chunk in response.aiter_raw():
            hop.last_heard = clock()
            if hop.incoming.has_left():
                hop.delivered = False
                return
            await give({"type": "http.response.body", "body": chunk, "more_body": True})
            if hop.is_stream:  # the client may have its end before the other proxy ends it
                hop.incoming.send_now()
            received = at_once(hop.incoming.receive)
            if received is not None and received["type"] == "http.disconnect":  # it left while `send` waited
                hop.delivered = False
                return
        hop.delivered = True
        await give({"type": "http.response.body", "body": b"", "more_body": False})  # it waits for room, too

    async def _until_silent(self, hop: Hop) -> None:
        """Wait until the other proxy has sent nothing for `lease` seconds, and does not answer a probe or says twice
        that it does not answer this request any more: a line may be lost without a sign, and its end, too."""
        clock = asyncio.get_running_loop().time
        ended_at = -1.0
        while True:
            await asyncio.sleep(max(0.0, hop.last_heard + self._lease - clock()))
            heard = hop.last_heard
            if clock() - heard < self._lease:
                continue
            if not await self._probe(hop.address, GREETING, self._lease):
                return
            has_ended = await self._has_ended(hop, self._lease)
            is_quiet = not hop.giving and hop.last_heard == heard
            if is_quiet and has_ended and heard == ended_at:
                return
            hop.last_heard = clock()
            ended_at = hop.last_heard if is_quiet and has_ended else -1.0

    async def _has_ended(self, hop: Hop, within: float) -> bool:
        """Whether the other proxy says that it does not answer this request any more. Then its turn is known."""
        response = await self._get(hop.address, f"{GREETING}?{ANSWERING}={hop.nonce}", within)
        if response is None or response.status_code != 410:
            return False
        turn_id = response.headers.get(ANSWERED) or None
        hop.turn_id = hop.turn_id or turn_id
        hop.failed = None if turn_id is None else FAILED in response.headers
        return True

    async def _has_stored(self, hop: Hop) -> bool:
        """Whether the other proxy has ended its answer to this request, and stored what became of it: it notices in a
        moment that the connection is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT):
                pause = ENDING_INTERVAL
                while not await self._has_ended(hop, PROBE_TIMEOUT):
                    await asyncio.sleep(pause)
                    pause *= 2
                return True
        return False

    async def _can_accept(self, target: Elsewhere) -> bool:
        """Whether the other proxy says that it can accept a turn. If it has the agent's files, it has `lease` seconds
        to say so."""
        clock, address = asyncio.get_running_loop().time, target.address
        async with self._use(address) as other:
            if clock() - other.last_heard < REACHABLE_FOR:
                return True
            until = clock() + (self._lease if target.home else 0.0)
            if clock() < other.unreachable_until and not target.home:
                return False
            while not (address in await self.others() and await self._probe(address, "/readyz", PROBE_TIMEOUT)):
                other.last_heard = -REACHABLE_FOR
                if clock() >= until:
                    other.unreachable_until = clock() + UNREACHABLE_FOR
                    return False
                await asyncio.sleep(PROBE_INTERVAL)
            other.last_heard, other.unreachable_until = clock(), 0.0
            return True

    async def _probe(self, address: str, path: str, within: float) -> bool:
        """Whether it answers this path with 200, and proves that it belongs to this cluster."""
        response = await self._get(address, path, within)
        return response is not None and response.status_code == 200

    async def _get(self, address: str, path: str, within: float) -> httpx.Response | None:
        """Its answer to this path; None without one, or without a proof that it belongs to this cluster."""
        marks, size = self._marks(address, "GET", path, "", ()), 0
        try:
            async with asyncio.timeout(within), self._use(address) as other:
                async with other.client.stream("GET", f"{address}{path}", headers=marks) as response:
                    async for piece in response.aiter_raw():
                        size += len(piece)
                        if size > LARGEST_PROBE:
                            return None
                return response if self._proved(address, response) else None
        except Exception:  # noqa: BLE001 - the address is from the store, and may be anything
            return None

    def _proved(self, address: str, response: httpx.Response) -> bool:
        """Whether this answer has a valid proof of the peer."""
        marks = {name: response.request.headers[name] for name in (HOP_MARK, TARGET)}
        refused = REFUSED in response.headers
        other = self._proxies[address]
        other.peer = self.signer.peer(marks, response.status_code, response.headers.get(PROOF, ""), refused)
        if other.peer is None:
            log.error("hop_not_proved", address=address, status=response.status_code)
            other.last_heard = -REACHABLE_FOR  # probe it before the next request, to get a new proof
        return other.peer is not None

    def _request(self, address: str, scope: Scope, body: bytes, owner: str, request_id: str) -> httpx.Request:
        # A client's key is never forwarded, however its parameter is spelled.
        pairs = scope.get("query_string", b"").split(b"&")
        query = b"&".join(pair for pair in pairs if unquote_to_bytes(pair.partition(b"=")[0]) != b"key")
        kept_back = _NOT_PASSED_ON | _named_by_connection(scope["headers"])
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in kept_back and not name.startswith((b"sec-fetch-", b"x-cluster-"))
        ]
        # The raw path: httpx would encode some characters differently.
        target = raw_path(scope) + (b"?" + query if query else b"")
        digest = hashlib.sha256(body).hexdigest()
        marks = self._marks(address, scope["method"], target.decode("latin-1"), owner, headers, digest)
        headers += [(name.encode(), value.encode()) for name, value in marks.items()]
        headers.append((b"x-request-id", request_id.encode()))
        waits = {"connect": PROBE_TIMEOUT, "read": None, "write": None, "pool": None}
        return httpx.Request(
            scope["method"], address, headers=headers, content=body, extensions={"target": target, "timeout": waits}
        )

    def _marks(
        self,
        address: str,
        method: str,
        target: str,
        owner: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: str = NOTHING,
    ) -> dict[str, str]:
        """The headers that sign a request. `body`: its SHA-256."""
        peer = self._proxies[address].peer if address in self._proxies else None
        return self.signer.request(method, target, quote(owner, safe=""), address, peer, decisive(headers), body)

    @asynccontextmanager
    async def _use(self, address: str) -> AsyncIterator[_OtherProxy]:
        """The other proxy at this address. It is not dropped while it is used."""
        if (other := self._proxies.get(address)) is None:
            other = self._proxies[address] = _OtherProxy()
            # Certificates trusted by this machine, private authorities included; no proxy of the environment.
            self._trusted = self._trusted or ssl.create_default_context()
            learned = partial(setattr, other, "peer")
            made = transport(address, self.signer, learned, trusted=self._trusted, idle=IDLE, patience=PROBE_TIMEOUT)
            timeout = httpx.Timeout(None, connect=PROBE_TIMEOUT)
            other.client = httpx.AsyncClient(transport=made, timeout=timeout, trust_env=False)
        self._proxies.move_to_end(address)
        other.uses += 1
        try:
            if len(self._proxies) > MOST_PROXIES:
                unused = next((address for address, proxy in self._proxies.items() if not proxy.uses), None)
                if unused is not None:
                    await self._proxies.pop(unused).client.aclose()
            yield other
        finally:
            other.uses -= 1

    # --- progress of turns there

    def progress_elsewhere(self, agent: Agent) -> ProgressElsewhere:
        return ProgressElsewhere(self, self._engine, agent)

    async def follow(self, address: str, agent: Agent, by_address: dict[str, Sequence[JSON]]) -> None:
        """Keep the progress of the agent's turns at this proxy in `by_address`, until the stream ends. Returns at once
        if the proxy is unreachable."""
        path = f"/v1/chains/{encoded_agent_id(agent.agent_id)}/events?live=1"
        if not await self._probe(address, "/readyz", PROBE_TIMEOUT):
            return
        marks = self._marks(address, "GET", path, agent.owner, ())
        with suppress(httpx.HTTPError):
            async with (
                self._use(address) as other,
                other.client.stream("GET", f"{address}{path}", headers=marks) as stream,
            ):
                if not self._proved(address, stream) or stream.status_code != 200:
                    return
                previous = b""
                async for line in limits.split(stream.aiter_raw(), b"\n", LARGEST_EVENT):
                    if previous == b"event: progress":
                        by_address[address] = _turns_in(line)
                    previous = line


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """The names that `Connection` lists: they are for the neighbour alone."""
    listed = b",".join(value for name, value in headers if name == b"connection").lower()
    return {name.strip() for name in listed.split(b",")}


def _fits(scope: Scope) -> bool:
    """Whether the other proxy takes this head with our own fields."""
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    size += len(raw_path(scope)) + len(scope.get("query_string", b""))
    return size <= LARGEST_HEAD and len(scope["headers"]) <= MOST_FIELDS


def _turns_in(line: bytes) -> Sequence[JSON]:
    """The turns in a `progress` event; none if its data is incomplete."""
    with suppress(ValueError, TypeError, LookupError):
        turns = limits.loads(line.removeprefix(b"data: "))["turns"]
        return turns if isinstance(turns, list) else ()
    return ()


class ProgressElsewhere:
    """The progress of an agent's turns at other proxies, for one reader here."""

    def __init__(self, relay: Relay, engine: Engine, agent: Agent) -> None:
        self._relay = relay
        self._engine = engine
        self._agent = agent
        self._by_address: dict[str, Sequence[JSON]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._polled_at = 0.0

    async def turns(self) -> list[JSON]:
        """The present progress."""
        clock = asyncio.get_running_loop().time
        if clock() - self._polled_at >= POLL:
            self._polled_at = clock()
            addresses = await self._engine.runs_at(self._agent.key)
            for address in addresses - self._tasks.keys():
                self._tasks[address] = asyncio.create_task(self._relay.follow(address, self._agent, self._by_address))
            for address in [one for one, task in self._tasks.items() if one not in addresses or task.done()]:
                self._tasks.pop(address).cancel()
                self._by_address.pop(address, None)
        return [turn for reported in self._by_address.values() for turn in reported]

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
