"""Where a running server listens, said in `var`, so that the commands find it whatever its port."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

SERVED = "serve.json"


@contextlib.contextmanager
def announced(var: Path, listener: socket.socket) -> Iterator[None]:
    """The file is there while the body runs. One that another server has replaced meanwhile is left alone."""
    path = var / SERVED
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"url": url_of(listener), "pid": os.getpid()}))
    fresh.replace(path)
    try:
        yield
    finally:
        if _read(path).get("pid") == os.getpid():
            path.unlink(missing_ok=True)


def served_at(var: Path) -> str | None:
    """The URL of a server that serves this `var`. It may be dead since: ask its /healthz."""
    url = _read(var / SERVED).get("url")
    return url if isinstance(url, str) else None


def _read(path: Path) -> dict[str, object]:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
