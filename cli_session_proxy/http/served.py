"""The address of a running server, in a file in `var`, where commands find it whatever its port or socket.

A killed server leaves the file, and another user's program may have its port by then. So the file also has a secret:
a server must prove that it knows the secret before a command sends it a key or a text.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SERVED = "serve.json"
# The Host for requests over a unix socket, which the gate accepts.
OVER_SOCKET = "http://localhost"
# Headers of a request for /healthz (any text), and of its answer (the text's HMAC-SHA256 with the secret).
CHALLENGE, PROOF = "x-serve-challenge", "x-serve-proof"


@dataclass(frozen=True, slots=True)
class Served:
    """Requests for `url` go over the unix socket `uds`, if it has one. `secret`: None for an earlier version."""

    url: str
    uds: str | None = None
    secret: str | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.url if self.uds is None else f"unix:{self.uds}"


@contextlib.contextmanager
def announced(var: Path, listener: socket.socket) -> Iterator[str]:
    """Write the file for the body, which gets its secret. Afterwards, restore the file of a former server that still
    runs, else remove it. A file that another server has replaced meanwhile is left alone."""
    path = var / SERVED
    where, former = place_of(listener), _read(path)
    secret = secrets.token_hex(32)
    _write(path, {"url": where.url, "uds": where.uds, "pid": os.getpid(), "secret": secret})
    try:
        yield secret
    finally:
        if _read(path).get("pid") == os.getpid():
            if _lives(former.get("pid")):
                _write(path, former)
            else:
                path.unlink(missing_ok=True)


def served_at(var: Path) -> Served | None:
    """The address of the server of this `var`, which may have died: verify it by /healthz with a challenge."""
    content = _read(var / SERVED)
    url, *rest = (content.get(name) for name in ("url", "uds", "secret"))
    uds, secret = (text if isinstance(text, str) else None for text in rest)
    return Served(url, uds, secret) if isinstance(url, str) else None


def proof(secret: str, challenge: str) -> str:
    return hmac.digest(secret.encode(), challenge.encode("utf-8", "replace"), "sha256").hex()


def server_pid(var: Path) -> int | None:
    """The process of another server of this `var`, while it lives."""
    pid = _read(var / SERVED).get("pid")
    return pid if isinstance(pid, int) and _lives(pid) else None


def _lives(pid: object) -> bool:
    """Whether another process than this one has this pid."""
    if not isinstance(pid, int) or pid <= 0 or pid == os.getpid():
        return False
    with contextlib.suppress(PermissionError):  # it lives, and belongs to another user
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _write(path: Path, content: dict[str, object]) -> None:
    fresh = path.with_suffix(f".{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps(content))
    fresh.replace(path)


def _read(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def place_of(listener: socket.socket) -> Served:
    if listener.family == socket.AF_UNIX:
        return Served(OVER_SOCKET, str(listener.getsockname()))
    host, port = listener.getsockname()[:2]
    return Served(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
