"""An application that asks in its own process: the engine that it starts is one more proxy on the same directory."""

from __future__ import annotations

import asyncio
import json
import sys

from cli_session_proxy import ask
from cli_session_proxy.errors import ProxyError


def main() -> None:
    """Reads {"agent", "prompt", "model"} from stdin, and prints {"text"} or {"error"} as one line of JSON."""
    asked = json.loads(sys.stdin.readline())
    try:
        _, text = asyncio.run(ask(asked["prompt"], agent_id=asked["agent"], model=asked["model"]))
        told: dict[str, object] = {"text": text}
    except ProxyError as exc:
        told = {"error": {"code": exc.code, "message": exc.message}}
    print(json.dumps(told), flush=True)
