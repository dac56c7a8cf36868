"""The overview: sums by day and model, agents that need a look, and nothing of other owners."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from cli_session_proxy.domain.models import Message, Status, Turn, Usage
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.export.lists import DAY, DAYS, summed
from cli_session_proxy.http.keys import make_key
from cli_session_proxy.http.ui.overview import in_need_of_attention
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import NewChain, TurnFacts, WholeTurn
from cli_session_proxy_store_conformance.samples import a_finished_turn

from ..engine.test_core import Model, core
from ..serving import serving
from ..talking import running

NOW = 1_790_000_000.0


def fact(n: int, *, agent: int = 1, status: Status = "completed", ago: float = 60.0, **more: object) -> TurnFacts:
    at = NOW - ago
    known: dict[str, object] = {
        "id": f"t{n}", "seq": n, "agent_key": agent, "owner": "local", "status": status, "model": "sonnet",
        "created_at": at, "finished_at": at, "cost_usd": 0.5, "usage": Usage(10, 5, 80, 10), "code": None, "repairs": 0,
    }  # fmt: skip
    return TurnFacts(**known | more)  # type: ignore[arg-type]


def why(*facts: TurnFacts) -> list[tuple[int, str, str]]:
    newest_first = sorted(facts, key=lambda one: -one.seq)
    return [(key, code, says) for key, _, _, code, says in in_need_of_attention(newest_first, NOW)]


def test_days_models_and_keys_are_summed_up() -> None:
    facts = [
        fact(1, ago=2 * DAY), fact(2, model="opus", cost_usd=2.0), fact(3, status="failed", cost_usd=None),
        fact(4, status="refused", repairs=1, owner="alice"), fact(5, ago=DAYS * DAY + 3600),
    ]  # fmt: skip
    days, models, keys = summed(facts, NOW)
    assert len(days) == DAYS
    assert [day["turns"] for day in days[-3:]] == [1, 0, 3]
    today = days[-1]
    assert (today["cost_usd"], today["failed"], today["refused"], today["repairs"]) == (2.5, 1, 1, 1)
    assert (today["input_tokens"], today["cache_read_tokens"]) == (30, 240)
    assert [(row["model"], row["turns"], row["cost_usd"]) for row in models] == [("opus", 1, 2.0), ("sonnet", 4, 1.5)]
    assert [(row["key"], row["turns"], row["cost_usd"]) for row in keys] == [("local", 4, 3.0), ("alice", 1, 0.5)]
    # what is older than the first of these days is in no day's sum
    assert sum(day["turns"] for day in days) == 4


def test_trouble_is_not_hidden_by_the_last_status() -> None:
    assert why(fact(1, status="failed", code="overloaded"), fact(2)) == [
        (1, "failures", "1 turn failed within a day, but not the last: the provider was overloaded")
    ]
    assert why(fact(1, status="failed", code="overloaded", ago=2 * DAY), fact(2)) == []


def test_an_agent_of_which_every_turn_fails_comes_first() -> None:
    lost = [fact(n, status="failed", code="upstream_error") for n in (2, 3)]
    assert why(fact(1), *lost, fact(4, agent=2, status="failed", code="rate_limited")) == [
        (1, "stuck", "its last 2 turns failed: the provider or the CLI failed"),
        (2, "failed", "its last turn failed: the provider's limit was reached"),
    ]
    # what somebody cancelled is no failure, and hides none
    assert why(*lost, fact(5, status="cancelled"))[0][1] == "stuck"
    assert why(fact(1), fact(2, status="cancelled")) == []


def test_what_was_repaired_or_refused_and_went_on_needs_nobody() -> None:
    assert why(*(fact(n, repairs=1) for n in range(1, 9))) == []
    assert why(fact(1, status="refused"), fact(2)) == []


def test_one_refusal_needs_nobody_and_the_second_in_a_row_does() -> None:
    refused = [fact(n, status="refused", code="refused") for n in (3, 4)]
    assert why(fact(1), refused[0]) == []
    says = "the model refused its last 2 turns: rewind the agent, or ask for something else"
    assert why(fact(1), *refused) == [(1, "refused", says)]
    assert why(fact(1, status="failed", code="overloaded", ago=2 * DAY), refused[0]) == []


def test_a_short_name_is_counted_with_the_one_model_that_it_means() -> None:
    full = "claude-sonnet-5-5"
    facts = [fact(1), fact(2, model=full), fact(3, model="opus"), fact(4, model="claude-opus-5"), fact(5, model="gpt")]
    names = {row["model"]: row["turns"] for row in summed(facts, NOW)[1]}
    assert names == {full: 2, "claude-opus-5": 2, "gpt": 1}
    # which of two it means nobody knows
    assert [row["turns"] for row in summed([*facts[:2], fact(6, model="claude-sonnet-6")], NOW)[1]] == [1, 1, 1]


def test_what_waits_for_long_is_told() -> None:
    assert why(fact(1, status="running", ago=3600, finished_at=None))[0][1:] == (
        "long",
        "its turn takes unusually long",
    )
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
        turn = a_finished_turn("turn_a", agent.key, None, "opus", said, (), (), time.time(), None, 0, usage=usage)
        await engine.store.import_turns([turn], head=turn.turn.id)
        assert (await http.get("/overview")).status_code == 401
        told = {name: (await http.get("/overview", headers={"X-Api-Key": key})).json() for name, key in keys.items()}
        assert (told["alice"]["owner"], told["alice"]["turns"], told["bob"]["turns"]) == ("alice", 1, 0)
        assert [row["model"] for row in told["alice"]["models"]] == ["opus"]
        assert told["alice"]["store_bytes"] > 0
        for name, key in keys.items():
            found = (await http.get("/previews?agent=alices&agent=nobody", headers={"X-Api-Key": key})).json()["data"]
            shown = {"agent_id": "alices", "turn_id": "turn_a", "asked": "the key is [redacted]", "answered": ""}
            shown["title"] = "alices"
            assert found == ([shown] if name == "alice" else [])
        many = "&".join(f"agent={n}" for n in range(21))
        assert (await http.get(f"/previews?{many}", headers={"X-Api-Key": keys["alice"]})).status_code == 400


async def test_a_store_that_takes_nothing_is_why_it_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config")
    async with running(settings) as engine, serving(engine, settings) as url:

        async def full() -> None:
            raise StoreUnavailable("database or disk is full")

        monkeypatch.setattr(engine.store, "probe", full)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            told = (await http.get("/overview")).json()["status"]
        assert not told["working"]
        assert told["problem"] == "database or disk is full"


async def spent(http: httpx.AsyncClient, key: str | None) -> dict[str, float] | None:
    """What the overview says of each key to this one; None where it says nothing of others."""
    found = (await http.get("/overview", headers={} if key is None else {"X-Api-Key": key})).json()
    if found["keys"] is None:
        return None
    assert found["turns"] == sum(row["turns"] for row in found["keys"]) == sum(day["turns"] for day in found["days"])
    return {row["key"]: row["cost_usd"] for row in found["keys"]}


ALICE, BOB = "alices-secret-0123456789", "bobs-secret-0123456789"


@pytest.mark.parametrize(
    ("operators", "made"), [((), False), (("alice",), False), ((), True), (("bob", "alice"), True)]
)
async def test_an_operator_is_told_what_every_key_spends_and_nobody_else_is(
    tmp_path: Path, operators: tuple[str, ...], made: bool
) -> None:
    given = {"alice": SecretStr(ALICE), "bob": SecretStr(BOB)}
    settings = Settings(
        var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config", keys=given, operators=operators
    )
    own = await asyncio.to_thread(_made, settings.var) if made else None
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        for n, owner in enumerate(("alice", "bob"), 1):
            failed = Turn(
                f"t{n}", 0, 0, None, "failed", "opus", (), time.time(), cost_usd=float(n), error={"code": "overloaded"}
            )
            new = NewChain(owner, "hers", f"dir-{owner}", True, 1.0, time.time(), lambda: None)
            await engine.store.import_chain(new, [WholeTurn(failed, ())])
        everything = {"alice": 1.0, "bob": 2.0}
        for owner, key in (("alice", ALICE), ("bob", BOB)):
            assert await spent(http, key) == (everything if owner in operators else None)
            told = (await http.get("/overview", headers={"X-Api-Key": key})).json()
            # of others nothing but sums: no agent, no turn
            assert {one["turn_id"] for one in told["attention"]} == {"t1" if owner == "alice" else "t2"}
        if own is not None:
            assert await spent(http, own) == everything
            told = (await http.get("/overview", headers={"X-Api-Key": own})).json()
            assert (told["owner"], told["attention"]) == ("local", [])
            assert not any(secret in str(told) for secret in (ALICE, BOB, own))


async def test_without_keys_the_spend_of_earlier_keys_is_shown(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config")
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        for n, owner in enumerate(("local", "carol"), 1):
            agent = await engine.store.ensure_agent(owner, "hers", f"dir-{owner}", named=True, now=1.0)
            turn = a_finished_turn(f"t{n}", agent.key, None, "opus", (), (), (), time.time(), None, 0)
            await engine.store.import_turns([turn])
        assert await spent(http, None) == {"carol": 0.0, "local": 0.0}


async def test_half_a_character_in_an_answer_keeps_nothing_from_being_shown(tmp_path: Path) -> None:
    """A model may have said it: the page and the stored response were a 500."""
    model = Model()
    model.calls = [[{"type": "text", "text": "half \ud83d"}]]
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "config")
    async with (
        core(settings, model) as (engine, _),
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
    ):
        asked = {"model": "sonnet", "input": "hello"}
        made = (await http.post("/responses", json=asked, headers={"X-Agent-Id": "a"})).json()["id"]
        for path in ("chains/a/turns", "previews?agent=a", f"responses/{made}", "overview", "chains/a"):
            told = await http.get(f"/{path}")
            assert told.status_code == 200, path
            told.json()


def _made(var: Path) -> str:
    return make_key(var).read_text().strip()
