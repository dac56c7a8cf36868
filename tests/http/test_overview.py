"""The overview: sums by day and model, agents that need a look, and nothing of other owners."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
from pydantic import SecretStr

from cli_session_proxy.domain.models import Message, Status, Usage
from cli_session_proxy.http.ui.overview import DAY, DAYS, needing, summed
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import ImportedTurn, TurnFacts

from ..serving import serving
from ..talking import running

NOW = 1_790_000_000.0


def fact(n: int, *, agent: int = 1, status: Status = "completed", ago: float = 60.0, **more: object) -> TurnFacts:
    at = NOW - ago
    known: dict[str, object] = {
        "id": f"t{n}", "seq": n, "agent_key": agent, "status": status, "model": "sonnet", "created_at": at,
        "finished_at": at, "cost_usd": 0.5, "usage": Usage(10, 5, 80, 10), "code": None, "repairs": 0,
    }  # fmt: skip
    return TurnFacts(**known | more)  # type: ignore[arg-type]


def why(*facts: TurnFacts) -> list[tuple[int, str, str]]:
    return [(key, code, says) for key, _, _, code, says in needing(sorted(facts, key=lambda one: -one.seq), NOW)]


def test_days_and_models_are_summed_up() -> None:
    facts = [
        fact(1, ago=2 * DAY), fact(2, model="opus", cost_usd=2.0), fact(3, status="failed", cost_usd=None),
        fact(4, status="refused", repairs=1), fact(5, ago=DAYS * DAY + 3600),
    ]  # fmt: skip
    days, models = summed(facts, NOW)
    assert len(days) == DAYS
    assert [day["turns"] for day in days[-3:]] == [1, 0, 3]
    today = days[-1]
    assert (today["cost_usd"], today["failed"], today["refused"], today["repairs"]) == (2.5, 1, 1, 1)
    assert (today["input_tokens"], today["cache_read_tokens"]) == (30, 240)
    assert [(row["model"], row["turns"], row["cost_usd"]) for row in models] == [("opus", 1, 2.0), ("sonnet", 4, 1.5)]


def test_trouble_is_not_hidden_by_the_last_status() -> None:
    assert why(fact(1, status="failed", code="overloaded"), fact(2)) == [
        (1, "failures", "1 turn of the last day came to nothing (overloaded)")
    ]
    assert why(fact(1, status="failed", code="overloaded", ago=2 * DAY), fact(2)) == []


def test_an_agent_of_which_every_turn_fails_comes_first() -> None:
    lost = [fact(n, status="failed", code="upstream_error") for n in (2, 3)]
    assert why(fact(1), *lost, fact(4, agent=2, status="refused")) == [
        (1, "stuck", "its last 2 turns in a row came to nothing (upstream_error)"),
        (2, "failed", "its last turn came to nothing (refused)"),
    ]
    # what somebody cancelled is no failure, and hides none
    assert why(*lost, fact(5, status="cancelled"))[0][1] == "stuck"
    assert why(fact(1), fact(2, status="cancelled")) == []


def test_repairs_are_told_where_they_are_fresh_or_many() -> None:
    assert why(fact(1, repairs=1), fact(2)) == [(1, "repaired", "repaired 1 time within 1 day")]
    assert why(fact(1, repairs=2, ago=2 * DAY), fact(2)) == []
    often = [fact(n, repairs=1, ago=2 * DAY) for n in (1, 2, 3)]
    assert why(*often, fact(4)) == [(1, "repaired", f"repaired 3 times within {DAYS} days")]


def test_what_waits_for_long_is_told() -> None:
    assert why(fact(1, status="running", ago=3600, finished_at=None))[0][1:] == ("long", "its turn has not ended")
    assert why(fact(1, status="running", finished_at=None)) == []
    assert why(fact(1, status="requires_action", ago=3600))[0][1] == "results"
    assert why(fact(1, status="requires_action", ago=3600), fact(2)) == []


async def test_each_key_is_told_of_its_own_turns(tmp_path: Path) -> None:
    keys = {"alice": "alices-secret-0123456789", "bob": "bobs-secret-0123456789"}
    settings = Settings(
        var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config",
        keys={name: SecretStr(key) for name, key in keys.items()},
    )  # fmt: skip
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        agent = await engine.store.ensure_agent("alice", "alices", "dir-a", named=True, now=1.0)
        said = (Message.user("the key is sk-ant-api03-abcdefghijklmnop"),)
        usage = Usage(10, 5, 90, 0)
        turn = ImportedTurn("turn_a", agent.key, None, "opus", said, (), (), time.time(), None, 0, usage=usage)
        await engine.store.import_turns([turn], head=turn.id)
        assert (await http.get("/overview")).status_code == 401
        told = {name: (await http.get("/overview", headers={"X-Api-Key": key})).json() for name, key in keys.items()}
        assert (told["alice"]["owner"], told["alice"]["turns"], told["bob"]["turns"]) == ("alice", 1, 0)
        assert [row["model"] for row in told["alice"]["models"]] == ["opus"]
        assert told["alice"]["store_bytes"] > 0
        for name, key in keys.items():
            found = (await http.get("/previews?agent=alices&agent=nobody", headers={"X-Api-Key": key})).json()["data"]
            shown = {"agent_id": "alices", "turn_id": "turn_a", "asked": "the key is [redacted]", "answered": ""}
            assert found == ([shown] if name == "alice" else [])
        many = "&".join(f"agent={n}" for n in range(21))
        assert (await http.get(f"/previews?{many}", headers={"X-Api-Key": keys["alice"]})).status_code == 400
