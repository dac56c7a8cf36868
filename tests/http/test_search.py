"""`GET /v1/search`: what it finds, for whom, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from cli_session_proxy.domain.models import Message
from cli_session_proxy.settings import Settings
from cli_session_proxy_store_conformance.samples import a_finished_turn

from ..serving import serving
from ..talking import running

KEYS = {"alice": "alices-secret-0123456789", "bob": "bobs-secret-0123456789"}


async def test_each_key_finds_its_own_turns_with_snippet_and_link(tmp_path: Path) -> None:
    keys = {name: SecretStr(key) for name, key in KEYS.items()}
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config", keys=keys)
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        for owner in KEYS:
            agent = await engine.store.ensure_agent(owner, f"{owner}/a", f"dir-{owner}", named=True, now=1.0)
            said = (Message.user(f"the milk of {owner}"),)
            turn = a_finished_turn(f"turn_{owner}", agent.key, None, "sonnet", said, (), (), 5.0, None, 0)
            await engine.store.import_turns([turn], head=turn.turn.id)
        assert (await http.get("/search?q=milk")).status_code == 401
        found = (await http.get("/search?q=milk", headers={"X-Api-Key": KEYS["alice"]})).json()
        assert (found["agents"], found["turns"], found["indexed"]) == (1, 1, {"done": 2, "total": 2})
        (hit,) = found["data"]
        assert hit["page"] == "/ui#/alice%2Fa/turn_alice"
        assert hit["snippet"] == [
            {"text": "the ", "found": False}, {"text": "milk", "found": True}, {"text": " of alice", "found": False},
        ]  # fmt: skip


@pytest.mark.parametrize(
    "query",
    [
        f"q={'x' * 401}", "since=soon", "since=%FF", "until=99999999999d", "status=broken", "repaired=2", "limit=0",
        "min_cost=-1", "min_cost=nan", "min_cost=inf", "min_cost=free",
    ],
)  # fmt: skip
async def test_what_it_cannot_ask_for_is_refused_by_name(tmp_path: Path, query: str) -> None:
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config")
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        answer = await http.get(f"/search?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]
