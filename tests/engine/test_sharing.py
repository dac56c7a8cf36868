"""Strangers' questions share processes, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.backends.claude.sessions import sharing
from cli_session_proxy.backends.claude.sessions.sharing import SharedUse, Sharing
from cli_session_proxy.domain.models import Tool, Turn, TurnRequest
from cli_session_proxy.domain.options import Parameters
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Behaviour, Cut, Fail, HeldReply, Refusal, Reply
from turnfault.provider.upstream import Upstream

from ..clis import seen_working
from ..conftest import MakeSettings
from ..cutting import held, let_go
from ..files import files, holding
from ..matrix import rest_in_full
from ..talking import ask, claude, heard, request, running, text
from ..until import until

TOOL = Tool("weather")


@pytest.fixture
async def settings(make_settings: MakeSettings, claude_2: Path, tmp_path: Path) -> Settings:
    """With a CLI that its self-check has seen to rewind."""
    return make_settings(claude_bin=await seen_working(claude_2, tmp_path), share_processes="always")


async def _asked(engine: Engine, said: str) -> Turn:
    """A stranger's question, and its process is free again: it is given back behind the answer."""
    turn = await ask(engine, said, agent=None)
    await until(lambda: all(process.state != "busy" for process in claude(engine).processes()))
    return turn


async def test_questions_of_strangers_are_answered_by_one_process(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        turns = [await _asked(engine, f"question {n}") for n in range(5)]
        assert len({process.pid for process in claude(engine).processes()}) == 1
        assert len({turn.session_id for turn in turns}) == 5
        for n, request_ in enumerate(upstream.requests):
            assert request_.user_texts() == [f"question {n}"]
        assert [turn.continuity for turn in turns] == ["started"] * 5
        two = await ask(engine, "question 1", text(turns[1]), "and then?", agent=None)
        assert heard(upstream) == ["question 1", "and then?"]
        assert (two.parent_id, two.session_id, two.continuity) == (turns[1].id, turns[1].session_id, "resumed")
        three = await ask(engine, "question 1", text(turns[1]), "and then?", text(two), "and now?", agent=None)
        assert heard(upstream) == ["question 1", "and then?", "and now?"]
        assert three.continuity == "warm"
        shared = files(settings.claude_config_dir, "*sandbox-shared/*.jsonl")
        assert len(shared) == 1
        for n in (0, 1, 2):
            assert f"question {n}" not in shared[0].read_text()
    assert not files(settings.claude_config_dir, "*sandbox-shared/*.jsonl")


@pytest.mark.parametrize("fault", rest_in_full("declined", "its CLI dies", "cancelled", "refused by the API", quick=2))
@pytest.mark.sample(1)
async def test_after_any_doubt_its_process_serves_nobody(fault: str, settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        await _asked(engine, "one")
        (before,) = {process.pid for process in claude(engine).processes()}
        if fault == "declined":
            upstream.when("bad", Refusal("cyber", "No."))
            assert (await ask(engine, "bad", agent=None)).status == "refused"
        elif fault == "refused by the API":
            upstream.when("bad", Fail(400), times=None)
            with pytest.raises(ProxyError):
                await ask(engine, "bad", agent=None)
        else:
            # Before the first word: a turn of which its client has words is not repeated.
            gate = HeldReply(after=0 if fault == "its CLI dies" else 1)
            upstream.when("bad", gate)
            answer = await engine.submit(request("bad", agent=None))
            await gate.reached.wait()
            if fault == "cancelled":
                await engine.cancel("local", answer.agent_id, None)
                with pytest.raises(ProxyError):
                    await answer.turn()
            else:
                os.kill(before, signal.SIGKILL)
                assert (await answer.turn()).status == "completed"
            gate.open()
            answer.leave()
        await ask(engine, "two", agent=None)
        assert heard(upstream) == ["two"]
        assert before not in {process.pid for process in claude(engine).processes()}


async def test_owners_models_and_system_prompts_have_processes_of_their_own(
    settings: Settings, upstream: Upstream
) -> None:
    async with running(settings) as engine:
        for n in range(2):
            await _asked(engine, f"a {n}")
            await ask(engine, f"b {n}", agent=None, owner="other")
            await ask(engine, f"c {n}", agent=None, system="Another.")
            await ask(engine, f"d {n}", agent=None, model="opus")
            await until(lambda: all(process.state != "busy" for process in claude(engine).processes()))
        kinds = [(one.body["model"], str(one.body["system"]), one.user_texts()) for one in upstream.requests]
        assert [said for _, _, said in kinds] == [[f"{letter} {n}"] for n in range(2) for letter in "abcd"]
        assert len({process.pid for process in claude(engine).processes()}) == 4
        # A name, tools, a history of its own: not a stranger's question.
        for asked in (
            request("e", agent="named"),
            request("f", agent=None, tools=(TOOL,)),
            request("g", "h", "i", agent=None),
        ):
            answer = await engine.submit(asked)
            assert not (await answer.turn()).evidence.shared
            answer.leave()


async def test_a_client_that_goes_on_has_a_session_from_its_first_turn(
    make_settings: MakeSettings, settings: Settings, upstream: Upstream
) -> None:
    """By what was seen of it; at first nothing was."""
    async with running(make_settings(claude_bin=settings.claude_bin)) as engine:
        shared = [(await ask(engine, f"question {n}", agent=None)).evidence.shared for n in range(4)]
        assert shared == [False, False, True, True]
        for n in range(3):
            one = await ask(engine, f"a chat {n}", agent=None, system="A chat.")
            assert not one.evidence.shared
            await ask(engine, f"a chat {n}", text(one), "and then?", agent=None, system="A chat.")
            assert heard(upstream) == [f"a chat {n}", "and then?"]


@pytest.mark.parametrize("asked", [{"kept": False}, {"call": {"wire": "responses", "store": False}, "client": "one"}])
@pytest.mark.sample(1)
async def test_nothing_is_left_of_a_request_that_is_not_to_be_kept(
    asked: dict[str, Any], settings: Settings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "IDLE", 600.0)
    async with running(settings) as engine:
        await ask(engine, "kept", agent=None, **asked | {"kept": True})
        await ask(engine, "a secret of somebody's", agent=None, **asked)
        await until(lambda: not holding("a secret of somebody's", settings.var.parent, "*.jsonl"))
        await ask(engine, "after", agent=None)
        assert heard(upstream) == ["after"]


@pytest.mark.parametrize("how", ["at a stop sequence", "by the provider"])
@pytest.mark.sample(1)
async def test_nothing_is_left_of_an_answer_that_was_cut(how: str, settings: Settings, upstream: Upstream) -> None:
    """Its records are written into a transcript again, when its process is dead."""
    secret = "a secret of somebody's"
    cut = held(Cut(3, Reply("These are the words of an attempt that is never finished.")))
    async with running(settings) as engine, let_go(cut, engine=engine, stream=True):
        await _asked(engine, "one")
        if how == "by the provider":
            upstream.next(cut, Reply("The answer."))
        else:
            upstream.next(Reply("one STOP two three four"))
        answer = await engine.submit(request(secret, agent=None, kept=False, stop=("STOP",)))
        async for _ in answer.events():
            pass
        answer.acknowledge()
        turn = await answer.turn()
        answer.leave()
        assert turn.evidence.shared
        assert text(turn) == "one " or turn.evidence.cuts
        await _asked(engine, "after")
        assert not holding(secret, settings.claude_config_dir, "*.jsonl")


async def test_of_a_kind_that_nobody_asks_any_more_nothing_is_held(settings: Settings) -> None:
    """A system prompt may be as large as a body, and each question may have another one."""
    async with running(settings.model_copy(update={"max_processes": 1})) as engine:
        shared = claude(engine).sessions.sharing
        for n in range(3):
            await ask(engine, "one", agent=None, system=f"{n}" * 100_000)
            await until(lambda: all(process.state != "busy" for process in claude(engine).processes()))
        assert len(shared._groups) == 1
        assert all(len(repr(kind)) < 1000 for kind in [*shared._groups, *shared._firsts])


async def test_what_a_killed_proxy_left_is_removed_at_the_next_start(settings: Settings) -> None:
    async with running(settings) as engine:
        await ask(engine, "one", agent=None)
        (path,) = files(settings.claude_config_dir, "*sandbox-shared/*.jsonl")
        left = path.with_name(f"{uuid.uuid4()}.jsonl")
        left.write_text("{}\n")
        await claude(engine).end_strays([])
        assert path.exists()
        assert not left.exists()
    left.write_text("{}\n")
    async with running(settings):
        assert not left.exists()
    assert not path.exists()


async def test_a_shared_process_ends_after_so_many_questions(
    settings: Settings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "USES", 2)
    async with running(settings) as engine:
        pids = []
        for n in range(4):
            await _asked(engine, f"question {n}")
            pids += [process.pid for process in claude(engine).processes()]
    assert len(set(pids)) == 2


async def test_a_process_that_cannot_be_given_back_is_ended_and_leaves_its_place(
    settings: Settings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> bool:
        raise RuntimeError("as no thread is free")

    async with running(settings) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(ClaudeProcess, "rewind", broken)
            await ask(engine, "one", agent=None)
            await until(lambda: not claude(engine).processes())
        await until(lambda: not claude(engine).sessions.sharing._groups)
        await ask(engine, "two", agent=None)
        assert heard(upstream) == ["two"]


async def test_words_of_a_deleted_chain_leave_the_shared_process_that_heard_them_at_once(
    settings: Settings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "IDLE", 600.0)
    async with running(settings) as engine:
        await _asked(engine, "another question")
        turn = await _asked(engine, "a secret of somebody's")
        assert holding("secret", settings.claude_config_dir, "*.jsonl")
        agent = await engine.store.agent_by_key(turn.agent_key)
        assert agent is not None
        assert await engine.delete(agent.owner, agent.agent_id)
        assert not holding("secret of", settings.claude_config_dir)
        assert not claude(engine).sessions.sharing._groups
        await ask(engine, "one more", agent=None)
        assert heard(upstream) == ["one more"]


@pytest.mark.parametrize("times", rest_in_full(2, 1))
@pytest.mark.full
async def test_a_process_whose_return_is_cancelled_leaves_its_place(
    settings: Settings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """While it is asked to go back, and says nothing."""
    give_back = Sharing.give_back

    async def cancelled(self: Sharing, use: SharedUse, *given: Any, **named: Any) -> None:
        process = use.shared.process
        os.kill(process.pid, signal.SIGSTOP)
        giving = asyncio.create_task(give_back(self, use, *given, **named))
        await until(lambda: process.busy)
        for _ in range(times):
            giving.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await giving

    async with running(settings) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Sharing, "give_back", cancelled)
            await ask(engine, "one", agent=None)
            await until(lambda: not claude(engine).sessions.sharing._groups)
        await until(lambda: not claude(engine).processes())
        assert not claude(engine).pool.table.in_use
        assert not claude(engine).sessions.sharing._transcripts
        await ask(engine, "two", agent=None)
        assert heard(upstream) == ["two"]


@pytest.mark.full
async def test_nothing_is_kept_of_kinds_whose_processes_have_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each system prompt is a kind of its own."""
    monkeypatch.setattr(sharing, "IDLE", 0.0)
    async with running(settings) as engine:
        for n in range(3):
            await ask(engine, "question", agent=None, system=f"System prompt {n}.")
        shared = claude(engine).sessions.sharing
        await until(lambda: not shared._groups)
        assert not shared._transcripts


@pytest.mark.timeout(1800)  # 2,000 need five minutes
@pytest.mark.parametrize("count", rest_in_full(20, 2000))
async def test_nothing_of_one_question_reaches_the_wire_in_another_ones(
    count: int, settings: Settings, upstream: Upstream
) -> None:
    """A marker in each, at eight at once, among owners, with failures, kills and cancellations at random."""
    dice = random.Random(576)  # of its first twenty questions some are of each kind, with each fault and each moment
    settings = settings.model_copy(update={"max_processes": 6, "cli_retries": 0})
    asked: dict[str, TurnRequest] = {}
    faults: list[Behaviour] = [Fail(400), Fail(529), Cut(after=1)]
    gates: dict[str, HeldReply] = {}
    for n in range(count):
        marker = f"marker-{n:05d}-{dice.randrange(1 << 32):08x}"
        how = dice.choice(["kept"] * 8 + ["once", "other", "fails", "cancelled", "parameters"])
        more: dict[str, Any] = {"owner": "other"} if how == "other" else {"kept": False} if how == "once" else {}
        if how == "parameters":
            more["parameters"] = Parameters(max_tokens=dice.randrange(100, 200))
        if how == "fails":
            upstream.when(marker, faults[n % len(faults)], times=None)
        if how == "cancelled":
            gates[marker] = HeldReply(after=dice.choice([0, 1]))
            upstream.when(marker, gates[marker])
        asked[marker] = request(f"{how} {marker}", agent=None, **more)
    at_once = asyncio.Semaphore(8)

    async with running(settings) as engine:

        async def one(marker: str, wanted: TurnRequest) -> None:
            async with at_once:
                answer = await engine.submit(wanted)
                if marker in gates:
                    await gates[marker].reached.wait()
                    answer.cancel()
                    gates[marker].open()
                try:
                    assert marker in text(await answer.turn())
                    answer.acknowledge()
                except ProxyError:
                    assert "kept" not in wanted.messages[-1].content[0]["text"] or killed
                finally:
                    answer.leave()

        killed = False

        def reached(number: int) -> bool:
            return len(upstream.requests) >= number

        async def killing() -> None:
            nonlocal killed
            for at in range(count // 4, count, max(1, count // 4)):
                await until(partial(reached, at))
                for process in claude(engine).processes()[:1]:
                    killed = True
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)

        killer = asyncio.create_task(killing())
        await asyncio.gather(*(one(marker, wanted) for marker, wanted in asked.items()))
        killer.cancel()
    every = re.compile(rb"marker-\d{5}-[0-9a-f]{8}")
    ids: set[bytes] = set()
    for seen in upstream.requests:
        wire = seen.raw + repr(seen.headers).encode()
        (own,) = set(every.findall(wire))
        assert seen.user_texts()[-1].endswith(own.decode())
        assert len(seen.messages) <= 2
        assert not ids & set(re.findall(rb"(?:msg|req)_[\w]+", wire))
        ids |= set(re.findall(rb"(?:msg|req)_[\w]+", wire))
    assert {own.decode() for seen in upstream.requests for own in every.findall(seen.raw)} >= {
        marker for marker, wanted in asked.items() if "kept" in wanted.messages[-1].content[0]["text"]
    }
