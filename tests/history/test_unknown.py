"""A conversation begun elsewhere: turns of the chain, and to the model what it was: roles, images, calls, results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.sessions.history import EMPTY, NO_RESULT
from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.engine import placement
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.stores.base import WholeTurn
from turnfault.provider.seen import parts
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..talking import ask, heard, running, text
from ..without_cli import running_without_cli
from .dumped import dumped

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE: Block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}


def words(said: str) -> Block:
    return {"type": "text", "text": said}


def call(id: str, city: str) -> Block:
    return {"type": "tool_use", "id": id, "name": "weather", "input": {"city": city}}


def result(id: str, said: str) -> Block:
    return {"type": "tool_result", "tool_use_id": id, "content": said}


def user(*blocks: Block) -> Message:
    return Message("user", blocks)


def assistant(*blocks: Block) -> Message:
    return Message("assistant", blocks)


def told(upstream: Upstream) -> list[tuple[str, list[Any]]]:
    """The last request's conversation: roles, and of each block what makes it what it is."""
    return [
        (message["role"], [_told(block) for block in parts(message["content"]) if not _is_the_clis(block)])
        for message in upstream.requests[-1].messages
        if message["role"] != "system"
    ]


def _is_the_clis(block: Block) -> bool:
    return str(block.get("text", "")).startswith("<system-reminder>")


def _told(block: Block) -> Any:
    match block["type"]:
        case "text":
            return block["text"]
        case "image":
            return ("image", block["source"]["data"])
        case "tool_use":
            return ("call", block["id"], block["input"])
    return ("result", block["tool_use_id"], parts(block["content"])[0]["text"])


@old_cli_in_full
async def test_images_calls_and_results_keep_their_roles(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    history = [
        user(words("what is this?"), IMAGE),
        assistant({"type": "thinking", "thinking": "of another", "signature": "bad"}, words("A dot.")),
        user(words("the weather in Bern and Ulm?")),
        assistant(words("I look."), call("call_1", "Bern"), call("call_2", "Ulm")),
        user(result("call_1", "sun")),
        user(result("call_2", "rain")),
        assistant(words("Sun and rain.")),
    ]
    expected = [
        ("user", ["what is this?", ("image", PNG)]),
        ("assistant", ["A dot."]),
        ("user", ["the weather in Bern and Ulm?"]),
        ("assistant", ["I look.", ("call", "call_1", {"city": "Bern"}), ("call", "call_2", {"city": "Ulm"})]),
        ("user", [("result", "call_1", "sun"), ("result", "call_2", "rain")]),
        ("assistant", ["Sun and rain."]),
        ("user", ["and now?"]),
    ]
    async with running(make_settings(claude_bin=claude)) as engine:
        turn = await ask(engine, *history, Message.user("and now?"), agent=None)
        assert told(upstream) == expected
        dump, _ = await dumped(engine)
        assert [one["origin"] for one in dump["turns"]] == ["imported"] * 3 + ["chat"]
        assert dump["turns"][-1]["continuity_reason"] == {
            "rule": "unknown", "messages": 8, "matched": 0, "imported": 7, "diverged_at": 0,
        }  # fmt: skip
        more = await ask(
            engine, *history, Message.user("and now?"), Message.assistant(text(turn)), Message.user("go on"), agent=None
        )
        assert (more.parent_id, len(more.input)) == (turn.id, 1)
        assert told(upstream) == [*expected, ("assistant", [text(turn)]), ("user", ["go on"])]
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


ODD = [
    pytest.param(
        [assistant(words("Welcome.")), user(words("hi")), assistant(words("Hello."))],
        [
            ("user", ["[The assistant opened the conversation.]"]),
            ("assistant", ["Welcome."]),
            ("user", ["hi"]),
            ("assistant", ["Hello."]),
            ("user", ["last"]),
        ],
        id="the assistant opens",
    ),
    pytest.param(
        [user(words("a")), user(words("b")), assistant(words("one")), assistant(words("two"))],
        [("user", ["a", "b"]), ("assistant", ["one", "two"]), ("user", ["last"])],
        id="messages of one role in a row",
    ),
    pytest.param(
        [user(words("a")), assistant(), user(words("b")), assistant(words("c"))],
        [("user", ["a"]), ("assistant", [EMPTY]), ("user", ["b"]), ("assistant", ["c"]), ("user", ["last"])],
        id="an empty answer",
    ),
    pytest.param(
        [user(words("a")), assistant(call("c1", "Bern")), user(words("b")), assistant(words("c"))],
        [
            ("user", ["a"]),
            ("assistant", [("call", "c1", {"city": "Bern"})]),
            ("user", [("result", "c1", NO_RESULT), "b"]),
            ("assistant", ["c"]),
            ("user", ["last"]),
        ],
        id="a call without its result",
    ),
    pytest.param(
        [user(words("a"), result("none", "sun")), assistant(words("c"))],
        [
            ("user", ["a", "[The result of a tool call that is not in this conversation:]", "sun"]),
            ("assistant", ["c"]),
            ("user", ["last"]),
        ],
        id="a result without its call",
    ),
    pytest.param(
        [
            user(words("a")),
            assistant(call("x y", "Bern")),
            user(result("x y", "sun")),
            assistant(call("c", "Ulm")),
            user(result("c", "rain")),
            assistant(call("c", "Rom")),
            user(result("c", "fog")),
            assistant(words("d")),
        ],
        [
            ("user", ["a"]),
            ("assistant", [("call", "call", {"city": "Bern"})]),
            ("user", [("result", "call", "sun")]),
            ("assistant", [("call", "c", {"city": "Ulm"})]),
            ("user", [("result", "c", "rain")]),
            ("assistant", [("call", "c-r2", {"city": "Rom"})]),
            ("user", [("result", "c-r2", "fog")]),
            ("assistant", ["d"]),
            ("user", ["last"]),
        ],
        id="ids that are none or used twice",
    ),
]


@pytest.mark.parametrize(("history", "expected"), ODD)
@pytest.mark.sample(3)
async def test_an_odd_history_reaches_the_model_in_a_shape_that_the_api_takes(
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    history: list[Message],
    expected: list[tuple[str, list[Any]]],
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, *history, Message.user("last"), agent=None)
    assert told(upstream) == expected


async def test_what_was_said_elsewhere_in_between_is_brought_in_behind_the_known_path(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        one = await ask(engine, "one", agent=None)
        turn = await ask(engine, "one", text(one), "two", "another model's answer", "three", agent=None)
        assert turn.placed.matched == 2
        assert turn.placed.imported == 2
        assert turn.placed.diverged_at == 2
    assert heard(upstream) == ["one", "two", "three"]
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


async def test_a_call_without_its_result_at_the_end_is_told_so_and_nothing_is_invented(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    history = [user(words("weather?")), assistant(words("I look."), call("c1", "Bern"))]
    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, *history, Message.user("never mind"), agent=None)
    asked, called, rest = told(upstream)
    assert asked == ("user", ["weather?"])
    assert called == ("assistant", ["I look.", ("call", "c1", {"city": "Bern"})])
    assert rest[0] == "user"
    assert rest[1][0][:2] == ("result", "c1")
    assert rest[1][1:] == ["never mind"]


@pytest.mark.parametrize("agent", ["a", None])
async def test_a_long_history_comes_in_piece_by_piece_and_one_that_was_cut_off_is_gone_on_with(
    agent: str | None, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that other agents' writes have their turn in between. Nothing of it comes in twice."""
    monkeypatch.setattr(placement, "IMPORT_BATCH", 2)
    monkeypatch.setattr(placement, "INLINE_MESSAGES", 3)
    history = [f"{kind} {n}" for n in range(7) for kind in ("asked", "answered")]
    pieces: list[int] = []
    async with running_without_cli(make_settings(), upstream) as engine:
        really = engine.store.import_turns

        async def import_turns(turns: Sequence[WholeTurn], head: str | None = None) -> None:
            if len(pieces) == 2:
                pieces.append(0)
                raise StoreUnavailable("the disk is full")
            pieces.append(len(turns))
            await really(turns, head)

        monkeypatch.setattr(engine.store, "import_turns", import_turns)
        with pytest.raises(StoreUnavailable):
            await ask(engine, *history, "and now?", agent=agent)
        turn = await ask(engine, *history, "and now?", agent=agent)
        path = await engine.store.path(turn.id)
        turns = [one async for one in engine.store.turns(turn.agent_key)]
    assert pieces == [2, 2, 0, 2, 1]
    assert heard(upstream) == [*history[::2], "and now?"]
    assert [one.id for one in path] == [one.id for one in turns]
    assert len(path) == 8
    assert [one.depth for one in path] == list(range(1, 9))
