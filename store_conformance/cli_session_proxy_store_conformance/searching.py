"""What is found again: by words, by parts of ids, and nothing of another owner or of an agent that is gone."""

from __future__ import annotations

from typing import Any

from cli_session_proxy.domain.models import Agent, Block, Link, Message, TurnOptions
from cli_session_proxy.domain.searching import Found, Search
from cli_session_proxy.stores.base import Store

from .samples import (
    AWKWARD,
    StoreFactory,
    a_begin,
    a_commit,
    a_finished_turn,
    a_lease,
    a_session,
    a_turn,
    accepted,
    an_agent,
    complete,
    opened,
    turn_of,
)

# Seconds: more than the turns of any contract take.
LONG = 60.0
HIDDEN = "sk-ant-api03-fake-abcdefghijklmnop"


async def _found(store: Store, text: str, owner: str | None = "local", **more: Any) -> Found:
    assert (await store.index(LONG)).is_whole
    return await store.search(Search(text, owner, **more))


async def _turns(store: Store, text: str, owner: str | None = "local", **more: Any) -> list[str | None]:
    return [hit.turn_id for hit in (await _found(store, text, owner, **more)).hits if hit.kind == "words"]


async def _said(store: Store, agent: Agent, id: str, *said: Block, tools: tuple[Any, ...] = (), **more: Any) -> None:
    """A finished turn with these blocks as its input."""
    turn = a_finished_turn(
        id, agent.key, None, "sonnet", (Message("user", said),), ({"type": "text", "text": f"answer {id}"},), (), 5.0,
        None, 0, tools=tools, **more,
    )  # fmt: skip
    await store.import_turns([turn])


async def what_a_client_noted_is_found_by_its_name_and_its_value(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        noted = {"user_id": "ada-17", "conversation_id": "thread 9", "tags": ["blue"], "pages": 250, "key": HIDDEN}
        await accepted(store, a_turn(agent, "t1", options=TurnOptions(metadata=noted)))
        await accepted(store, a_turn(agent, "t2"))
        for text in ("ada-17", "user_id", '"conversation_id thread 9"', "blue", "250", "ask ada"):
            assert await _turns(store, text) == ["t1"], text
        (hit,) = (await _found(store, "ada-17")).hits
        assert hit.part == "metadata"
        assert await _turns(store, HIDDEN) == []


async def words_find_what_was_asked_answered_and_done(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGlkZGVu"}}
        await _said(store, agent, "t1", {"type": "text", "text": "the Café in Lisbon"}, image)
        call: Block = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/etc/motd"}}
        done: Block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rainy"}]}
        await _said(store, agent, "t2", {"type": "text", "text": "lisbon again"}, tools=(call, done))
        assert set(await _turns(store, "LISBON")) == {"t1", "t2"}
        assert await _turns(store, "cafe lisb") == ["t1"]
        assert await _turns(store, '"in Lisbon"') == ["t1"]
        assert await _turns(store, '"Lisbon in"') == []
        assert await _turns(store, "answer t2") == ["t2"]
        assert await _turns(store, "motd") == await _turns(store, "rainy") == ["t2"]
        # neither an image nor the names of a block's parts are words
        for nothing in ("aGlkZGVu", "tool_result", "toolu_1", "base64", "nowhere"):
            assert await _turns(store, nothing) == []
        (hit,) = (await _found(store, "cafe")).hits
        assert (hit.agent.agent_id, hit.part, hit.number, hit.snippet) == (
            "a",
            "input",
            1,
            ("the ", "Café", " in Lisbon"),
        )


async def what_is_no_word_is_looked_for_without_an_error(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await _said(store, agent, "t1", {"type": "text", "text": AWKWARD})
        assert await _turns(store, "漢字") == ["t1"]
        for text in (
            "",
            " ",
            '"',
            '""',
            "*",
            "a*b",
            "(",
            "NEAR(",
            "a AND",
            "input:x",
            "-x",
            "^",
            "???",
            "'",
            "%",
            "\x00",
        ):
            await _found(store, text)
        await _found(store, "word " * 500)


async def ids_and_names_are_found_by_a_part(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store, "Trip/Planner %")
        await complete(store, agent, "turn_0a1b2c", session="5e55-1011")
        by_turn, by_session = (await _found(store, "0a1B")).hits, (await _found(store, "55-10")).hits
        assert [hit.turn_id for hit in by_turn if hit.kind == "turn"] == ["turn_0a1b2c"]
        assert [hit.session_id for hit in by_session if hit.kind == "session"] == ["5e55-1011"]
        named = [(hit.kind, hit.agent.agent_id) for hit in (await _found(store, "planner TRIP")).hits]
        assert named == [("agent", "Trip/Planner %")]
        assert (await _found(store, "t%r")).hits == (await _found(store, "___")).hits == ()


async def a_search_can_ask_for_turns_of_a_kind(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "cheap", cost_usd=0.01)
        await complete(store, agent, "dear", "cheap", cost_usd=2.0)
        failed = await accepted(store, a_turn(agent, "failed", "dear", at=20.0))
        await store.begin(**a_begin(failed))
        await store.fail("failed", "failed", {"code": "x"}, [], {}, 21.0, lease=a_lease(agent.key))
        mended = Link("s1", "s1", "dear", "rebuilt", {}, 13.0)
        await store.save_session(
            a_session(agent, "s1", "dear"), [mended, Link(None, "s1", "cheap", "started", {}, 9.0)]
        )
        await accepted(store, a_turn(agent, "other", at=30.0, model="opus"))
        for more, expected in (
            ({"status": "failed"}, ["failed"]), ({"model": "opus"}, ["other"]), ({"repaired": True}, ["dear"]),
            ({"min_cost": 1.0}, ["dear"]), ({"since": 20.0}, ["other", "failed"]), ({"until": 20.0}, ["dear", "cheap"]),
            ({"since": 20.0, "model": "sonnet"}, ["failed"]), ({"until": 20.0, "limit": 1}, ["dear"]),
        ):  # fmt: skip
            assert await _turns(store, "", **more) == expected
            assert set(await _turns(store, "ask", **more)) <= {"other", "failed", "dear", "cheap"}
        assert set(await _turns(store, "ask", until=20.0)) == {"dear", "cheap"}


async def a_turn_is_found_as_it_is_by_now(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await an_agent(one)
        turn = await accepted(one, a_turn(agent, "t1"))
        assert await _turns(two, "ask") == ["t1"]
        assert await _turns(two, "answer") == []
        await one.begin(**a_begin(turn))
        await one.commit(**a_commit(turn, agent))
        assert await _turns(two, "answer") == ["t1"]
        assert await _turns(one, "answer") == ["t1"]
        assert (await turn_of(one, "t1")).status == "completed"


async def nobody_finds_what_is_anothers(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        for owner in ("me", "them"):
            agent = await an_agent(store, "a", owner)
            await complete(store, agent, f"turn_{owner}", session=f"session_{owner}")
        for text in ("ask", "answer", "turn_", "session_", "a"):
            found = await _found(store, text, "me")
            assert {hit.agent.owner for hit in found.hits} == {"me"}, text
            assert (found.agents, found.turns) == (1, 1)
        assert len(await _turns(store, "ask", None)) == 2


async def what_is_found_shows_no_secret(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        await _said(store, await an_agent(store), "t1", {"type": "text", "text": f"the key is {HIDDEN} for all"})
        (hit,) = (await _found(store, "key")).hits
        assert "".join(hit.snippet) == "the key is [redacted] for all"
        assert await _turns(store, HIDDEN) == []


async def an_agent_that_is_deleted_is_not_found(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        gone, kept = await an_agent(one, "gone"), await an_agent(one, "kept")
        await complete(one, gone, "t1")
        await complete(one, kept, "t2", session="s2")
        assert set(await _turns(two, "ask")) == {"t1", "t2"}
        await one.delete_agent(gone.key)
        assert await _turns(two, "ask") == await _turns(one, "ask") == ["t2"]
        assert (await _found(two, "gone")).hits == ()
