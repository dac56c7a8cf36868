"""Blocks that no client sends and no CLI says: an earlier version's import took any. Every reader shows the rest."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import Phase, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from cli_session_proxy.backends.litellm.messages import Rendering
from cli_session_proxy.domain import blocks, client_tools, lineage, sizes
from cli_session_proxy.domain.evidence import Evidence, ExternalOrigin
from cli_session_proxy.domain.limits import conversation_id
from cli_session_proxy.domain.models import Block, Finished, Item, Message, Turn
from cli_session_proxy.sandbox import make_private
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import NewChain, WholeTurn
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from cli_session_proxy.wires.blocks import estimated_tokens
from cli_session_proxy.wires.chat import body as chat
from cli_session_proxy.wires.common import naming
from cli_session_proxy.wires.generate import body as generate
from cli_session_proxy.wires.interactions import body as interactions
from cli_session_proxy.wires.messages import body as messages
from cli_session_proxy.wires.ollama import body as ollama
from cli_session_proxy.wires.responses import body as responses

from ..engine.test_core import core
from ..fakes import turn as a_turn
from ..serving import serving
from ..talking import ask

TEXT: Block = {"type": "text", "text": "quince"}
WORDS = st.sampled_from(["", "t", "words", "base64", "url", "eA==", "application/pdf", "\ud83d"])
ODD = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUE = st.recursive(ODD, lambda one: st.lists(one, max_size=2) | st.dictionaries(WORDS, one, max_size=2), max_leaves=4)
KINDS = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "of a newer model"]


def mostly(sound: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(sound, sound, sound, VALUE)


SOURCE = st.fixed_dictionaries(
    {"type": mostly(st.sampled_from(["base64", "text", "url"]))},
    optional={name: mostly(WORDS) for name in ("media_type", "data", "url")},
)


def block_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = {name: mostly(WORDS) for name in ("text", "thinking", "signature", "id", "name", "tool_use_id", "title")}
    fields |= {"input": mostly(st.just({"a": 1})), "source": mostly(SOURCE), "is_error": VALUE, "citations": VALUE}
    fields |= {"content": mostly(WORDS | st.lists(inner, max_size=3)), "data": VALUE, "caller": VALUE}
    return st.fixed_dictionaries({}, optional={"type": mostly(st.sampled_from(KINDS)), **fields})


BLOCK = st.recursive(block_of(VALUE), block_of, max_leaves=3)
FOUND = st.lists(BLOCK, min_size=2, max_size=12)
# What a wire keeps beside a turn, and an item of a conversation, as an import takes them.
ITEM = st.fixed_dictionaries(
    {}, optional={"type": mostly(st.sampled_from(["message", "function_call_output", "reasoning"])), "call_id": VALUE,
                  "role": mostly(st.sampled_from(["user", "system"])), "content": mostly(FOUND), "output": VALUE},
)  # fmt: skip


def old(turn_id: str, parent: str | None, asked: list[Block], said: list[Block], **more: Any) -> Turn:
    given = Message("user", (TEXT, *asked)), Message("assistant", tuple(said))
    more |= {"output": (TEXT, *said), "tools": tuple(said), "finished_at": 2.0}
    return Turn(turn_id, 0, 0, parent, "completed", "sonnet", given, 1.0, origin="imported", **more)


async def looked_at(folder: Path, asked: list[Block], said: list[Block], data: dict[str, Any]) -> None:
    """Every address that shows what is stored answers, and the agent's next turn is run."""
    settings = Settings(var=folder / "var", claude_config_dir=folder / "config", port=0)
    make_private(settings.var)
    store = SqliteStore(settings.var / FILE)
    await store.open()
    ids = [uuid.uuid4().hex for _ in range(3)]
    calls: list[dict[str, Any]] = [
        {"wire": "responses", "store": True}, {"wire": "interactions", "summaries": True},
        {"wire": "responses", "items": {"input": ["msg_1"]}},
    ]  # fmt: skip
    turns = [
        old(f"turn_{one}", f"turn_{parent}" if parent else None, asked, said, call=call, depth=depth)
        for depth, (one, parent, call) in enumerate(zip(ids, [None, *ids], calls, strict=False), 1)
    ]
    parts: list[Any] = [WholeTurn(turn, ()) for turn in turns]
    parts += [Item("msg_1", {**data, "id": "msg_1"}, turns[2].id), Item("msg_2", {**data, "id": "msg_2"})]
    await store.import_chain(NewChain("local", "a", "a", True, 1.0, 2.0, lambda: turns[-1].id), parts)
    await store.close()
    async with core(settings) as (engine, _), serving(engine, settings) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
            shown = [f"/chains/a?format={kind}" for kind in ("json", "markdown", "mermaid", "html")]
            shown += ["/chains", "/chains/a/turns", "/search?q=quince", "/search?q=a", "/overview?wait=0"]
            for one in ids:
                shown.append(f"/chains/a/turns?with=turn_{one}")
                shown += [f"/responses/resp_{one}", f"/responses/resp_{one}?stream=true"]
                shown += [f"/responses/resp_{one}/input_items", f"/interactions/interaction_{one}?include_input=true"]
                shown += [f"/interactions/interaction_{one}?stream=true"]
            shown.append(f"/conversations/{conversation_id('a')}/items")
            for path in shown:
                answer = await http.get(path)
                assert answer.status_code == 200, (path, answer.text)
            for body in ({"agent_id": "a"}, {"previous_response_id": f"resp_{ids[1]}"}):
                answer = await http.post("/responses/compact", json={"input": "x", **body})
                assert answer.status_code == 200, answer.text
            answer = await http.post(
                "/responses", json={"input": "x", "model": "sonnet", "conversation": conversation_id("a")}
            )
            # A result in the conversation that answers no call is refused, also if its client wrote it here.
            is_refused = answer.status_code == 400 and "there is no open call" in answer.text
            assert is_refused or answer.status_code == 200, answer.text
        assert (await ask(engine, "two", agent="a")).depth == 5 - is_refused


STORED: list[Any] = [
    {}, {"type": ["text"]}, {"type": "text"}, {"type": "thinking"},
    {"type": "thinking", "thinking": "x", "signature": 5},
    {"type": "tool_result"}, {"type": "tool_result", "tool_use_id": ["t"]}, {"type": "of a newer model", "text": 5},
    {"type": "tool_result", "tool_use_id": "t", "content": {"a": 1}}, {"type": "tool_use", "id": 5, "name": "b"},
    {"type": "tool_result", "tool_use_id": "t", "content": ["x", {"type": "image"}, {"type": "text", "text": 5}]},
    {"type": "image"}, {"type": "image", "source": "x"}, {"type": "image", "source": {"type": "url"}},
    {"type": "document", "source": {"type": "url", "url": "http://h"}},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "\ud83d"}},
]  # fmt: skip


async def test_blocks_of_an_earlier_import_are_shown_in_words(tmp_path: Path) -> None:
    """The items of a response, of a conversation or of an interaction were a 500."""
    await looked_at(tmp_path, STORED, STORED, {"type": "message", "role": "system", "content": 7})
    async with core(Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")) as (engine, _):
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        first = await anext(engine.store.turns(agent.key))
    shown = {str(block["text"]) for block in first.output if block["type"] == "text"}
    assert "[a block that cannot be shown: block.type is missing, or no str]" in shown
    assert first.output[1:] == blocks.all_sound(STORED)
    assert {"type": "of a newer model", "text": 5} in first.output


# Not shrunk: an example takes most of a second.
@examples(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(FOUND, FOUND, ITEM)
@example([], [], {"type": "function_call_output", "call_id": ["t"], "output": "x"})
@pytest.mark.full
def test_whatever_blocks_an_earlier_import_took_every_address_shows_the_turn(
    asked: list[Block], said: list[Block], data: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(looked_at(Path(folder), asked, said, data))


NAMING = naming({}, path_agent=None, request_id=None)
CHAT = chat.read({"model": "sonnet", "messages": [{"role": "user", "content": "x"}]}, NAMING)
MESSAGE = messages.read({"model": "sonnet", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}, NAMING)
OLLAMA: Any = ollama.read_chat({"model": "sonnet", "messages": [{"role": "user", "content": "x"}]}, NAMING)


@examples(max_examples=50)
@given(FOUND, FOUND, st.sampled_from(["completed", "requires_action", "refused", "failed"]), st.booleans())
def test_whatever_the_blocks_are_every_wire_writes_the_turn(
    asked: list[Block], said: list[Block], status: Any, brought: bool
) -> None:
    shown = [Message("user", blocks.all_sound(asked)), Message("assistant", blocks.all_sound(asked))]
    turn = a_turn(1, status=status, input=tuple(shown), output=blocks.all_sound(said), call={"custom": ["x"]})
    if brought:
        turn = replace(turn, evidence=Evidence(brought=ExternalOrigin("client")))
    bodies = [chat.completion(turn), messages.message(turn), generate.answer(turn, thoughts=True)]
    bodies += [
        ollama.answer(turn, OLLAMA),
        responses.response(turn),
        interactions.interaction(turn, include_input=True),
    ]
    for body in bodies:
        json.dumps(body).encode()
    written: list[Any] = [
        chat.writer(CHAT, turn.id),
        messages.writer(MESSAGE, turn.id),
        generate.GenerateWriter(turn.id, "sonnet", "r", thoughts=True),
    ]
    for writer in (*written, ollama.LineWriter(OLLAMA)):
        writer.feed(Finished(turn))
    # Readers that no address has: other models, windows, the next turn of a client that sends its history.
    rendering = Rendering(images=False, documents=brought)
    json.dumps(rendering.messages([(turn.input, turn.output)], turn.input, ()))
    sizes.size_of(turn, turn), lineage.answer_text(turn.output)
    past = lineage.past((Message.user("x"), Message("assistant", blocks.all_sound(said))))
    client_tools.with_unique_ids(past, [turn])
    assert estimated_tokens("x", turn.input) > 0
