"""A turn that meets the provider's limit with `on_limit = "wait"`: it goes out once, when the limit is over."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.domain.models import LimitWait, Turn
from cli_session_proxy.engine import fallbacks
from cli_session_proxy.engine.engine import Answer, Engine
from cli_session_proxy.engine.lanes import Lanes, Slots
from cli_session_proxy.engine.ownership import Instances
from cli_session_proxy.errors import (
    Interrupted,
    LeaseLost,
    RateLimited,
    StoreUnavailable,
    TurnCancelled,
    UpstreamError,
)
from cli_session_proxy.settings import ModelSettings, Profile, Settings
from cli_session_proxy.stores.sqlite.store import FILE

from ..serving import serving
from ..talking import ask, request, text
from ..until import until
from .test_core import Model, core, turns, words
from .test_hosts import hosts

HOUR = 3600.0
WHY = "You've hit your 5-hour limit"


def limit(seconds: float | None = HOUR) -> RateLimited:
    return RateLimited(WHY, retry_after=seconds)


class Clock:
    """The clock that all proxies share, which a test may put forward."""

    ahead = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, real = Clock(), Instances.now
    monkeypatch.setattr(Instances, "now", lambda self: real(self) + clock.ahead)
    monkeypatch.setattr("cli_session_proxy.engine.engine.LONGEST_NAP", 0.01)
    return clock


@pytest.fixture
def waiting(tmp_path: Path) -> Settings:
    place: dict[str, Any] = {"var": tmp_path / "var", "claude_config_dir": tmp_path / "config"}
    return Settings(**place, port=0, disconnect_grace=0.01, on_limit="wait")


async def put_off(engine: Engine, *said: str, **more: Any) -> Answer:
    """A request that waits for the limit by now."""
    answer = await engine.submit(request(*said, **more))
    await until(lambda: answer.limit_wait is not None)
    return answer


async def stored(engine: Engine, answer: Answer) -> Turn:
    turn = await engine.store.turn(answer.turn_id)
    assert turn is not None
    return turn


async def test_it_waits_and_goes_out_once_after_the_reset(waiting: Settings, clock: Clock) -> None:
    model = Model()
    model.faults = [limit()]
    async with core(waiting, model) as (engine, backend):
        answer = await put_off(engine, "one")
        turn = await stored(engine, answer)
        assert (turn.status, turn.attempts[-1]["code"], len(turn.attempts)) == ("queued", "rate_limited", 1)
        assert turn.limit_wait is not None
        assert (turn.limit_wait.why, turn.limit_wait.asked) == (WHY, 1)
        assert HOUR - 60 < turn.limit_wait.until - time.time() < HOUR + 60
        assert (engine.waiting_for_limit(), engine.queued(), engine.running()) == (1, 0, 0)
        (progress,) = engine.progress()
        assert (progress.doing, progress.detail) == ("limit", {"until": turn.limit_wait.until})
        clock.ahead = HOUR - 60
        await ask(engine, "another agent goes on", agent="b")
        assert (await stored(engine, answer)).status == "queued"
        clock.ahead = HOUR + 60
        assert text(await answer.turn()) == "You said: one (1)"
        answer.acknowledge()
        turn = await stored(engine, answer)
        assert (turn.status, turn.limit_wait, len(turn.attempts)) == ("completed", None, 2)
        assert (len(backend.seen), engine.waiting_for_limit()) == (3, 0)
        assert text(await ask(engine, "two")) == "You said: two (2)"


async def test_a_client_that_wants_the_whole_answer_is_told_at_once_and_comes_again(
    waiting: Settings, clock: Clock
) -> None:
    model = Model()
    model.faults = [limit()]
    async with core(waiting, model) as (engine, backend):
        answer = await engine.submit(request("one"))
        for _ in range(2):  # the second time nothing is asked
            with pytest.raises(RateLimited) as told:
                await answer.turn(patience=60.0)
            answer.leave()
            assert HOUR - 60 < (told.value.retry_after or 0) < HOUR + 60
            assert told.value.retry is False
            assert WHY in told.value.message
            assert "send the same again then" in told.value.message
            answer = await engine.submit(request("one"))
        clock.ahead = HOUR + 60
        assert text(await answer.turn(patience=60.0)) == "You said: one (1)"
        assert len(backend.seen) == 2


async def test_a_short_limit_is_waited_for_by_everybody(waiting: Settings, clock: Clock) -> None:
    model = Model()
    model.faults = [limit(30.0)]
    async with core(waiting, model) as (engine, _):
        answer = await put_off(engine, "one")
        asking = asyncio.create_task(answer.turn(patience=60.0))
        clock.ahead = 60.0
        assert text(await asking) == "You said: one (1)"


async def test_it_runs_though_every_client_has_left_and_the_same_request_has_its_answer(
    waiting: Settings, clock: Clock
) -> None:
    model = Model()
    model.faults = [limit()]
    async with core(waiting, model) as (engine, backend):
        answer = await put_off(engine, "one")
        answer.leave()
        await until(lambda: not engine._deliveries._writes)
        clock.ahead = HOUR + 60
        await until(lambda: not engine.progress())
        assert [turn.status for turn in await turns(engine)] == ["completed"]
        again = await ask(engine, "one")
        assert (again.id, len(backend.seen)) == (answer.turn_id, 2)


async def test_turns_behind_it_wait_too_in_their_order(waiting: Settings, clock: Clock) -> None:
    model = Model()
    model.faults = [limit()]
    async with core(waiting, model) as (engine, backend):
        model.open.clear()
        first = await engine.submit(request("one"))
        await model.reached.wait()
        second = await engine.submit(request("two"))
        model.open.set()
        await until(lambda: second.limit_wait is not None)
        third = await engine.submit(request("three"))
        assert [one.limit_wait is not None for one in await turns(engine)] == [True] * 3
        for answer in (second, third):
            with pytest.raises(RateLimited):
                await answer.turn(patience=60.0)
        clock.ahead = HOUR + 60
        said = [text(await answer.turn()) for answer in (first, second, third)]
        assert said == ["You said: one (1)", "You said: two (2)", "You said: three (3)"]
        assert [words(path)[-1] for path in backend.seen] == ["one", "one", "two", "three"]
        assert [one.limit_wait for one in await turns(engine)] == [None] * 3


@pytest.mark.parametrize("by", ["operator", "deletion"])
async def test_it_can_be_cancelled(waiting: Settings, clock: Clock, by: str) -> None:
    model = Model()
    model.faults = [limit()]
    async with core(waiting, model) as (engine, backend):
        answer = await put_off(engine, "one")
        if by == "operator":
            assert await engine.cancel("local", "a", None) == [answer.turn_id]
            (turn,) = await turns(engine)
            assert (turn.status, turn.limit_wait) == ("cancelled", None)
        else:
            assert await engine.delete("local", "a")
        with pytest.raises(TurnCancelled):
            await answer.turn()
        clock.ahead = HOUR + 60
        assert text(await ask(engine, "two")) == "You said: two (1)"
        assert [words(path) for path in backend.seen] == [["one"], ["two"]]


@pytest.mark.parametrize("seconds", [7 * HOUR, None])
async def test_a_limit_that_lasts_too_long_or_nobody_knows_how_long_is_an_error(
    waiting: Settings, clock: Clock, seconds: float | None
) -> None:
    model = Model()
    model.faults = [limit(seconds)]
    async with core(waiting, model) as (engine, _):
        with pytest.raises(RateLimited) as told:
            await ask(engine, "one")
        assert told.value.retry_after == seconds
        assert [turn.status for turn in await turns(engine)] == ["failed"]


async def test_what_was_said_by_another_error_does_not_wait(waiting: Settings, clock: Clock) -> None:
    model = Model()
    model.faults = [UpstreamError("broken", retry_after=HOUR)]
    async with core(waiting, model) as (engine, _):
        with pytest.raises(UpstreamError):
            await ask(engine, "one")


async def test_a_request_that_nothing_is_kept_of_does_not_wait(waiting: Settings, clock: Clock) -> None:
    model = Model()
    model.faults = [limit()]
    async with core(waiting, model) as (engine, _):
        with pytest.raises(RateLimited):
            await ask(engine, "one", agent=None, kept=False)


@pytest.mark.parametrize(
    ("on_limit", "profile", "answered"),
    [("fallback", None, True), ("error", None, False), ("fallback", "error", False), ("error", "fallback", True)],
)
async def test_on_limit_says_whether_another_model_answers(
    tmp_path: Path, on_limit: Any, profile: Any, answered: bool
) -> None:
    settings = Settings(
        var=tmp_path / "var", claude_config_dir=tmp_path / "config", on_limit=on_limit, fallbacks=("gpt",),
        models={"gpt": ModelSettings(litellm="openai/gpt")}, profiles={"p": Profile(on_limit=profile)},
    )  # fmt: skip
    model = Model()
    model.faults = [limit()]
    async with core(settings, model) as (engine, _):
        if answered:
            turn = await ask(engine, "one", profile="p")
            assert turn.fallback is not None
            assert turn.fallback.model == "gpt"
        else:
            with pytest.raises(RateLimited):
                await ask(engine, "one", profile="p")


async def test_where_it_cannot_wait_another_model_answers(waiting: Settings, clock: Clock) -> None:
    models = {"gpt": ModelSettings(litellm="openai/gpt")}
    settings = waiting.model_copy(update={"fallbacks": ("gpt",), "models": models, "max_limit_wait": 60.0})
    model = Model()
    model.faults = [limit()]
    async with core(settings, model) as (engine, _):
        turn = await ask(engine, "one")
        assert turn.reported_model == "gpt"


# --- through a restart, and from host to host


async def test_it_survives_a_restart_and_goes_out_once(waiting: Settings, clock: Clock) -> None:
    model = Model()
    async with core(waiting, model) as (engine, before):
        await ask(engine, "hello", agent="b")
        model.faults = [limit()]
        first = await put_off(engine, "one")
        second = await engine.submit(request("two"))
        await engine.stop()
        for answer in (first, second):
            with pytest.raises(Interrupted):
                await answer.turn()
    async with core(waiting) as (engine, after):
        await until(lambda: len(engine.progress()) == 2)
        assert [turn.status for turn in await turns(engine)] == ["queued"] * 2
        third = await engine.submit(request("three"))
        assert third.limit_wait is not None
        clock.ahead = HOUR + 60
        assert text(await third.turn()) == "You said: three (3)"
        third.acknowledge()
        assert [words(path)[-1] for path in (*before.seen, *after.seen)] == ["hello", "one", "one", "two", "three"]
        assert [turn.status for turn in await turns(engine)] == ["completed"] * 3


async def test_the_same_request_after_a_restart_is_that_turn(waiting: Settings, clock: Clock) -> None:
    model = Model()
    model.faults = [limit()]
    async with core(waiting, model) as (engine, _):
        first = await put_off(engine, "one")
    async with core(waiting) as (engine, after):
        again = await engine.submit(request("one"))
        assert (again.turn_id, again.limit_wait is not None) == (first.turn_id, True)
        clock.ahead = HOUR + 60
        assert text(await again.turn()) == "You said: one (1)"
        again.acknowledge()
        assert len(after.seen) == 1


async def test_a_turn_that_is_stopped_while_it_runs_after_its_wait_ends_as_any_other(
    waiting: Settings, clock: Clock
) -> None:
    model = Model()
    model.faults = [limit()]
    settings = waiting.model_copy(update={"drain_timeout": 0.0})
    async with core(settings, model) as (engine, _):
        answer = await put_off(engine, "one")
        model.open.clear()
        model.reached.clear()
        clock.ahead = HOUR + 60
        await model.reached.wait()
        await until(lambda: answer.limit_wait is None)
        await engine.stop()
        with pytest.raises(Interrupted):
            await answer.turn()
    async with core(settings) as (engine, after):
        assert [turn.status for turn in await turns(engine)] == ["cancelled"]
        assert after.seen == []


@asynccontextmanager
async def pair(url: str, tmp_path: Path) -> AsyncIterator[Any]:
    async with hosts(url, tmp_path, 2, on_limit="wait", lease=2.0) as made:
        yield made


@asynccontextmanager
async def cut_off(url: str, tmp_path: Path) -> AsyncIterator[Any]:
    """Two hosts, of which the first is cut off from the store while its turn waits; that and the next one wait at the
    second host by then. In the end the model was told each once more."""
    async with pair(url, tmp_path) as (one, two):
        one.model.faults = [limit()]
        first = await put_off(one.engine, "one")
        await one.cut_off()
        second = await two.engine.submit(request("two"))
        await until(lambda: two.engine.waiting_for_limit() > 0)
        yield one, two, first, second
        assert [words(path)[-1] for path in (*one.backend.seen, *two.backend.seen)] == ["one", "one", "two"]


async def test_a_host_that_is_lost_leaves_its_waiting_turns_to_the_next_one_and_sends_none(
    postgres_url: str, tmp_path: Path, clock: Clock
) -> None:
    async with cut_off(postgres_url, tmp_path) as (one, two, first, later):
        clock.ahead = HOUR + 60
        assert text(await later.turn()) == "You said: two (2)"
        later.acknowledge()
        one.reaches.set()
        with pytest.raises(Exception, match=r"another proxy|taken"):
            await first.turn()
        kept = await two.engine.store.turn(first.turn_id)
        assert kept is not None
        assert (kept.status, kept.instance) == ("completed", two.engine.instance_id)


async def test_a_turn_that_waits_goes_to_another_host_and_back_and_is_sent_once(
    postgres_url: str, tmp_path: Path, clock: Clock
) -> None:
    async with cut_off(postgres_url, tmp_path) as (one, two, first, second):
        one.reaches.set()
        with pytest.raises(Exception, match=r"another proxy|taken"):
            await first.turn()
        await two.cut_off()  # now that one is cut off, while it waits for both
        again = await one.engine.submit(request("one"))  # at once, before it is known that its client has left
        assert again.turn_id == first.turn_id
        first.leave()
        await until(lambda: one.engine.waiting_for_limit() == 1)
        clock.ahead = HOUR + 60
        assert text(await again.turn()) == "You said: one (1)"
        again.acknowledge()
        two.reaches.set()
        with pytest.raises(LeaseLost):  # it had not begun
            await second.turn()
        second.leave()
        assert text(await ask(two.engine, "two")) == "You said: two (2)"

        async def kept() -> list[Turn]:
            return [turn for turn in await turns(one.engine) if turn.status == "completed"]

        async def noted() -> bool:  # a host notes a delivery after its client has the answer
            return all(turn.delivery == "delivered" for turn in await kept())

        await until(noted)
        assert [text(turn) for turn in await kept()] == ["You said: one (1)", "You said: two (2)"]


@pytest.mark.parametrize("while_read", [False, True], ids=["before", "while the unfinished turns are read"])
@pytest.mark.sample(1)
async def test_a_turn_whose_taking_over_was_not_answered_is_sent_once_the_limit_is_over(
    postgres_url: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, while_read: bool
) -> None:
    """The store had it as a turn of the second host, which did not know it: nobody sent it."""
    async with pair(postgres_url, tmp_path) as (one, two):
        one.model.faults = [limit()]
        first = await put_off(one.engine, "one")
        take_over = two.store.take_over

        async def unanswered(*given: Any) -> None:
            monkeypatch.setattr(two.store, "take_over", take_over)
            await take_over(*given)
            raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

        unfinished, is_read, goes_on = two.store.unfinished, asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[Turn]:
            for turn in [turn async for turn in unfinished()]:
                yield turn
            is_read.set()
            await goes_on.wait()

        monkeypatch.setattr(two.store, "take_over", unanswered)
        await one.cut_off()
        recovering: asyncio.Task[bool] | None = None
        if while_read:
            monkeypatch.setattr(two.store, "unfinished", slowly)
            recovering = asyncio.create_task(two.engine._recovery.recover(two.engine._ownership.hold_if_free))
            await is_read.wait()
        second = await two.engine.submit(request("two"))
        with pytest.raises(StoreUnavailable):
            await second.turn()
        goes_on.set()
        if recovering is not None:
            await recovering
        await until(lambda: two.engine.waiting_for_limit() == 1)
        again = await two.engine.submit(request("one"))
        assert again.turn_id == first.turn_id
        clock.ahead = HOUR + 60
        assert text(await again.turn()) == "You said: one (1)"
        assert [words(path) for path in two.backend.seen] == [["one"]]


async def test_a_host_that_is_stopped_leaves_its_waiting_turns_to_the_others(
    postgres_url: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli_session_proxy.engine.recovery.SETTLE_SILENT_AFTER", 0.2)
    async with pair(postgres_url, tmp_path) as (one, two):
        one.model.faults = [limit()]
        first = await put_off(one.engine, "one")
        await one.engine.stop()
        await until(lambda: two.engine.waiting_for_limit() == 1)
        again = await two.engine.submit(request("one"))
        assert again.turn_id == first.turn_id
        clock.ahead = HOUR + 60
        assert text(await again.turn()) == "You said: one (1)"
        assert (len(one.backend.seen), len(two.backend.seen)) == (1, 1)


async def test_it_can_be_cancelled_from_another_host(postgres_url: str, tmp_path: Path, clock: Clock) -> None:
    async with pair(postgres_url, tmp_path) as (one, two):
        one.model.faults = [limit()]
        first = await put_off(one.engine, "one")
        assert await two.engine.cancel("local", "a", None) == [first.turn_id]
        with pytest.raises(TurnCancelled):
            await first.turn()


async def test_a_turn_at_another_host_comes_after_the_one_that_waits(
    postgres_url: str, tmp_path: Path, clock: Clock
) -> None:
    async with pair(postgres_url, tmp_path) as (one, two):
        one.model.faults = [limit()]
        first = await put_off(one.engine, "one")
        second = await two.engine.submit(request("two"))
        await until(lambda: bool(two.engine.progress()))
        assert two.backend.seen == []
        clock.ahead = HOUR + 60
        assert text(await first.turn()) == "You said: one (1)"
        first.acknowledge()
        assert text(await second.turn()) == "You said: two (2)"


# --- what clients are told


STREAMS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}, ": waits for"),
    "messages": (
        "/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True},
        ": waits for",
    ),
    "responses": ("/v1/responses", {"input": "hi", "stream": True}, ": waits for"),
    "generate": (
        "/v1beta/models/sonnet:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
        None,
    ),
    "interactions": ("/v1beta/interactions", {"input": "hi", "stream": True}, ": waits for"),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}, None),
}  # fmt: skip


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_stream_says_at_once_until_when_and_goes_on(waiting: Settings, clock: Clock, wire: str) -> None:
    path, body, comment = STREAMS[wire]
    model = Model()
    model.faults = [limit()]
    async with (
        core(waiting, model) as (engine, _),
        serving(engine, waiting) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=60) as http,
        http.stream("POST", path, json={"model": "sonnet", **body}) as answer,
    ):
        assert answer.status_code == 200
        assert HOUR - 60 < int(answer.headers["retry-after"]) < HOUR + 60
        chunks = answer.aiter_text()
        said = await anext(chunks)
        if comment is not None:
            at = time.strftime("%Y-%m-%dT%H:", time.gmtime(time.time() + HOUR))
            while "\n" not in said:  # a part of a line may come first
                said += await anext(chunks)
            assert said.startswith(comment)
            assert at[:11] in said
        clock.ahead = HOUR + 60
        said += "".join([chunk async for chunk in chunks])
        assert "You said: hi" in said


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_whole_answer_is_refused_at_once_with_the_time_and_kept(
    waiting: Settings, clock: Clock, wire: str
) -> None:
    path, body, _ = STREAMS[wire]
    body = {"model": "sonnet", **body} | ({"stream": False} if wire not in ("generate",) else {})
    path = path.replace("streamGenerateContent?alt=sse", "generateContent")
    model = Model()
    model.faults = [limit()]
    async with (
        core(waiting, model) as (engine, backend),
        serving(engine, waiting) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=60) as http,
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 429
        assert HOUR - 60 < int(answer.headers["retry-after"]) < HOUR + 60
        assert answer.headers["x-should-retry"] == "false"
        assert "this request is kept" in answer.text
        clock.ahead = HOUR + 60
        await until(lambda: not engine.progress())
        again = await http.post(path, json=body)
        assert (again.status_code, len(backend.seen)) == (200, 2)
        assert "You said: hi (1)" in again.text
        assert again.headers["x-turn-id"] == answer.headers["x-turn-id"]


# --- the parts


@given(st.none() | st.floats(0, 1e6), st.none() | st.tuples(st.floats(0, 1e5), st.integers(1, 60)), st.floats(1, 1e6))
def test_a_wait_is_bounded_and_never_ends_before_the_reset(
    told: float | None, before: tuple[float, int] | None, longest: float
) -> None:
    now = 1e6
    been = None if before is None else LimitWait(now, now - before[0], "", before[1])
    wait = fallbacks.wait_for(RateLimited("x", retry_after=told), been, now, longest)
    if wait is None:
        assert told is None or told + before_of(been, now) + 301 + fallbacks.MARGIN > longest
        return
    assert told is not None
    assert now + told < wait.until <= wait.since + longest
    assert wait.asked == (1 if been is None else been.asked + 1)
    assert wait.until - now >= min(300.0, 2.0 ** (wait.asked - 1))


def before_of(been: LimitWait | None, now: float) -> float:
    return 0.0 if been is None else now - been.since


async def test_a_place_before_others_goes_first_and_the_one_that_was_first_is_asked_to_wait() -> None:
    lanes = Lanes(1, 1, Slots(1))
    late = lanes.take(7)
    assert late.granted.done()
    first, second = lanes.take_before(7, 0), lanes.take_before(7, 1)
    assert [one.granted.done() for one in (first, second, late)] == [True, False, False]
    lanes.give_up(first)
    assert [one.granted.done() for one in (second, late)] == [True, False]
    lanes.give_up(second)
    await late.until_first()
    lanes.give_up(late)
    assert lanes.total == 0


async def test_a_turn_that_the_store_has_lost_while_it_waited_ends(waiting: Settings, clock: Clock) -> None:
    """A standby that lacks it was promoted. It was tried again and again, and all turns after it waited."""
    async with core(waiting, model := Model()) as (engine, _):
        model.faults.append(limit())
        answer = await put_off(engine, "one")
        with closing(sqlite3.connect(waiting.var / FILE)) as conn, conn:
            conn.execute("DELETE FROM frames")
            conn.execute("DELETE FROM turns")
        clock.ahead = 2 * HOUR
        with pytest.raises(StoreUnavailable, match="before it had kept this turn"):
            await answer.turn()
        answer.leave()
        assert text(await ask(engine, "two")) == "You said: two (1)"
