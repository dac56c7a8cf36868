"""Who watches a turn sees what it does, waits for and has said; and may end it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.base import Abandoned, AnswerBlocks, Compacted, Event, Retried, ToolActivity, Used
from cli_session_proxy.domain.models import BlockStart, Usage
from cli_session_proxy.engine import attempt
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.live import BEFORE_TAIL, TAIL, Progress
from cli_session_proxy.errors import NotFound, ProxyError, TurnCancelled, UpstreamError
from cli_session_proxy.export import feed
from cli_session_proxy.settings import Settings

from ..scripted import RETRY, Scripted, delta
from ..talking import request
from ..until import until

CALL = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "make"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}


class Watched:
    """An engine whose one turn goes on when it is told to."""

    def __init__(self, tmp_path: Path, steps: Sequence[Event | None]) -> None:
        self.backend = Scripted(steps)
        self.engine = Engine(Settings(var=tmp_path / "var", port=0, disconnect_grace=0.1), backend=self.backend)

    async def __aenter__(self) -> Watched:
        await self.engine.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for _ in self.backend.steps:
            self.backend.go.release()
        await self.engine.stop()

    def now(self) -> Progress:
        (one,) = self.engine.progress()
        return one

    def says(self) -> str:
        return str(feed.progress([self.now()])[0]["says"])


async def test_what_a_turn_does_and_waits_for_is_told_as_it_goes(tmp_path: Path) -> None:
    steps = [
        delta("Let me see. "), None, ToolActivity(CALL), None, ToolActivity(RESULT), Retried(RETRY), None,
        BlockStart(1, {"type": "text", "text": ""}), delta("It is done."), None,
    ]  # fmt: skip
    async with Watched(tmp_path, steps) as watched:
        answer = await watched.engine.submit(request("hello"))
        await watched.backend.reached.acquire()
        assert (watched.now().doing, watched.now().text) == ("answering", "Let me see. ")
        watched.backend.go.release()
        await watched.backend.reached.acquire()
        assert watched.says() == "runs Bash"
        watched.backend.go.release()
        await watched.backend.reached.acquire()
        assert watched.says() == "the provider asks to wait 30 s, retry 2 of 3 (429 rate_limit_error)"
        watched.backend.go.release()
        await watched.backend.reached.acquire()
        assert (watched.says(), watched.now().text) == ("answers", "Let me see. It is done.")
        second = await watched.engine.submit(request("hello", "", "and then?"))
        waits = watched.engine.progress()[1]
        assert (waits.turn.id, feed.progress([waits])[0]["says"]) == (second.turn_id, "waits for an earlier turn")
        watched.backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
        second.cancel()
        assert [bool(one["at"]) for one in (*turn.tools, *turn.evidence.retries)] == [True, True, True]


async def test_the_tokens_of_an_attempt_are_told_as_they_are_used(tmp_path: Path) -> None:
    wanted = {"schema": {"type": "object"}}  # the first attempt gives no JSON
    async with Watched(tmp_path, [None, Used(Usage(5, 7, cache_read_tokens=100)), delta("no JSON"), None]) as watched:
        answer = await watched.engine.submit(request("hello", format=wanted))
        told = []
        for _ in range(4):
            await watched.backend.reached.acquire()
            (shown,) = feed.progress([watched.now()])
            told.append((shown["tokens_read"], shown["tokens_written"]))
            watched.backend.go.release()
        assert told == [(0, 0), (105, 7)] * 2
        with pytest.raises(ProxyError):
            await answer.turn()


@pytest.mark.parametrize(
    "event", [ToolActivity(CALL), Retried(RETRY), Abandoned(frozenset())], ids=lambda one: type(one).__name__
)
async def test_a_backend_that_tells_of_more_than_any_turn_has_ends_its_turn(
    tmp_path: Path, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in a CLI's place told of millions: gigabytes, and seconds in which they were stored."""
    monkeypatch.setattr(attempt, "MOST_TOOLS", 1000)
    async with Watched(tmp_path, [event] * 1000) as watched:
        await (await watched.engine.submit(request("hello"))).turn()
    async with Watched(tmp_path, [event] * 1002) as watched:
        with pytest.raises(UpstreamError, match="in one turn"):
            await (await watched.engine.submit(request("another"))).turn()


async def test_of_an_answer_and_of_its_tools_as_much_is_kept_as_a_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in a CLI's place said 200 MB: it was stored on the event loop, which took 4 s, and read at each look."""
    monkeypatch.setattr(attempt, "MOST_ANSWER", 1000)
    monkeypatch.setattr(attempt, "MOST_TOOL_TEXT", 1000)
    monkeypatch.setattr(attempt, "A_VALUE", 1)
    long = {**RESULT, "content": "x" * 900, "is_error": False}
    async with Watched(tmp_path, [ToolActivity(long)] * 3) as watched:
        turn = await (await watched.engine.submit(request("hello"))).turn()
        assert [{**one, "at": 0} for one in turn.tools] == [
            {**long, "at": 0}, *[{"type": "tool_result", "tool_use_id": "toolu_1", "at": 0}] * 2,
        ]  # fmt: skip
    async with Watched(tmp_path, [ToolActivity(long)] * 30) as watched:
        with pytest.raises(UpstreamError, match="in one turn"):
            await (await watched.engine.submit(request("another"))).turn()
    async with Watched(tmp_path, [AnswerBlocks(({"type": "text", "text": "x" * 900},), None)] * 2) as watched:
        with pytest.raises(UpstreamError, match="more than 1,000 characters"):
            await (await watched.engine.submit(request("one more"))).turn()


async def test_a_value_of_json_counts_for_more_than_its_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of millions of values could be exported, but not imported."""
    monkeypatch.setattr(attempt, "MOST_ANSWER", 100 * attempt.A_VALUE)
    monkeypatch.setattr(attempt, "MOST_TOOL_TEXT", 100 * attempt.A_VALUE)
    few, many = ({**CALL, "input": {"a": [0] * values}} for values in (50, 100))
    kept = {"type": "tool_use", "id": "toolu_1", "name": "Bash"}
    async with Watched(tmp_path, [ToolActivity(few), ToolActivity(many), AnswerBlocks((few,), None)]) as watched:
        turn = await (await watched.engine.submit(request("hello"))).turn()
        assert [{**one, "at": 0} for one in turn.tools] == [{**few, "at": 0}, {**kept, "at": 0}]
    async with Watched(tmp_path, [AnswerBlocks((many,), None)]) as watched:
        with pytest.raises(UpstreamError, match="each JSON value counts 256"):
            await (await watched.engine.submit(request("another"))).turn()


async def test_of_many_compactions_of_a_turn_one_is_stored_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was a write, and any shell can speak of one."""
    notes: list[object] = []
    async with Watched(tmp_path, [Compacted({"n": n}) for n in range(100)]) as watched:
        note = watched.engine.store.note

        async def noted(*given: Any) -> None:
            notes.append(given)
            await note(*given)

        monkeypatch.setattr(watched.engine.store, "note", noted)
        turn = await (await watched.engine.submit(request("hello"))).turn()
        assert turn.evidence.compacted == {"n": 99}
        assert len(notes) == 1


async def test_words_that_are_taken_back_are_not_shown_on(tmp_path: Path) -> None:
    steps = [delta("wrong"), None, Abandoned(frozenset({0})), delta("right"), None]
    async with Watched(tmp_path, steps) as watched:
        answer = await watched.engine.submit(request("hello"))
        await watched.backend.reached.acquire()
        assert watched.now().text == "wrong"
        watched.backend.go.release()
        await watched.backend.reached.acquire()
        assert watched.now().text == "right"
        answer.leave()


async def test_of_a_long_answer_the_end_is_shown_without_secrets(tmp_path: Path) -> None:
    secret = "sk-ant-api03-abcdefghijklmnop"
    long = "word " * 4000
    async with Watched(tmp_path, [delta(long), delta(f"key {secret[:9]}"), delta(f"{secret[9:]} ok"), None]) as watched:
        answer = await watched.engine.submit(request("hello"))
        await watched.backend.reached.acquire()
        now = watched.now()
        assert len(now.text) == TAIL + BEFORE_TAIL
        assert now.skipped + len(now.text) == len(f"{long}key {secret} ok")
        shown = feed.progress([now])[0]["text"]
        assert len(shown) <= TAIL
        assert shown.endswith("key [redacted] ok")
        answer.leave()


async def test_who_watches_is_no_client(tmp_path: Path) -> None:
    async with Watched(tmp_path, [delta("hello"), None]) as watched:
        answer = await watched.engine.submit(request("hello"))
        await watched.backend.reached.acquire()
        assert watched.now().text == "hello"
        answer.leave()
        await until(lambda: not watched.engine.progress())
        turn = await watched.engine.store.turn(answer.turn_id)
        assert turn is not None
        assert (turn.status, (turn.error or {})["detail"]) == ("cancelled", {"by": "left"})


async def test_a_turn_can_be_ended_by_who_watches_it(tmp_path: Path) -> None:
    async with Watched(tmp_path, [delta("hello"), None]) as watched:
        answer = await watched.engine.submit(request("hello"))
        waiting = await watched.engine.submit(request("hello", "", "more"))
        await watched.backend.reached.acquire()
        with pytest.raises(NotFound, match="does not wait or run"):
            await watched.engine.cancel("local", "a", "turn_other")
        with pytest.raises(NotFound, match="there is no agent 'b'"):
            await watched.engine.cancel("local", "b", None)
        assert await watched.engine.cancel("local", "a", waiting.turn_id) == [waiting.turn_id]
        assert await watched.engine.cancel("local", "a", None) == [answer.turn_id]
        for one in (answer, waiting):
            with pytest.raises(TurnCancelled, match="cancelled by hand") as told:
                await one.turn()
            assert told.value.detail == {"by": "operator"}
            one.leave()
        with pytest.raises(NotFound, match="no turn of this agent waits or runs"):
            await watched.engine.cancel("local", "a", None)
        agent = await watched.engine.agent_named("local", "a")
        assert await asyncio.wait_for(watched.engine.store.unfinished_of(agent.key), 60) == []
