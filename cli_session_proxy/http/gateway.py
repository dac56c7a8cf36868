"""A gateway in front that authenticates users, and names them in a header: `trusted_header`.

It is identified by the address of the socket's peer, never by a header. A program on this machine may belong to an
agent, and can use any address of this machine: these are only trusted if the settings name loopback.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import InvalidRequest, Unauthorized
from ..sandbox import LOCAL_OWNER
from ..settings import Settings

if TYPE_CHECKING:
    from starlette.types import Scope

Address = IPv4Address | IPv6Address

# Valid names of owners.
OWNER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Gateway:
    """The configured gateway: its header, and its addresses."""

    def __init__(self, settings: Settings) -> None:
        self.header = settings.trusted_header or ""
        self._networks = settings.trusted_header_from
        self._here = any(network.is_loopback for network in self._networks)

    def believes(self, scope: Scope) -> Address | None:
        """The peer's address, if it is the gateway; else None."""
        peer = peer_of(scope)
        if peer is None or not any(peer in network for network in self._networks):
            return None
        return peer if self._here or not is_this_machine(peer) else None

    def owner_of(self, scope: Scope) -> str:
        """The owner that the gateway names. Raises `Unauthorized` if it names none, `InvalidRequest` for several or an
        invalid name."""
        header = self.header.lower().encode()
        names = [value.decode("latin-1").strip() for name, value in scope["headers"] if name.lower() == header]
        if not any(names):
            raise Unauthorized(f"the gateway sent no {self.header}: it has to name the owner")
        if len(names) > 1:
            raise InvalidRequest(
                f"the {self.header} header occurs {len(names)} times: the gateway has to replace what a client sends",
                param=self.header,
            )
        if not OWNER_NAME.fullmatch(names[0]) or names[0] == LOCAL_OWNER:
            raise InvalidRequest(
                f"the {self.header} header does not hold one owner: up to 64 letters, digits and . _ @ -, and not "
                f"{LOCAL_OWNER!r}, who is this machine's own",
                param=self.header,
            )
        return str(names[0])


def peer_of(scope: Scope) -> Address | None:
    """The other end of the socket; None for a unix socket. IPv4 within IPv6 is IPv4."""
    try:
        peer = ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return None
    return getattr(peer, "ipv4_mapped", None) or peer


def is_this_machine(peer: Address) -> bool:
    """Whether it is loopback or an address of this machine. To reach such an address, the kernel chooses it or another
    one of the same interface as the source."""
    if peer.is_loopback:
        return True
    import psutil  # noqa: PLC0415 - 7 ms, which a command does without

    addresses = (each.address.partition("%")[0] for own in psutil.net_if_addrs().values() for each in own)
    if str(peer) in addresses:
        return True
    with socket.socket(socket.AF_INET if peer.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(peer), 9))  # sends nothing
            return ip_address(probe.getsockname()[0]) == peer
        except OSError as exc:  # the machine's own addresses are always reachable
            return exc.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH)


async def is_among(peer: Address, urls: Iterable[str]) -> bool:
    """Whether the peer has the address of one of these servers. A name that does not resolve matches every peer."""
    for url in urls:
        try:
            addresses = await asyncio.get_running_loop().getaddrinfo(urlsplit(url).hostname, None)
        except OSError:
            return True
        if any(ip_address(str(address[0]).partition("%")[0]) == peer for *_, address in addresses):
            return True
    return False
