"""Edits, regenerations and ways back: each goes on with exactly its path.

The first test shows it on the real CLI; what a history continues is decided without one.
"""

from __future__ import annotations

from pathlib import Path

from cli_session_proxy.domain.models import Agent
from cli_session_proxy.engine.engine import Engine
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, heard, request, running, text
from ..without_cli import running_without_cli
from .dumped import dumped


async def said(engine: Engine, history: list[str], new: str, agent: str | None = None) -> list[str]:
    turn = await ask(engine, *history, new, agent=agent)
    return [*history, new, text(turn)]


async def test_an_edit_a_regeneration_and_the_way_back_each_have_their_path(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        old: list[str] = []
        for text_ in ("one", "two", "three", "four"):
            old = await said(engine, old, text_)
        assert len(old) == 8
        edited = await said(engine, old[:2], "TWO, edited")  # message 3 of 8
        assert heard(upstream) == ["one", "TWO, edited"]
        upstream.answer = lambda texts: f"said anew: {texts[-1][1]}"
        again = await said(engine, old[:6], "four")  # the last answer, regenerated
        assert heard(upstream) == ["one", "two", "three", "four"]
        assert again[-1] == "said anew: four" != old[-1]
        await said(engine, old, "five")
        assert heard(upstream) == ["one", "two", "three", "four", "five"]
        assert [said for role, said in upstream.requests[-1].texts() if role == "assistant"] == old[1::2]
        await said(engine, again, "five")
        assert [said for role, said in upstream.requests[-1].texts() if role == "assistant"] == again[1::2]
        await said(engine, edited, "more")
        assert heard(upstream) == ["one", "TWO, edited", "more"]
        dump, markdown = await dumped(engine)
    one, two, three, four, edit, regenerated, five, five_again, more = dump["turns"]
    parents = {turn["id"]: turn["parent_id"] for turn in dump["turns"]}
    assert parents == {
        one["id"]: None, two["id"]: one["id"], three["id"]: two["id"], four["id"]: three["id"],
        edit["id"]: one["id"], regenerated["id"]: three["id"], five["id"]: four["id"],
        five_again["id"]: regenerated["id"], more["id"]: edit["id"],
    }  # fmt: skip
    assert dump["head"] == more["id"]
    assert edit["continuity_reason"] == {
        "rule": "history", "messages": 3, "matched": 2, "imported": 0, "diverged_at": 2,
    }  # fmt: skip
    assert "diverged_at" not in four["continuity_reason"]
    assert edit["continuity"] == regenerated["continuity"] == "branched"
    assert [link["reason"] for link in dump["links"] if link["turn_id"] == edit["id"]] == ["branched"]
    assert "They leave the agent's path after message 2." in markdown


async def test_a_regeneration_is_a_sibling_unless_it_is_the_clients_own_retry(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings()
    async with running_without_cli(settings, upstream) as engine:
        one = await ask(engine, "one", agent=None)
        first = await ask(engine, "one", text(one), "two", agent=None)
        retried = await ask(engine, "one", text(one), "two", agent=None, is_retry=True)
        assert retried.id == first.id
        anew = await ask(engine, "one", text(one), "two", agent=None)
        assert anew.id != first.id
        assert anew.parent_id == first.parent_id == one.id
        lost = await engine.submit(request("one", text(one), "lost", agent=None))
        await lost.turn()
        lost.leave()
    # after a restart it is known that the answer arrived nowhere
    async with running_without_cli(settings, upstream) as engine:
        claimed = await ask(engine, "one", text(one), "lost", agent=None)
        assert claimed.id == lost.turn_id
    assert [seen.user_texts()[-1] for seen in upstream.requests] == ["one", "two", "two", "lost"]


async def test_strangers_with_one_opening_never_see_each_others_text(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:
        # No name of theirs can be part of a directory's name, which the CLI tells the model: those are hexadecimal.
        chats: dict[str, list[str]] = {"zoe": [], "bob": [], "cyd": []}
        for new in ("hello", "I am {}", "what now, {}?"):
            for name, chat in chats.items():
                chats[name] = await said(engine, chat, new.format(name))
                others = [other for other in chats if other != name]
                assert not any(other in str(upstream.requests[-1].body["messages"]) for other in others)
                assert heard(upstream) == chats[name][::2]


async def test_two_owners_never_share_a_chain(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:
        mine = await ask(engine, "hello", agent=None, owner="me")
        theirs = await ask(engine, "hello", agent=None, owner="them")
        again = await ask(engine, "hello", text(mine), "and now?", agent=None, owner="them")
        assert text(mine) == text(theirs)
        assert (again.parent_id, again.agent_key) == (theirs.id, theirs.agent_key)
        other = await ask(engine, "hello", text(mine), "and now?", agent=None, owner="nobody")
        assert other.agent_key not in (mine.agent_key, theirs.agent_key)
        assert other.placed.rule == "unknown"


async def test_a_named_agent_gets_only_what_is_new_and_a_contradiction_branches(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:
        history: list[str] = []
        for new in ("one", "two"):
            history = await said(engine, history, new, agent="ada")
        alone = await ask(engine, "three", agent="ada")  # a single new message continues the head
        assert (alone.continuity, alone.placed.rule) == ("warm", "head")
        repeated = await ask(engine, *history, "three", text(alone), "four", agent="ada")
        assert (repeated.continuity, len(repeated.input)) == ("warm", 1)
        contradicting = await ask(engine, *history[:2], "TWO", agent="ada")
        assert contradicting.placed.diverged_at == 2
        assert heard(upstream) == ["one", "TWO"]
        assert await head(engine, "ada") == contradicting.id
        after = await ask(engine, "after it", agent="ada")
        assert heard(upstream) == ["one", "TWO", "after it"]
        assert after.parent_id == contradicting.id
        # the same words of another agent are not looked at
        elsewhere = await ask(engine, *history, "three", agent="bob")
        assert elsewhere.placed.rule == "unknown"
        unnamed = await ask(engine, *history, "three", agent=None)
        assert unnamed.placed.rule == "unknown"


async def test_a_history_trimmed_to_a_window_is_another_conversation(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    """The client asks for a model that does not see its first messages: it gets that, each time anew."""
    async with running_without_cli(make_settings(), upstream) as engine:
        history: list[str] = []
        for new in ("one", "two", "three"):
            history = await said(engine, history, new, agent="ada")
        trimmed = await ask(engine, *history[2:], "four", agent="ada")
        assert heard(upstream) == ["two", "three", "four"]
        assert trimmed.placed.rule == "unknown"
        assert trimmed.placed.diverged_at == 0


async def head(engine: Engine, agent_id: str) -> str | None:
    agent: Agent | None = await engine.store.agent("local", agent_id)
    return agent.head if agent else None
