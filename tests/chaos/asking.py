"""An application that asks in its own process: the engine that it starts is one more proxy on the same directory."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

from openai import OpenAIError

from cli_session_proxy import ask
from cli_session_proxy.errors import ProxyError


def main() -> None:
    """Reads {"by", "agent", "prompt", "model"} from stdin, and prints {"text"} or {"error"} as one line of JSON."""
    asked = json.loads(sys.stdin.readline())
    told = _by_litellm(asked) if asked["by"] == "litellm" else _by_engine(asked)
    print(json.dumps(told), flush=True)


def _by_engine(asked: dict[str, str]) -> dict[str, Any]:
    try:
        _, text = asyncio.run(ask(asked["prompt"], agent_id=asked["agent"], model=asked["model"]))
    except ProxyError as exc:
        return {"error": {"code": exc.code, "message": exc.message}}
    return {"text": text}


def _by_litellm(asked: dict[str, str]) -> dict[str, Any]:
    litellm = import_module("litellm")  # a second of a processor, for this door alone
    import_module("cli_session_proxy.provider").register()
    try:
        answer = litellm.completion(
            model=f"claude-cli/{asked['model']}",
            agent_id=asked["agent"],
            messages=[{"role": "user", "content": asked["prompt"]}],
            num_retries=0,
        )
    except OpenAIError as exc:  # LiteLLM's own are of these
        return {"error": {"code": type(exc).__name__, "message": str(exc)}}
    return {"text": answer.choices[0].message.content}
