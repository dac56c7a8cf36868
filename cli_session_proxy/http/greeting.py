"""Connections to another proxy. Nothing is sent over one before the proxy has proved that it has the cluster's key."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import h11
import httpcore
import httpx

from .proof import GREETING, PROOF, Peer, Signer, decisive

# Bytes of the answer to a greeting, and per read.
LONGEST, PIECE = 16 * 1024, 4 * 1024
NOT_PROVED = "it has not proved that it is of this cluster"

Learned = Callable[[Peer], None]


def transport(
    address: str, signer: Signer, learned: Learned, *, trusted: ssl.SSLContext, idle: float, patience: float
) -> httpx.AsyncBaseTransport:
    """`learned` gets the proven identity of each new connection's peer. Failures are `httpx.ConnectError`."""
    made = httpx.AsyncHTTPTransport(verify=trusted, trust_env=False)
    # httpx has no option for a network backend: replace its pool by one that differs only in this.
    made._pool = httpcore.AsyncConnectionPool(
        ssl_context=trusted, max_connections=None, max_keepalive_connections=64, keepalive_expiry=idle,
        network_backend=_Greeting(address, signer, learned, patience),
    )  # fmt: skip
    return made


class _Greeting(httpcore.AsyncNetworkBackend):
    def __init__(self, address: str, signer: Signer, learned: Learned, patience: float) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._address = address
        self._signer = signer
        self._learned = learned
        self._patience = patience

    async def connect_tcp(self, host: str, port: int, *args: Any, **more: Any) -> httpcore.AsyncNetworkStream:
        stream = await self._inner.connect_tcp(host, port, *args, **more)
        if self._address.startswith("https://"):
            return _Tls(stream, self)
        return await self.greeted(stream)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)

    async def greeted(self, stream: httpcore.AsyncNetworkStream) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(self._patience):  # in all: the peer may send a byte at a time
                self._learned(await self._greet(stream))
        except BaseException as exc:
            await stream.aclose()
            if isinstance(exc, TimeoutError | httpcore.TimeoutException | httpcore.NetworkError):
                raise httpcore.ConnectError(NOT_PROVED) from exc
            raise
        return stream

    async def _greet(self, stream: httpcore.AsyncNetworkStream) -> Peer:
        marks = self._signer.request("GET", GREETING, "", self._address, None, decisive(()))
        speaks = h11.Connection(h11.CLIENT, max_incomplete_event_size=LONGEST)
        headers = [("Host", self._address.partition("://")[2]), *marks.items()]
        proof, status, size = "", 0, 0
        try:
            sent = speaks.send(h11.Request(method="GET", target=GREETING, headers=headers)) or b""
            await stream.write(sent + (speaks.send(h11.EndOfMessage()) or b""), self._patience)
            while not isinstance(event := speaks.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    data = await stream.read(PIECE, self._patience)
                    size += len(data)
                    speaks.receive_data(data)
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    proof = dict(event.headers).get(PROOF.encode(), b"").decode("latin-1")
                if isinstance(event, h11.ConnectionClosed) or size > LONGEST:
                    break
        except (h11.ProtocolError, UnicodeError) as exc:
            raise httpcore.ConnectError(NOT_PROVED) from exc
        peer = self._signer.peer(marks, status, proof)
        if peer is None or speaks.our_state is not h11.DONE or speaks.trailing_data[0]:
            raise httpcore.ConnectError(NOT_PROVED)
        return peer


class _Tls(httpcore.AsyncNetworkStream):
    """Greeted once it is encrypted."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, greeting: _Greeting) -> None:
        self._stream = stream
        self._greeting = greeting

    async def start_tls(self, *args: Any, **more: Any) -> httpcore.AsyncNetworkStream:
        return await self._greeting.greeted(await self._stream.start_tls(*args, **more))

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
