"""The address of a running server, kept in `var`: the commands find it there whatever its port or socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERVED = "serve.json"
# A unix socket has no address of its own; this name passes the gate.
OVER_SOCKET = "http://localhost"


@dataclass(frozen=True, slots=True)
class Served:
    """`url` is asked at the unix socket `uds` where there is one."""

    url: str
    uds: str | None = None

    def __str__(self) -> str:
        return self.url if self.uds is None else f"unix:{self.uds}"


@contextlib.contextmanager
def announced(var: Path, listener: socket.socket) -> Iterator[None]:
    """The file is there while the body runs. One that another server has replaced meanwhile is left alone."""
    path = var / SERVED
    where = place_of(listener)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"url": where.url, "uds": where.uds, "pid": os.getpid()}))
    fresh.replace(path)
    try:
        yield
    finally:
        if _read(path).get("pid") == os.getpid():
            path.unlink(missing_ok=True)


def served_at(var: Path) -> Served | None:
    """The address of the server of this `var`. It may have died since: ask its /healthz."""
    said = _read(var / SERVED)
    url, uds = said.get("url"), said.get("uds")
    return Served(url, uds if isinstance(uds, str) else None) if isinstance(url, str) else None


def server_pid(var: Path) -> int | None:
    """The process of the server of this `var`, while it lives."""
    pid = _read(var / SERVED).get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return None
    with contextlib.suppress(PermissionError):  # it is there, and another user's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
    return pid


def _read(path: Path) -> dict[str, object]:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def place_of(listener: socket.socket) -> Served:
    if listener.family == socket.AF_UNIX:
        return Served(OVER_SOCKET, str(listener.getsockname()))
    host, port = listener.getsockname()[:2]
    return Served(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
