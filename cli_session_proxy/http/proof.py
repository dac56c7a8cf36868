"""How two proxies of a cluster prove to each other that they have its key, which is never sent.

    a new connection   caller: GET /healthz, signed          peer: its instance and its time, signed
    each request       caller: signed for that very instance  peer: the answer's status, signed, and whether the
                                                              hop was refused

A signature is an HMAC-SHA256 with a key derived from the cluster's. The caller's covers nonce, time, method, target,
owner, the address and instance that are meant, the headers that decide something, and the body's hash. The peer signs
only what names its own `advertise`, so nobody can have it prove another address. It goes first: before its proof
nothing but the greeting is sent over a connection.

The peer takes a signed request once: for `FRESH` seconds it remembers nonces, older requests are refused, and so are
those for an instance before its own start. Times are by the peer's steady clock, which nobody sets, and which it told
in its proof.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from starlette.types import Message, Receive, Scope

from ..engine.ownership import steady_clock
from ..errors import Interrupted, Unauthorized
from ..wires.asgi import raw_path

# Of a request: `<time> <nonce> <signature>`; the owner whose key was checked, percent-encoded; `<instance>@<address>`;
# the body's SHA-256.
HOP_MARK, OWNER, TARGET, BODY = "x-cluster-hop", "x-cluster-owner", "x-cluster-target", "x-cluster-body"
# Of an answer: `<time> <instance> <signature>`.
PROOF = "x-cluster-proof"
# How versions before this one said that a request was passed on: with the key itself.
OLD_MARK = "x-cluster-key"
# Seconds that a request is good for.
FRESH = 30.0
GREETING = "/healthz"
# Asked before anything else is: they change nothing, and a proof is all that a repeated one gets.
QUESTIONS = frozenset({GREETING, "/readyz"})
NOTHING = hashlib.sha256(b"").hexdigest()
_clock = steady_clock()
ANOTHER = "this is not signed with the key of this cluster: give every proxy the same cluster_key and version"


@dataclass(frozen=True, slots=True)
class Peer:
    """What a proxy has proved of itself: its instance, and how far its clock is ahead of ours."""

    instance: str
    ahead: float


class Signer:
    """Of one proxy. `address` and `instance` are its own."""

    def __init__(self, secret: str, address: str | None, instance: str) -> None:
        self._key = hmac.digest(secret.encode(), b"cli-session-proxy hop 1", "sha256")
        self._address = address
        self._instance = instance
        self._seen: set[str] = set()
        self._order: deque[tuple[float, str]] = deque()

    def _sign(self, *fields: str) -> str:
        """Each field goes in with its length, so that different lists of fields never sign alike."""
        text = "".join(f"{len(field)}:{field}" for field in fields)
        return hmac.digest(self._key, text.encode("utf-8", "surrogatepass"), "sha256").hex()

    # --- the caller's side

    def request(
        self, method: str, target: str, owner: str, address: str, peer: Peer | None, headers: str, body: str = NOTHING
    ) -> dict[str, str]:
        """The marks of a request to a peer; of the greeting where none is known. `headers` is `decisive` of them."""
        when = f"{_clock() + (peer.ahead if peer else 0.0):.3f}"
        nonce = secrets.token_hex(16)
        meant = f"{peer.instance if peer else ''}@{address}"
        signature = self._sign("request", nonce, when, method, target, owner, meant, headers, body)
        return {HOP_MARK: f"{when} {nonce} {signature}", OWNER: owner, TARGET: meant, BODY: body}

    def peer(self, marks: Mapping[str, str], status: int, proof: str, refused: bool = False) -> Peer | None:
        """Who has answered a request with these marks; None where it has not proved it."""
        when, _, rest = proof.partition(" ")
        instance, _, signature = rest.partition(" ")
        wanted = self._proof(marks[HOP_MARK], marks[TARGET].partition("@")[2], status, refused, when, instance)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), wanted.encode()):
            return None
        return Peer(instance, float(when) - _clock())

    # --- the peer's side

    def check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """A proxy of this cluster has signed this request, for this address. Raises `Unauthorized`."""
        fields = {name: headers.get(name, "") for name in (HOP_MARK, OWNER, TARGET, BODY)}
        when, nonce, signature = (*fields[HOP_MARK].split(" "), "", "", "")[:3]
        owner, meant, body = fields[OWNER], fields[TARGET], fields[BODY]
        query = scope.get("query_string", b"")
        target = (raw_path(scope) + (b"?" + query if query else b"")).decode("latin-1")
        decides = decisive(scope["headers"])
        wanted = self._sign("request", nonce, when, scope.get("method", ""), target, owner, meant, decides, body)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), wanted.encode()):
            raise Unauthorized(ANOTHER)
        # An instance holds no "@"; an address that a row of the store names may hold any.
        if (address := meant.partition("@")[2]) != self._address:
            raise Unauthorized(f"this request is meant for the proxy at {address}: check `advertise` of both")

    def once(self, headers: Mapping[str, str]) -> None:
        """A checked request is fresh, for this instance, and was not seen before. Raises `Interrupted`: it may have
        been accepted when it first came."""
        told, nonce, _ = headers[HOP_MARK].split(" ")
        when, instance = float(told), headers[TARGET].partition("@")[0]
        now = _clock()
        while self._order and self._order[0][0] < now - 2 * FRESH:
            self._seen.discard(self._order.popleft()[1])
        if instance != self._instance or abs(now - when) > FRESH or nonce in self._seen:
            raise Interrupted(
                "this request of another proxy is a repeated or an old one: send it again", retry_after=1.0
            )
        self._seen.add(nonce)
        self._order.append((now, nonce))

    def prove(self, headers: Mapping[str, str], status: int, refused: bool = False) -> str:
        """The proof that goes with an answer to a request that was checked. `refused`: nothing was done."""
        when = f"{_clock():.3f}"
        signature = self._proof(headers[HOP_MARK], self._address or "", status, refused, when, self._instance)
        return f"{when} {self._instance} {signature}"

    def _proof(self, mark: str, address: str, status: int, refused: bool, when: str, instance: str) -> str:
        return self._sign("answer", mark, address, f"{status} refused" if refused else str(status), when, instance)


def decisive(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """A hash of the headers that decide what a request means: ours and the client's own, not those of its way."""
    named = ((name.lower(), value) for name, value in headers)
    told = (
        (name, value)
        for name, value in named
        if name in _DECISIVE or (name.startswith(b"x-") and not name.startswith(_OF_THE_WAY))
    )
    # Of equal names the first one counts: their order stays.
    return hashlib.sha256(b"\n".join(map(b":".join, sorted(told, key=itemgetter(0))))).hexdigest()


_DECISIVE = frozenset({b"idempotency-key", b"content-type", b"anthropic-beta", b"anthropic-version"})
_OF_THE_WAY = (b"x-cluster-", b"x-forwarded-", b"x-real-ip", b"x-request-id")


def checked(receive: Receive, wanted: str) -> Receive:
    """The same body. Its last piece raises `Unauthorized` where it is not the one that was signed."""
    digest, whole = hashlib.sha256(), False

    async def receive_checked() -> Message:
        nonlocal whole
        message = await receive()
        if message["type"] == "http.request" and not whole:
            digest.update(message.get("body", b""))
            whole = not message.get("more_body", False)
            if whole and not hmac.compare_digest(digest.hexdigest(), wanted):
                raise Unauthorized(ANOTHER)
        return message

    return receive_checked
