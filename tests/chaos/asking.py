"""An application that asks in its own process: the engine that it starts is one more proxy on the same directory."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from typing import Any

from openai import OpenAIError

from cli_session_proxy import ask
from cli_session_proxy.domain.lineage import TEXT_JOIN
from cli_session_proxy.errors import ProxyError


def main() -> None:
    """Reads {"by", "agent", "prompt", "model"} from stdin, and prints {"text"} or {"error"} as one line of JSON."""
    asked = json.loads(sys.stdin.readline())
    ask = {"litellm": _by_litellm, "sdk": _by_sdk, "engine": _by_engine}[asked["by"]]
    print(json.dumps(ask(asked)), flush=True)


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


def _by_sdk(asked: dict[str, str]) -> dict[str, Any]:
    """The application runs the CLI itself, and continues the session that the chain gives it."""
    sdk, store = import_module("claude_agent_sdk"), import_module("cli_session_proxy.sdk")

    async def said() -> list[Any]:
        chain = store.ChainSessionStore(asked["agent"])
        options = sdk.ClaudeAgentOptions(
            session_store=chain, cwd=await chain.directory(), continue_conversation=True, tools=[], setting_sources=[],
            model=asked["model"], cli_path=os.environ["CLI_SESSION_PROXY_CLAUDE_BIN"],
            env={**json.loads(os.environ["CLI_SESSION_PROXY_CLAUDE_ENV"]), "CLAUDE_CONFIG_DIR": asked["config_dir"]},
        )  # fmt: skip
        return [message async for message in sdk.query(prompt=asked["prompt"], options=options)]

    try:
        messages = asyncio.run(said())
    except (ProxyError, sdk.ClaudeSDKError) as exc:
        return {"error": {"code": type(exc).__name__, "message": str(exc)}}
    ended = [message for message in messages if isinstance(message, sdk.ResultMessage)]
    if not ended or ended[-1].is_error:
        return {"error": {"code": "no answer", "message": str(ended)}}
    spoken = [block for message in messages if isinstance(message, sdk.AssistantMessage) for block in message.content]
    return {"text": TEXT_JOIN.join(block.text for block in spoken if isinstance(block, sdk.TextBlock))}
