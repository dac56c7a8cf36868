"""The socket that `serve` listens on: a TCP port, or a unix socket that only this user can open."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from .. import logs
from ..errors import ConfigError
from ..machine import command_to
from ..settings import CONFIG_FILE, Settings
from .keys import Keys
from .served import served_at, server_pid

log = logs.get(__name__)

BACKLOG = 2048
# An address and its counterpart in the other family. A server on `::` listens on IPv6 only.
_OTHERS = {"127.0.0.1": "::1", "::1": "127.0.0.1", "0.0.0.0": "::", "::": "0.0.0.0"}  # noqa: S104 - held, not served
# Seconds to connect: a program that listens on a unix socket accepts at once, or is stuck.
ANSWERS_WITHIN = 1.0


@contextlib.contextmanager
def bound(settings: Settings, keys: Keys | None = None) -> Iterator[socket.socket]:
    """A listening socket during the body; then a unix socket's file is removed. `keys`: those of the settings."""
    listener = bind(settings, keys)
    mine = None if settings.uds is None else _identity(settings.uds)
    try:
        with _other_localhost(listener):
            yield listener
    finally:
        listener.close()
        if settings.uds is not None and _identity(settings.uds) == mine:
            settings.uds.unlink(missing_ok=True)


def bind(settings: Settings, keys: Keys | None = None) -> socket.socket:
    """A listening socket. Raises `ConfigError`, also for an address that others can reach without keys or a gateway."""
    return _tcp(settings, Keys(settings) if keys is None else keys) if settings.uds is None else _unix(settings.uds)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Raises `ConfigError` for an unknown host."""
    return ipaddress.ip_address(_resolved(host, 0)[1].partition("%")[0]).is_loopback


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"host {host!r} cannot be resolved: choose another with --host") from exc
    return family, str(address[0])


def _tcp(settings: Settings, keys: Keys) -> socket.socket:
    host, port = settings.host, settings.port
    family, address = _resolved(host, port)
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached by others and there are no keys: use --host 127.0.0.1, or --make-key, or "
            f'name keys in [keys] of {CONFIG_FILE}, such as alice = "a secret of 16 characters or more"'
        )
    try:
        if sys.platform != "linux" and port and is_served(host, port):
            # On BSD two programs can listen on one port, one at a single address and one at all.
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        here, other = served_at(settings.var), served_already(settings)
        if exc.errno == errno.EADDRINUSE and here is not None and other is not None and here.url.endswith(f":{port}"):
            why = f"is taken by this proxy itself: {other}"
        elif exc.errno == errno.EADDRINUSE:
            names = command_to("see who listens", port=port)
            why = f"is taken by another program: stop that one ({names} names it) or choose another port with --port"
        else:
            why = f"cannot be used ({exc.strerror}): choose another with --port"
        raise ConfigError(f"port {port} on {host} {why}") from exc
    # A socket made from the file descriptor has its protocol set to TCP: only then asyncio sets TCP_NODELAY. Without
    # it, an answer of two writes waits 40 ms for the client's delayed acknowledgement.
    return socket.socket(fileno=listener.detach())


@contextlib.contextmanager
def _other_localhost(listener: socket.socket) -> Iterator[None]:
    """Also occupy the same address of the other family (::1 for 127.0.0.1, :: for 0.0.0.0), and refuse connections
    there: clients that call this machine by a name may try it first, and send a key or a prompt to another program."""
    name = listener.getsockname()
    other = _OTHERS.get(name[0]) if listener.family != socket.AF_UNIX else None
    if other is None or not socket.has_ipv6:
        yield
        return
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET) as held:
        try:
            if held.family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.bind((other, name[1]))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:  # other errors: this machine has no such address
                log.warning("localhost_is_two", here=name[0], other=other, port=name[1])
        yield


def served_already(settings: Settings) -> str | None:
    """A message if another server of this `var` runs."""
    here, pid = served_at(settings.var), server_pid(settings.var)
    if here is None or pid is None:
        return None
    url = urlsplit(here.url)
    if here.uds is None and not is_served(url.hostname or "", url.port or 80):
        return None  # it was killed, and another program has its pid
    return f"this --var is served already, at {here} (page: {here.url}/ui, pid {pid})"


def is_served(host: str, port: int) -> bool:
    """Whether a program listens there, at this address or at all of them."""
    try:
        with socket.create_connection((host or "localhost", port), ANSWERS_WITHIN):
            return True
    except OSError:
        return False


def _unix(path: Path) -> socket.socket:
    """Created with mode 0600. A socket without a listener is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode  # one look: another starting proxy may remove it meanwhile
            if not stat.S_ISSOCK(mode):
                raise ConfigError(f"--uds {path} exists and is not a socket: not touched, choose another path")
            if answers(path):
                raise ConfigError(f"--uds {path} is taken by another program: stop that one or choose another path")
            path.unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        why = exc.strerror or str(exc)
        raise ConfigError(f"--uds {path} cannot be used ({why}): choose a short path in a directory of yours") from exc
    except BaseException:
        listener.close()
        raise
    return listener


def answers(path: Path) -> bool:
    """Whether a program listens on this unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.settimeout(ANSWERS_WITHIN)
        try:
            knocking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue, or another user's: something listens
            return True
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
