"""The head goes back along its path; the tree stays, and the next turn branches there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.commands import changing
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest, LeaseLost, NotFound, SessionBusy
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Lease, Proxy
from turnfault.provider.script import Refusal
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..serving import serving
from ..talking import ask, heard, request, running, text
from ..without_cli import running_without_cli
from .test_core import Model, core, settings, turns, words

__all__ = ["settings"]


async def _head(engine: Engine) -> str | None:
    agent = await engine.store.agent("local", "a")
    assert agent is not None
    return agent.head


async def test_the_next_turn_goes_on_from_where_the_head_was_put(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        one, two, three = [await ask(engine, word) for word in ("one", "two", "three")]
        done = await engine.rewind("local", "a", "-2")
        assert (done.was, done.head, done.turns) == (three.id, one.id, 2)
        four = await ask(engine, "four")
        assert four.parent_id == one.id
        assert words(backend.seen[-1]) == ["one", "four"]
        assert [turn.id for turn in await turns(engine)] == [one.id, two.id, three.id, four.id]
        assert (await engine.rewind("local", "a", one.id)).head == one.id
        assert (await engine.rewind("local", "a", one.id)).turns == 0


async def test_all_turns_can_be_taken_off_and_no_more(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        one = await ask(engine, "one")
        other = await ask(engine, "other", agent="b")
        for wrong in ("-2", "-0", "1", "", "--1", other.id, "turn_x"):
            with pytest.raises(InvalidRequest):
                await engine.rewind("local", "a", wrong)
        with pytest.raises(NotFound):
            await engine.rewind("other", "a", "-1")
        assert await _head(engine) == one.id
        assert (await engine.rewind("local", "a", "-1")).head is None
        two = await ask(engine, "two")
        assert two.parent_id is None
        assert words(backend.seen[-1]) == ["two"]


async def test_a_client_that_sends_its_history_still_continues_the_turn_it_names(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        await ask(engine, "one")
        two = await ask(engine, "two")
        await engine.rewind("local", "a", "-1")
        said = ["one", "You said: one (1)", "two", "You said: two (2)", "three"]
        three = await ask(engine, *said)
        assert three.parent_id == two.id
        assert words(backend.seen[-1]) == ["one", "two", "three"]


async def test_it_is_refused_while_a_turn_runs_or_waits(settings: Settings) -> None:
    model = Model()
    async with core(settings, model) as (engine, _):
        one = await ask(engine, "one")
        model.open.clear()
        answer = await engine.submit(request("two"))
        with pytest.raises(SessionBusy, match="waits or runs"):
            await engine.rewind("local", "a", "-1")
        model.open.set()
        turn = await answer.turn()
        answer.acknowledge()
        assert turn.parent_id == one.id
        await engine.rewind("local", "a", "-1")
        assert await _head(engine) == one.id


async def test_a_turn_that_comes_meanwhile_sees_the_head_before_or_after_it(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        for word in ("one", "two"):
            await ask(engine, word)
        results = await asyncio.gather(engine.rewind("local", "a", "-1"), ask(engine, "three"), return_exceptions=True)
        assert not isinstance(results[1], BaseException)
        after, before = ["one", "three"], ["one", "two", "three"]  # the turn came behind what was rewound, or before
        assert words(backend.seen[-1]) in ([before] if isinstance(results[0], SessionBusy) else [after, before])


async def test_a_proxy_that_lost_the_agent_cannot_move_its_head(settings: Settings) -> None:
    async with core(settings) as (engine, _):
        one = await ask(engine, "one")
        await engine.store.renew(Proxy("former", "host", 10.0))
        with pytest.raises(LeaseLost):
            await engine.store.rewind(Lease(one.agent_key, "former", 0), None)
        assert await _head(engine) == one.id


async def test_another_proxy_that_holds_the_agent_hands_it_over(settings: Settings) -> None:
    async with core(settings) as (holder, _), core(settings) as (other, _):
        one, _ = [await ask(holder, word) for word in ("one", "two")]
        assert (await other.rewind("local", "a", "-1")).head == one.id
        assert (await ask(holder, "three")).parent_id == one.id


async def test_by_the_route_and_by_the_command_with_and_without_a_server(settings: Settings) -> None:
    settings = settings.model_copy(update={"port": 0})
    async with core(settings) as (engine, _), serving(engine, settings) as url:
        one, two, three = [await ask(engine, word, agent="a/b") for word in ("one", "two", "three")]
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            answer = await http.post("/chains/a%2Fb/rewind", json={"to": "-1"})
            assert answer.json() == {
                "object": "chain.rewound", "agent_id": "a/b", "was": three.id, "head": two.id, "turns": 1,
            }  # fmt: skip
            away = {"Origin": "http://evil.example"}
            assert (await http.post("/chains/a%2Fb/rewind", json={"to": "-1"}, headers=away)).status_code == 400
            bodies: list[object] = [{}, {"to": 1}, {"to": "-9"}, []]
            for wrong in bodies:
                assert (await http.post("/chains/a%2Fb/rewind", json=wrong)).status_code == 400
            assert (await http.post("/chains/nobody/rewind", json={"to": "-1"})).status_code == 404
    done = await changing.rewind(settings, "local", "a/b", "-1")
    assert done["head"] == one.id
    with pytest.raises(NotFound):
        await changing.rewind(settings, "local", "nobody", "-1")


async def test_an_agent_whose_history_is_refused_is_free_again_after_a_rewind(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:
        await ask(engine, "one")
        await ask(engine, "the trigger")
        refused = [await _refused(engine, upstream, word) for word in ("two", "three")]
        assert ["rewind" in one for one in refused] == [False, True]
        await engine.rewind("local", "a", "-1")
        upstream.heal()
        assert (await ask(engine, "four")).status == "completed"
        assert heard(upstream) == ["one", "four"]


async def _refused(engine: Engine, upstream: Upstream, word: str) -> str:
    """Say it where the model refuses; it is shown the trigger. The answer."""
    upstream.when(word, Refusal("bio"), times=None)
    turn = await ask(engine, word)
    assert turn.status == "refused"
    assert "the trigger" in heard(upstream)
    return text(turn)


# --- on the real CLI


@old_cli_in_full
async def test_the_model_sees_only_what_is_on_the_path(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude)) as engine:
        for word in ("one", "two", "three"):
            await ask(engine, word)
        await engine.rewind("local", "a", "-1")
        await ask(engine, "four")
        assert heard(upstream) == ["one", "two", "four"]
        await ask(engine, "five")
        assert heard(upstream) == ["one", "two", "four", "five"]
        if "bundled" in str(claude):
            assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0
