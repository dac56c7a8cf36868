"""Five turns that only a memory can answer, for every client and wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import ollama
from google import genai
from google.genai import types
from google.genai.client import AsyncClient

from cli_session_proxy.domain.models import ChainSummary, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from .serving import serving
from .talking import running

FACTS = {"the colour": "teal", "the number": "7", "the city": "Oslo", "the tree": "ash"}
RECALLED = "I remember: colour is teal; number is 7; city is Oslo; tree is ash."
Say = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def google_client(root: str, headers: dict[str, str] | None = None) -> AsyncIterator[AsyncClient]:
    """google-genai over httpx: its other transport, aiohttp, warns about google-genai itself."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        options = types.HttpOptions(base_url=root, httpx_async_client=http, headers=headers)
        async with genai.Client(api_key="k", http_options=options).aio as client:
            yield client


def ollama_client(root: str, **headers: str) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=root, headers=headers, trust_env=False, timeout=30)


@asynccontextmanager
async def proxied(settings: Settings) -> AsyncIterator[tuple[Engine, str]]:
    """A running engine behind a server, and the root of its addresses."""
    async with running(settings) as engine, serving(engine, settings) as base:
        yield engine, base.removesuffix("/v1")


async def five_turns(say: Say, upstream: Upstream) -> None:
    """Four facts, then all of them; what the model was shown grows by one user text a turn, and nothing else."""
    for number, (name, value) in enumerate(FACTS.items(), 1):
        assert await say(f"Remember: {name} is {value}") == f"Noted: {name.removeprefix('the ')} is {value}."
        assert len(upstream.requests[-1].user_texts()) == number
    assert await say("recall") == RECALLED
    expected = [*(f"Remember: {name} is {value}" for name, value in FACTS.items()), "recall"]
    assert upstream.requests[-1].user_texts() == expected


async def chains(engine: Engine) -> list[ChainSummary]:
    return [row async for row in engine.store.summaries("local")]


async def the_one_chain(engine: Engine, turns: int = 5) -> list[Turn]:
    """The turns of the only agent, one path without a branch, in its order."""
    [row] = await chains(engine)
    found = {turn.id async for turn in engine.store.turns(row.agent.key)}
    assert row.agent.head is not None
    path = await engine.store.path(row.agent.head)
    assert {turn.id for turn in path} == found
    assert len(path) == turns
    return path
