"""Requests of the commands to a running server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http.client
import secrets
import socket
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..domain.models import JSON
from ..errors import ConfigError, UpstreamError, from_dict
from ..http.keys import Keys
from ..http.served import CHALLENGE, PROOF, Served, proof
from ..settings import Settings

if TYPE_CHECKING:
    import httpx

# A server on this machine answers /healthz in milliseconds; deleting may wait for a turn to end.
ANSWER_TIMEOUT = 60.0
HEALTH_TIMEOUT = 2.0
# The most bytes of an answer that are read.
LONGEST = 64 * 1024 * 1024


def client_of(
    served: Served, timeout: float | httpx.Timeout, headers: dict[str, str] | None = None
) -> httpx.AsyncClient:
    """A client of this server, over its unix socket if it has one.

    The server proves its identity before each request: it may have ended, and another program may have its port now.
    Without proof: `httpx.ConnectError`.
    """
    import httpx  # noqa: PLC0415 - 0.1 s of a core, which `status` does without

    async def prove(request: httpx.Request) -> None:
        if not await alive(served):
            raise httpx.ConnectError(f"{served} is no longer the server of this --var", request=request)

    transport = None if served.uds is None else httpx.AsyncHTTPTransport(uds=served.uds)
    return httpx.AsyncClient(
        transport=transport, base_url=served.url, trust_env=False, timeout=timeout, headers=headers or {},
        event_hooks={"request": [prove]},
    )  # fmt: skip


async def alive(served: Served) -> bool:
    """Whether the server answers and proves that it is the one of this `var`: another program may have its port now."""
    challenge = secrets.token_hex(16)
    try:
        status, headers, _ = await get_from(served, "/healthz", {CHALLENGE: challenge}, HEALTH_TIMEOUT)
    except (OSError, http.client.HTTPException):
        return False
    if served.secret is None:
        return status == http.HTTPStatus.OK
    proved = (headers.get(PROOF) or "").encode("utf-8", "replace")
    return hmac.compare_digest(proved, proof(served.secret, challenge).encode())


async def get_from(
    served: Served, path: str, headers: dict[str, str], timeout: float
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of a GET, all of it within this time. Raises OSError or HTTPException."""

    def ask() -> tuple[int, http.client.HTTPMessage, bytes]:
        there = urlsplit(served.url)
        connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=timeout)
        end: threading.Timer | None = None
        try:
            if served.uds is not None:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(timeout)
                connection.sock.connect(served.uds)
            else:
                connection.connect()
            end = threading.Timer(timeout, cut, (connection.sock,))  # a foreign server could send a byte at a time
            end.start()
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read(LONGEST)
        finally:
            if end is not None:
                end.cancel()
            connection.close()

    def cut(line: socket.socket) -> None:
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    return await asyncio.to_thread(ask)


def key_of(settings: Settings, owner: str) -> dict[str, str]:
    """The key that a running server requires of this owner."""
    keys = Keys(settings)
    secret = keys.secret_of(owner)
    if settings.trusted_header is not None and secret is None:
        raise ConfigError("the server gets owners from its gateway, so commands need a key: start it with --make-key")
    if keys and secret is None:
        raise ConfigError(f"the server asks for a key and {owner!r} has none: choose an --owner of [keys]")
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


async def ask_server(
    served: Served, method: str, agent_id: str, key: dict[str, str], *, after: str = "", body: JSON | None = None
) -> JSON:
    """Send a request about this agent to the server. Returns its answer, or raises its error."""
    import httpx  # noqa: PLC0415 - as above

    from ..wires.common import encoded_agent_id  # noqa: PLC0415

    async with client_of(served, ANSWER_TIMEOUT, key) as client:
        try:
            answer = await client.request(method, f"/v1/chains/{encoded_agent_id(agent_id)}{after}", json=body)
            data: JSON = answer.json()
            error = None if answer.status_code == 200 else data["error"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
            raise UpstreamError(
                f"{served} (from serve.json in --var) does not answer like a cli-session-proxy server"
            ) from exc
    if error is not None:
        raise from_dict(error)
    return data
