"""Over HTTP no secret is shown in any form unless it is asked for, and then only in what was said."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import Link, Message, Record, Session
from cli_session_proxy.export.formats import FORMATS
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import ChainPart, NewChain, WholeTurn

from ..fakes import SESSION, block, turn
from ..serving import serving
from ..talking import running

SAID = "sk-ant-api03-said-abcdef123456"
NEVER = "sk-ant-api03-never-abcdef123456"
ROW = turn(
    1, input=(Message.user(f"my key is {SAID}"),), output=(block(SAID),), status="failed",
    error={"code": "x", "message": NEVER}, evidence=Evidence(sandbox=NEVER),
    attempts=({"n": 1, "status": "failed", "why": NEVER}, {"n": 2}), tools=({"input": {"x": SAID}},),
)  # fmt: skip
LINK = Link(SESSION, SESSION, "turn_1", "rebuilt", {"found": "missing", "note": NEVER}, 1.0)
VIEWS = ("/a/turns", "/a/turns/turn_1", "/a/turns/turn_1/transcript", "/a/repairs")


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config")
    async with running(settings) as engine, serving(engine, settings) as url:
        parts: list[ChainPart] = [
            WholeTurn(ROW, (Record("{}"),)),
            Session(SESSION, 0, "turn_1", "", "2.1.329", 1.0),
            LINK,
        ]
        await engine.store.import_chain(NewChain("local", "a", "a", True, 1.0, time.time(), lambda: None), parts)
        async with httpx.AsyncClient(base_url=f"{url}/chains", trust_env=False) as client:
            yield client


@pytest.mark.parametrize("address", [*(f"/a?format={name}" for name in FORMATS), *VIEWS])
async def test_nothing_is_shown_that_nobody_asked_for(http: httpx.AsyncClient, address: str) -> None:
    answer = await http.get(address)
    assert answer.status_code == 200
    assert SAID not in answer.text
    assert NEVER not in answer.text


@pytest.mark.parametrize("address", ["/a?format=json&", "/a?format=markdown&", "/a?format=html&", "/a/turns/turn_1?"])
async def test_what_was_said_is_shown_to_who_asks_and_nothing_else(http: httpx.AsyncClient, address: str) -> None:
    text = (await http.get(f"{address}redact=0")).text
    assert text.count(SAID) >= 3
    assert NEVER not in text
    assert SAID not in (await http.get(f"{address}redact=1")).text


async def test_the_live_stream_hides_it_too(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/a/events", headers={"Last-Event-ID": "0"}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                break
    assert json.loads(line.removeprefix("data: "))["turn"]["id"] == "turn_1"
    assert "my key is [redacted]" in line
    assert SAID not in line
    assert NEVER not in line


@pytest.mark.parametrize("address", ["/a?", "/a/turns/turn_1?"])
@pytest.mark.parametrize("value", ["", "yes", "2", "true"])
async def test_a_switch_is_one_or_zero(http: httpx.AsyncClient, address: str, value: str) -> None:
    answer = await http.get(f"{address}redact={value}")
    assert answer.status_code == 400
    assert "redact must be 1 or 0" in answer.json()["error"]["message"]
