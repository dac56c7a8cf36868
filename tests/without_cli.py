"""The scripted upstream behind the real core, store and doors, without a CLI in between: for what no CLI decides.

What a test scripts (`upstream.next`, `upstream.when`) and reads (`upstream.requests`) is as with the real CLI. A
request holds the path that the core gave the backend. That the CLI shows the model the same path, and what it does of
its own (its errors, its tools, what it asks again, which parameters it takes), only a test with the real one can tell.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from cli_session_proxy.backends.base import Adoptable, AnswerBlocks, Called, Completed, Event, Execution, Job, Refused
from cli_session_proxy.backends.litellm.messages import OPENED_BY_ASSISTANT
from cli_session_proxy.domain.client_tools import PREFIX, answers, as_cli
from cli_session_proxy.domain.models import (
    THINKING,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Message,
    Turn,
    Usage,
)
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest, ProxyError, UpstreamError
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.base import Store
from turnfault.provider.upstream import Upstream

from .memory_backend import MemoryBackend
from .serving import serving

JSON = dict[str, Any]
# Where a delta's words stand in it, and where in its block.
FIELDS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", "input"),
}


@asynccontextmanager
async def running_without_cli(settings: Settings, upstream: Upstream) -> AsyncIterator[Engine]:
    engine = engine_without_cli(settings, upstream)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def proxied_without_cli(settings: Settings, upstream: Upstream) -> AsyncIterator[tuple[Engine, str]]:
    """A running engine behind a server, and the root of its addresses."""
    async with running_without_cli(settings, upstream) as engine, serving(engine, settings) as base:
        yield engine, base.removesuffix("/v1")


def engine_without_cli(settings: Settings, upstream: Upstream) -> Engine:
    store = store_for(settings)
    return Engine(settings, store, ScriptedModel(upstream, store))


class ScriptedModel(MemoryBackend):
    """Asks the upstream for each turn, with the turn's path as the store has it."""

    def __init__(self, upstream: Upstream, store: Store) -> None:
        super().__init__()
        self.store = store
        self.http = httpx.AsyncClient(base_url=upstream.url, trust_env=False, timeout=None)

    async def close(self) -> None:
        await self.http.aclose()

    async def prepare(self, job: Job) -> Execution | Adoptable:
        execution: Any = await super().prepare(job)
        path = await self.store.path(job.parent.id) if job.parent is not None else []

        async def say() -> AsyncGenerator[Event, None]:
            blocks: list[Block] = []
            execution.path = (Message("user", job.prompt), Message("assistant", ()))  # `keep` puts the answer there
            async with self.http.stream("POST", "/v1/messages", json=body_of(job, path)) as response:
                if response.status_code != 200:
                    raise error_of(response.status_code, json.loads(await response.aread()))
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        for event in read(json.loads(line.removeprefix("data: ")), blocks, job):
                            yield event

        execution.say = say
        made: Execution = execution
        return made


def body_of(job: Job, path: Sequence[Turn]) -> JSON:
    """The request of the Messages API for a job behind this path."""
    messages: list[JSON] = []
    for turn, before in zip(path, [None, *path], strict=False):
        results, rest = answers(before.output if before else (), turn.input)
        asked = [*results.values(), *rest] or [{"type": "text", "text": OPENED_BY_ASSISTANT}]
        if turn.input or before is None:  # else it is an answer behind an answer
            messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": as_cli(b for b in turn.output if b["type"] not in THINKING)})
    messages.append({"role": "user", "content": [*job.results.values(), *job.prompt]})
    body: JSON = {
        "model": job.model,
        "max_tokens": job.turn.options.parameters.max_tokens or 64_000,
        "stream": True,
        "messages": messages,
    }
    if job.system is not None:
        body["system"] = [{"type": "text", "text": job.system}]
    if job.offers:
        body["tools"] = [
            {"name": PREFIX + name, "description": entry["description"], "input_schema": entry["inputSchema"]}
            for name, entry in job.offers.entries.items()
        ]
    return body


def read(event: JSON, blocks: list[Block], job: Job) -> list[Event]:
    """What one event of the upstream's stream says; `blocks` are those of the answer so far, and grow by it."""
    match event["type"]:
        case "content_block_start":
            block = event["content_block"]
            if (tool := job.offers.called(str(block.get("name")))) is not None:
                block = {**block, "name": tool.name}
            blocks.append({**block, "input": ""} if block["type"] == "tool_use" else dict(block))
            return [BlockStart(event["index"], block)]
        case "content_block_delta":
            theirs, ours = FIELDS[event["delta"]["type"]]
            blocks[-1][ours] += event["delta"][theirs]
            return [BlockDelta(event["index"], event["delta"])]
        case "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(blocks[-1]["input"])
            return [BlockStop(event["index"])]
        case "message_delta":
            return [AnswerBlocks(tuple(blocks)), end_of(event, blocks)]
    return []


def end_of(event: JSON, blocks: Sequence[Block]) -> Called | Completed | Refused:
    used, ended = event["usage"], event["delta"]
    usage = Usage(
        used["input_tokens"],
        used["output_tokens"],
        used["cache_read_input_tokens"],
        used["cache_creation_input_tokens"],
    )
    if ended["stop_reason"] == "refusal":
        return Refused(ended["stop_details"]["category"], ended["stop_details"]["explanation"], usage)
    if calls := tuple(block for block in blocks if block["type"] == "tool_use"):
        return Called(calls, usage)
    return Completed(ended["stop_reason"], usage, None, ended["stop_sequence"])


def error_of(status: int, body: JSON) -> ProxyError:
    """An error of the upstream in its own words: those of the CLI are not looked at here."""
    kind = InvalidRequest if status == 400 else UpstreamError
    return kind(body["error"]["message"], detail={"status": status})
