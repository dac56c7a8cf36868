"""Talk to an engine as a door would, and read what reached the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cli_session_proxy.backends.claude.backend import ClaudeBackend
from cli_session_proxy.domain.lineage import answer_text
from cli_session_proxy.domain.models import Message, Turn, TurnOptions, TurnRequest
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from .outputs import output_of


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Engine]:
    engine = Engine(settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the program logged, as data."""
    return [dict(record.msg) for record in caplog.records if isinstance(record.msg, dict)]


def claude(engine: Engine) -> ClaudeBackend:
    """The backend of an engine that runs the real CLI."""
    assert isinstance(engine.backend, ClaudeBackend)
    return engine.backend


def request(*said: str | Message, agent: str | None = "a", **more: Any) -> TurnRequest:
    """Texts alternate: user, assistant, user, …"""
    messages = tuple(
        text if isinstance(text, Message) else (Message.user if at % 2 == 0 else Message.assistant)(text)
        for at, text in enumerate(said)
    )
    body = json.dumps([agent, more.get("owner"), [message.as_json() for message in messages]])
    given: dict[str, Any] = {"model": "sonnet", "fingerprint": hashlib.sha256(body.encode()).hexdigest()}
    options = TurnOptions(**{name: more.pop(name) for name in TurnOptions.__slots__ if name in more})
    return TurnRequest(messages=messages, agent_id=agent, options=options, **(given | more))


async def ask(engine: Engine, *said: str | Message, agent: str | None = "a", **more: Any) -> Turn:
    """One request, answered and acknowledged."""
    answer = await engine.submit(request(*said, agent=agent, **more))
    try:
        turn = await answer.turn()
        answer.acknowledge()
        return turn
    finally:
        answer.leave()


def text(turn: Turn) -> str:
    return answer_text(turn.output)


def heard(upstream: Upstream) -> list[str]:
    """The user's texts in the last request that reached the model, in order."""
    return upstream.requests[-1].user_texts()


async def by_hand(settings: Settings, session_id: str, said: str) -> str:
    """`claude -p --resume <id>` in the agent's sandbox, by a person with the same configuration; the answer."""
    assert settings.claude_bin is not None
    env = {"PATH": os.environ["PATH"], "CLAUDE_CONFIG_DIR": str(settings.claude_config_dir), **settings.claude_env}
    output = await output_of(
        str(settings.claude_bin), "-p", "--resume", session_id, "--output-format", "json", said,
        cwd=settings.var / "sandbox" / "agents" / "a", env=env,
    )  # fmt: skip
    answer = json.loads(output)
    assert answer["session_id"] == session_id
    return str(answer["result"])
