"""Mutual authentication of two proxies by the cluster's key, which is never sent.

    a new connection   caller: GET /healthz, signed          peer: its instance and its time, signed
    each request       caller: signed for that very instance  peer: the answer's status, signed, and whether the
                                                              hop was refused

A signature is an HMAC-SHA256 with a key derived from the cluster's. The caller's covers nonce, time, method, target,
owner, the address and instance of the peer, the headers that matter, and the body's hash. The peer only signs for its
own `advertise`, so it cannot be made to prove another address. It proves itself first: before that only the greeting is
sent over a connection.

The peer accepts a signed request once: it remembers nonces for `FRESH` seconds, and refuses older requests and those
for another instance. Times are those of the peer's steady clock, which it sends in its proof.
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

# Headers of a request: `<time> <the caller's instance>.<random> <signature>`, of which the middle is the nonce; the
# percent-encoded owner whose key was checked; `<instance>@<address>`; the body's SHA-256.
HOP_MARK, OWNER, TARGET, BODY = "x-cluster-hop", "x-cluster-owner", "x-cluster-target", "x-cluster-body"
# The header of an answer: `<time> <instance> <signature>`.
PROOF = "x-cluster-proof"
# The header of earlier versions for a forwarded request: the key itself.
OLD_MARK = "x-cluster-key"
# Seconds for which a signed request is valid.
FRESH = 30.0
GREETING = "/healthz"
# Its parameter in a signed request, with the nonce of a forwarded one: is that still answered there? 200, or 410 and a
# header with the id of its turn; another one if the answer was a stream that ended with an error.
ANSWERING, ANSWERED, FAILED = "answering", "x-cluster-turn", "x-cluster-failed"
# Another one, with the id of a turn: the answer comes when it is stored which clients have left that turn, there and at
# the proxies that forwarded their requests; 503 if none of these responds. With the second one, only there.
LEFT, ONLY_HERE = "left", "only_here"
# Another one, with the nonce of a request that the asked proxy has forwarded: does it wait for the answer? 200, or 410.
AWAITING = "awaiting"
# Paths that may be repeated: they change nothing, and only return a proof.
QUESTIONS = frozenset({GREETING, "/readyz"})
NOTHING = hashlib.sha256(b"").hexdigest()
_clock = steady_clock()
ANOTHER = "this is not signed with the key of this cluster: give every proxy the same cluster_key and version"


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy's proven identity: its instance, and how far its clock is ahead of ours."""

    instance: str
    ahead: float


class Signer:
    """Signs and checks for one proxy. `address` and `instance` are its own."""

    def __init__(self, secret: str, address: str | None, instance: str) -> None:
        self._key = hmac.digest(secret.encode(), b"cli-session-proxy hop 1", "sha256")
        self._address = address
        self._instance = instance
        self._seen: set[str] = set()
        self._order: deque[tuple[float, str]] = deque()

    def _sign(self, *fields: str) -> str:
        """Each field is signed with its length, so that different lists of fields never have equal signatures."""
        text = "".join(f"{len(field)}:{field}" for field in fields)
        return hmac.digest(self._key, text.encode("utf-8", "surrogatepass"), "sha256").hex()

    # --- the caller's side

    def request(
        self, method: str, target: str, owner: str, address: str, peer: Peer | None, headers: str, body: str = NOTHING
    ) -> dict[str, str]:
        """The signature headers of a request to a peer; without a known peer, of the greeting. `headers`: see
        `decisive`."""
        when = f"{_clock() + (peer.ahead if peer else 0.0):.3f}"
        nonce = f"{self._instance}.{secrets.token_hex(16)}"
        meant = f"{peer.instance if peer else ''}@{address}"
        signature = self._sign("request", nonce, when, method, target, owner, meant, headers, body)
        return {HOP_MARK: f"{when} {nonce} {signature}", OWNER: owner, TARGET: meant, BODY: body}

    def peer(self, marks: Mapping[str, str], status: int, proof: str, refused: bool = False) -> Peer | None:
        """The peer that answered a request with these headers; None without a valid proof."""
        when, _, rest = proof.partition(" ")
        instance, _, signature = rest.partition(" ")
        wanted = self._proof(marks[HOP_MARK], marks[TARGET].partition("@")[2], status, refused, when, instance)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), wanted.encode()):
            return None
        return Peer(instance, float(when) - _clock())

    # --- the peer's side

    def check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises `Unauthorized` unless a proxy of this cluster has signed this request, for this address."""
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
        """Raises `Interrupted` unless a checked request is fresh, for this instance, and new: a repeated one may have
        been accepted the first time."""
        when, nonce = sent_at(headers), nonce_of(headers)
        instance = headers[TARGET].partition("@")[0]
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
        """The proof for the answer to a checked request. `refused`: nothing was done."""
        when = f"{_clock():.3f}"
        signature = self._proof(headers[HOP_MARK], self._address or "", status, refused, when, self._instance)
        return f"{when} {self._instance} {signature}"

    def _proof(self, mark: str, address: str, status: int, refused: bool, when: str, instance: str) -> str:
        return self._sign("answer", mark, address, f"{status} refused" if refused else str(status), when, instance)


def nonce_of(headers: Mapping[str, str]) -> str:
    """The nonce of a checked request, or of one of ours."""
    return headers[HOP_MARK].split(" ")[1]


def sent_at(headers: Mapping[str, str]) -> float:
    """When a checked request was signed, by this proxy's steady clock."""
    return float(headers[HOP_MARK].split(" ")[0])


def caller_of(headers: Mapping[str, str]) -> str:
    """The instance that signed a checked request; "" if it does not say."""
    return nonce_of(headers).rpartition(".")[0]


def decisive(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """A hash of the headers that affect the request's meaning: not those of its transport."""
    named = ((name.lower(), value) for name, value in headers)
    relevant = (
        (name, value)
        for name, value in named
        if name in _DECISIVE or (name.startswith(b"x-") and not name.startswith(_OF_THE_WAY))
    )
    # Of equal names the first one counts, so their order is kept.
    return hashlib.sha256(b"\n".join(map(b":".join, sorted(relevant, key=itemgetter(0))))).hexdigest()


_DECISIVE = frozenset({b"idempotency-key", b"content-type", b"anthropic-beta", b"anthropic-version"})
_OF_THE_WAY = (b"x-cluster-", b"x-forwarded-", b"x-real-ip", b"x-request-id")


def checked(receive: Receive, wanted: str) -> Receive:
    """The same body. Its last piece raises `Unauthorized` if the body is not the signed one."""
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
