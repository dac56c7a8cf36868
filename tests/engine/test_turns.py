"""The way of a request: what is acknowledged reaches the model once, in order, and nobody else."""

from __future__ import annotations

import asyncio
import os
from itertools import pairwise
from pathlib import Path

import pytest

from cli_session_proxy.domain.models import Message
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Profile
from turnfault.provider.script import Fail, ToolUse
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..talking import ask, heard, request, running, text
from ..without_cli import running_without_cli


async def test_every_turn_is_remembered_once_and_in_order(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    keeps = "bundled" in str(claude)
    count = 10 if keeps else 3  # the old CLI serves one turn a process
    said = [f"remember fact{n} = value{n}" for n in range(count)]
    async with running(make_settings(claude_bin=claude)) as engine:
        turns = [await ask(engine, one) for one in said]
        assert heard(upstream) == said
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        chain = await engine.store.chain(agent.key)
        assert chain is not None
        assert agent.head == turns[-1].id
        assert len(chain.sessions) == (1 if keeps else count)
        assert [link.reason for link in chain.links] == ["started"] + ([] if keeps else ["forked_by_cli"] * (count - 1))
        assert [turn.continuity for turn in turns] == ["started"] + ["warm" if keeps else "resumed"] * (count - 1)
    if keeps:  # each request extends the one before, byte for byte
        kept = [now.prefix_kept(before) for before, now in pairwise(upstream.requests)]
        assert kept == [1.0] * (count - 1)


@old_cli_in_full
async def test_the_chain_goes_on_after_a_restart(claude: Path, make_settings: MakeSettings, upstream: Upstream) -> None:
    settings = make_settings(claude_bin=claude)
    said = ["one", "two"]
    for one in said:
        async with running(settings) as engine:
            turn = await ask(engine, one)
    assert heard(upstream) == said
    assert turn.continuity == "resumed"


@pytest.mark.full  # rows of the matrix upgrade and downgrade it in every run
async def test_an_old_cli_may_be_replaced_by_a_new_one_and_back(
    claude_1: Path, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    said = []
    for n, binary in enumerate([claude_1, claude_1, claude_2, claude_2, claude_1, claude_1, claude_2]):
        async with running(make_settings(claude_bin=binary)) as engine:
            said.append(f"turn {n}")
            await ask(engine, said[-1])
            assert heard(upstream) == said


async def test_six_requests_at_once_to_one_agent_run_in_order_of_acceptance(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:  # `test_acceptance` has it on the real CLI
        answers = [await engine.submit(request(f"turn {n}")) for n in range(6)]
        turns = await asyncio.gather(*(answer.turn() for answer in answers))
        for answer in answers:
            answer.acknowledge()
    assert [turn.seq for turn in turns] == sorted(turn.seq for turn in turns)
    assert heard(upstream) == [f"turn {n}" for n in range(6)]


@pytest.mark.full  # `test_acceptance` has twenty at once in every run
async def test_many_agents_at_once_never_hear_of_each_other(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2, max_processes=4)) as engine:
        for n in range(3):
            await asyncio.gather(*(ask(engine, f"agent-{who}- says {n}", agent=f"agent {who}") for who in range(8)))
    for seen in upstream.requests:
        agents = {said.split("-")[1] for said in seen.user_texts()}
        assert len(agents) == 1
    assert max(len(seen.user_texts()) for seen in upstream.requests) == 3


@old_cli_in_full
async def test_a_deleted_transcript_is_rebuilt_without_loss_and_keeps_the_prompt_cache(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude)
    async with running(settings) as engine:
        for n in range(3):
            last = await ask(engine, f"turn {n}")
        assert last.session_id is not None
    [transcript] = (settings.claude_config_dir or Path()).glob(f"projects/*/{last.session_id}.jsonl")
    transcript.unlink()
    async with running(settings) as engine:
        turn = await ask(engine, "turn 3")
        agent = await engine.store.agent("local", "a")
        chain = await engine.store.chain(agent.key) if agent else None
    assert heard(upstream) == [f"turn {n}" for n in range(4)]
    assert turn.continuity == "rebuilt"
    assert chain is not None
    [repair] = [link for link in chain.links if link.reason == "rebuilt"]
    assert (repair.from_session, repair.to_session, repair.turn_id) == (last.session_id, last.session_id, turn.id)
    assert "no transcript" in repair.detail["note"]
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


@pytest.mark.full  # each time: the row of the same name in continuity/rows_files.py
async def test_a_transcript_deleted_under_a_warm_process_loses_nothing(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        for n in range(4):
            await ask(engine, f"turn {n}")
            for transcript in (settings.claude_config_dir or Path()).glob("projects/*/*.jsonl"):
                os.unlink(transcript)
        assert heard(upstream) == [f"turn {n}" for n in range(4)]


async def test_a_full_history_without_a_name_stays_one_chain_and_one_session(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    history: list[str] = []
    agents = set()
    # clients/test_history_openai.py has it on the real CLI
    async with running_without_cli(make_settings(), upstream) as engine:
        for n in range(5):
            turn = await ask(engine, *history, f"turn {n}", agent=None)
            history += [f"turn {n}", text(turn)]
            agents.add(turn.agent_key)
            assert turn.continuity == ("warm" if n else "started")
            assert len(turn.input) == 1
    assert len(agents) == 1
    assert heard(upstream) == [f"turn {n}" for n in range(5)]


@pytest.mark.full  # each time: history/test_branches.py, on the new one
async def test_an_edited_history_becomes_a_branch_and_the_old_one_can_be_continued(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude)) as engine:
        one = await ask(engine, "one", agent=None)
        two = await ask(engine, "one", text(one), "two", agent=None)
        edited = await ask(engine, "one", text(one), "other", agent=None)
        assert heard(upstream) == ["one", "other"]
        assert (edited.parent_id, edited.agent_key) == (one.id, one.agent_key)
        await ask(engine, "one", text(one), "two", text(two), "three", agent=None)
        assert heard(upstream) == ["one", "two", "three"]
        await ask(engine, "one", text(one), "other", text(edited), "more", agent=None)
        assert heard(upstream) == ["one", "other", "more"]


@old_cli_in_full
async def test_a_history_begun_elsewhere_keeps_its_roles(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude)) as engine:
        turn = await ask(engine, "my name is Ada", "Hello Ada", "I like teal", "Noted", "list")
        await ask(engine, "and now?")
    assert turn.continuity == "rebuilt"
    assert upstream.requests[0].texts() == [
        ("user", "my name is Ada"),
        ("assistant", "Hello Ada"),
        ("user", "I like teal"),
        ("assistant", "Noted"),
        ("user", "list"),
    ]
    assert heard(upstream) == ["my name is Ada", "I like teal", "list", "and now?"]


@old_cli_in_full
async def test_a_failed_turn_never_reaches_the_model_again(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude)) as engine:
        await ask(engine, "one")
        upstream.when("broken", Fail(400), times=None)
        with pytest.raises(ProxyError):
            await ask(engine, "broken")
        turn = await ask(engine, "two")
    assert heard(upstream) == ["one", "two"]
    if "bundled" in str(claude):
        assert turn.continuity == "rebuilt"
        assert turn.evidence.repaired is not None
        assert turn.evidence.repaired.found == "tail"
    else:
        # CLI 1.0.120 left the failed prompt in a copy of its own, which nobody resumes.
        assert turn.continuity == "resumed"


async def test_a_changed_system_prompt_takes_effect_and_keeps_the_chain(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "one", system="You are ALPHA.")
        await ask(engine, "two")
        assert "ALPHA" in str(upstream.requests[-1].body["system"])
        await ask(engine, "three", system="You are BETA.")
    assert "BETA" in str(upstream.requests[-1].body["system"])
    assert "ALPHA" not in str(upstream.requests[-1].body["system"])
    assert heard(upstream) == ["one", "two", "three"]


@old_cli_in_full
async def test_an_image_reaches_the_model_again_on_the_next_turn(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    source = {"type": "base64", "media_type": "image/png", "data": png}
    seeing = Message("user", ({"type": "text", "text": "what is this?"}, {"type": "image", "source": source}))
    settings = make_settings(claude_bin=claude)
    async with running(settings) as engine:
        await ask(engine, seeing)
    for transcript in (settings.claude_config_dir or Path()).glob("projects/*/*.jsonl"):
        transcript.unlink()
    async with running(settings) as engine:
        await ask(engine, "and now?")
    blocks = [
        block for message in upstream.requests[-1].messages for block in message["content"] if isinstance(block, dict)
    ]
    assert [block["source"]["data"] for block in blocks if block.get("type") == "image"] == [png]


async def test_deleting_an_agent_leaves_nothing_of_it(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, profiles={"lists": Profile(tools=("TaskCreate",))})
    task = {"subject": "secret", "description": "secret"}
    upstream.when("note it", ToolUse([("TaskCreate", task)]), times=2)
    config_dir = settings.claude_config_dir or Path()

    def kept() -> list[Path]:
        return [path for path in config_dir.rglob("*") if path.is_file() and "secret" in path.read_text("latin-1")]

    async with running(settings) as engine:
        for agent in "ab":
            await ask(engine, "note it", agent=agent, profile="lists")
        both = kept()
        assert {path.relative_to(config_dir).parts[0] for path in both} == {"projects", "tasks"}
        assert await engine.delete("local", "a")
        assert not await engine.delete("local", "a")
        assert len(kept()) == len(both) / 2
        assert await engine.delete("local", "b")
        assert kept() == []
        assert not (settings.var / "sandbox" / "agents" / "a").exists()
        await ask(engine, "hello")
    assert heard(upstream) == ["hello"]


async def test_default_is_the_model_that_the_settings_say(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with running_without_cli(make_settings(default_model="haiku"), upstream) as engine:
        await ask(engine, "hello", model="default")
        await ask(engine, "again", model="sonnet")
    assert [seen.body["model"] for seen in upstream.requests] == ["haiku", "sonnet"]
