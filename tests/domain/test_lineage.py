"""What continues what: matching must find the deepest true ancestor, whatever a client does to its history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.domain import lineage
from cli_session_proxy.domain.models import Block, Message, Placed, Turn


def turn(id: str, seq: int = 1, **more: Any) -> Turn:
    return Turn(
        id=id, seq=seq, agent_key=1, parent_id=None, status="completed", model="m", input=(), created_at=0.0, **more
    )


def hash_of(*messages: Message) -> str:
    return lineage.endings(messages)[-1].hash


HELLO = [Message.user("hello"), Message.assistant("hi there"), Message.user("next")]


def test_a_turns_hash_is_the_hash_of_the_history_that_ends_with_it() -> None:
    first = lineage.path_hash(None, [HELLO[0]], HELLO[1].content)
    second = lineage.path_hash(first, [HELLO[2]], Message.assistant("done").content)
    endings = lineage.endings([*HELLO, Message.assistant("done"), Message.user("more")])
    assert [(ending.hash, ending.end) for ending in endings] == [(first, 2), (second, 4)]


def test_what_clients_change_on_the_way_back_does_not_change_the_hash() -> None:
    said = Message(
        "assistant", ({"type": "thinking", "thinking": "hm", "signature": "s"}, *Message.assistant("A\n").content)
    )
    as_sent = hash_of(Message.user("  hello \n"), said)
    as_returned = hash_of(Message("user", ({"type": "text", "text": "hello"},)), Message.assistant("A"))
    assert as_sent == as_returned


def test_several_text_blocks_hash_like_the_one_string_that_the_client_saw() -> None:
    blocks: tuple[Block, ...] = ({"type": "text", "text": "one"}, {"type": "text", "text": "two"})
    assert hash_of(Message.user("q"), Message("assistant", blocks)) == hash_of(
        Message.user("q"), Message.assistant(lineage.answer_text(blocks))
    )


def test_tool_calls_match_without_their_ids_and_differ_by_their_arguments() -> None:
    def call(id: str, city: str) -> Message:
        return Message("assistant", ({"type": "tool_use", "id": id, "name": "weather", "input": {"city": city}},))

    ask = Message.user("weather?")
    assert hash_of(ask, call("toolu_1", "Bern")) == hash_of(ask, call("call_9", "Bern"))
    assert hash_of(ask, call("toolu_1", "Bern")) != hash_of(ask, call("toolu_1", "Rome"))


def test_whitespace_inside_a_text_is_part_of_it() -> None:
    assert hash_of(Message.user("do x"), Message.assistant("a")) != hash_of(Message.user("dox"), Message.assistant("a"))


def test_a_different_image_is_a_different_path() -> None:
    def image(data: str) -> Message:
        return Message(
            "user", ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},)
        )

    assert hash_of(image("aaaa"), Message.assistant("a")) != hash_of(image("bbbb"), Message.assistant("a"))


def decide(messages: list[Message], **how: Any) -> tuple[str | None, Placed]:
    return lineage.decide(messages, **({"named": False, "fresh": False, "continues": None, "match": None} | how))


def test_a_named_agent_with_only_new_messages_continues_the_head() -> None:
    messages = [Message.user("a"), Message.user("b")]
    _, placed = decide(messages, named=True)
    assert (placed.rule, placed.at_head, placed.delta) == ("head", True, True)
    assert placed.parts(tuple(messages)) == ((), tuple(messages))


def test_without_a_name_a_first_message_starts_a_new_agent() -> None:
    parent, placed = decide([Message.user("a")])
    assert (placed.rule, parent, placed.at_head) == ("new", None, False)


def test_only_what_follows_the_known_turn_is_new() -> None:
    known = lineage.endings(HELLO)[0]
    parent, placed = decide(HELLO, match=(turn("t1"), known))
    assert (placed.rule, parent, placed.matched) == ("history", "t1", 2)
    assert placed.parts(tuple(HELLO)) == ((), (HELLO[2],))


def test_what_the_chain_does_not_know_is_imported_up_to_the_last_answer() -> None:
    messages = [*HELLO, Message.assistant("foreign"), Message.user("last")]
    _, placed = decide(messages, match=(turn("t1"), lineage.endings(messages)[0]))
    assert placed.parts(tuple(messages)) == ((HELLO[2], Message.assistant("foreign")), (Message.user("last"),))
    assert placed.diverged_at == 2


def test_a_wholly_unknown_history_is_imported_under_a_new_root() -> None:
    parent, placed = decide(HELLO, named=True)
    assert (placed.rule, parent) == ("unknown", None)
    assert placed.parts(tuple(HELLO))[0] == tuple(HELLO[:2])


def test_chain_new_starts_afresh_even_where_the_history_is_known() -> None:
    parent, placed = decide(HELLO, named=True, fresh=True, match=(turn("t1"), lineage.endings(HELLO)[0]))
    assert (placed.rule, parent) == ("fresh", None)


def test_an_id_of_ours_wins_over_everything() -> None:
    asked = Message.user("a")
    parent, placed = decide([asked], named=True, continues="t9")
    assert (placed.rule, parent, placed.parts((asked,))) == ("id", "t9", ((), (asked,)))


def test_it_says_where_the_history_left_the_heads_path() -> None:
    known = lineage.endings(HELLO)[0]
    assert decide(HELLO, match=(turn("t1"), known), head="t1")[1].diverged_at is None
    assert decide(HELLO, match=(turn("t1"), known), head="t2")[1].diverged_at == 2
    assert decide(HELLO, named=True, head="t2")[1].diverged_at == 0


def test_texts_and_calls_of_an_answer_match_in_whichever_order_the_wire_kept_them() -> None:
    call: Block = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    one, two = Message.assistant("one").content, Message.assistant("two").content
    asked = Message.user("q")
    split = hash_of(asked, Message("assistant", (*one, call, *two)))
    assert split == hash_of(asked, Message("assistant", (*Message.assistant("one\n\ntwo").content, call)))
    assert split != hash_of(asked, Message("assistant", (*one, call)))


def test_no_text_can_pass_for_two_blocks() -> None:
    a = Message("user", ({"type": "text", "text": "x"}, {"type": "image", "source": {"data": "y"}}))
    shape = lineage._normal("user", a.content)
    assert hash_of(a, Message.assistant("a")) != hash_of(Message.user(shape), Message.assistant("a"))


def test_a_history_is_cut_into_exchanges() -> None:
    cut = lineage.past([Message.assistant("welcome"), *HELLO, Message.assistant("done")])
    assert [len(exchange.input) for exchange in cut] == [0, 1, 1]
    assert [exchange.output[0]["text"] for exchange in cut] == ["welcome", "hi there", "done"]


# --- what a client sees of several texts --------------------------------------------------------------------

PIECES = st.lists(st.lists(st.text(" \n\tab", max_size=4), max_size=4), max_size=4)


@given(PIECES)
def test_the_streamed_text_is_the_whole_text_and_has_the_blocks_hash(texts: list[list[str]]) -> None:
    join, streamed = lineage.TextJoin(), ""
    for pieces in texts:
        join.next_text()
        streamed += "".join(map(join.feed, pieces))
    streamed += join.end()
    blocks: list[Block] = [{"type": "text", "text": "".join(pieces)} for pieces in texts]
    assert streamed == lineage.answer_text(blocks)
    assert lineage.path_hash(None, [], blocks) == lineage.path_hash(None, [], Message.assistant(streamed).content)


# --- random trees, random distortions ---------------------------------------------------------------------

WORDS = st.sampled_from(["a", "b", " a b ", "a\n\nb", "été 猫"])
TEXT = st.builds(lambda text: {"type": "text", "text": text}, WORDS)
IMAGE = st.builds(lambda data: {"type": "image", "source": {"type": "base64", "data": data}}, WORDS)
CALL = st.builds(lambda city: {"type": "tool_use", "id": "toolu_1", "name": "w", "input": {"city": city}}, WORDS)
RESULT = st.builds(lambda said: {"type": "tool_result", "tool_use_id": "toolu_1", "content": said}, WORDS)
ASKED = st.builds(
    lambda results, rest: Message("user", (*results, *rest)),
    st.lists(RESULT, max_size=1),
    st.lists(TEXT | IMAGE, min_size=1, max_size=3),
)
SAID = st.builds(
    lambda texts, calls: Message("assistant", (*texts, *calls)), st.lists(TEXT), st.lists(CALL, max_size=1)
)
EXCHANGE = st.tuples(ASKED, SAID)


def spoken(messages: Iterable[Message]) -> list[tuple[str, list[Any]]]:
    """What was said, written down another way than the hash does it: this is the truth the match is held to."""
    out: list[tuple[str, list[Any]]] = []
    for message in messages:
        said: list[Any] = []
        for block in message.content:
            if block["type"] == "text" and said and said[-1][0] == "text":
                said[-1] = ("text", said[-1][1] + "\n\n" + block["text"].strip())
            elif block["type"] == "text":
                said.append(("text", block["text"].strip()))
            else:
                kept = {name: value for name, value in block.items() if name not in ("id", "tool_use_id")}
                said.append((block["type"], kept["content"].strip() if "content" in kept else repr(kept)))
        out.append((message.role, said))
    return out


@dataclass(frozen=True)
class Known:
    turn: Turn
    messages: tuple[Message, ...]


@st.composite
def trees(draw: st.DrawFn) -> list[Known]:
    """Turns of a tree, each with the conversation that leads to it; contents repeat, so that branches look alike."""
    pool = draw(st.lists(EXCHANGE, min_size=2, max_size=4))
    known: list[Known] = []
    seen: set[str] = set()
    for seq in range(draw(st.integers(1, 8))):
        above = draw(st.sampled_from([None, *known]))
        asked, said = draw(st.sampled_from(pool))
        messages = (*(above.messages if above else ()), asked, said)
        path_hash = lineage.path_hash(above.turn.path_hash if above else None, [asked], said.content)
        if path_hash not in seen:
            seen.add(path_hash)
            known.append(Known(turn(f"t{seq}", seq, path_hash=path_hash), messages))
    return known


def distort(draw: st.DrawFn, message: Message) -> list[Message]:
    """What clients do to a message on its way back; its meaning stays."""
    blocks = [dict(block) for block in message.content]
    padded = st.sampled_from(["{}", " {}", "{}\n", "\t{} "])
    for block in blocks:
        if block["type"] == "text":
            block["text"] = draw(padded).format(block["text"].strip())
        elif block["type"] == "tool_result":
            block["tool_use_id"] = "call_9"
            if draw(st.booleans()):
                block["content"] = [{"type": "text", "text": draw(padded).format(block["content"])}]
        elif block["type"] == "tool_use":
            block["id"] = "call_9"
    if message.role == "assistant" and draw(st.booleans()):
        blocks.insert(0, {"type": "thinking", "thinking": "…"})
    if draw(st.booleans()):
        blocks.append({"type": "text", "text": "  "})
    texts = [block for block in blocks if block["type"] == "text"]
    if len(texts) > 1 and message.role == "assistant" and draw(st.booleans()):
        joined = {"type": "text", "text": lineage.answer_text(texts)}
        blocks = [joined, *(block for block in blocks if block["type"] != "text")]
    if len(blocks) > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, len(blocks) - 1))
        return [replace(message, content=tuple(blocks[:cut])), replace(message, content=tuple(blocks[cut:]))]
    return [replace(message, content=tuple(blocks))]


@given(st.data())
def test_the_match_is_the_deepest_true_ancestor_and_never_a_foreign_one(data: st.DataObject) -> None:
    known = data.draw(trees())
    base = data.draw(st.sampled_from(known))
    cut = data.draw(st.integers(0, len(base.messages) // 2)) * 2
    more = [message for exchange in data.draw(st.lists(EXCHANGE, max_size=2)) for message in exchange]
    plain = (*base.messages[:cut], *more, Message.user("the new one"))
    sent = data.draw(st.composite(lambda draw: [one for message in plain for one in distort(draw, message)])())
    by_hash = {one.turn.path_hash: one.turn for one in known}
    found = [by_hash[ending.hash] for ending in lineage.endings(sent) if ending.hash in by_hash]
    said = spoken(plain)
    true = [one for one in known if spoken(one.messages) == said[: len(one.messages)]]
    assert {turn.id for turn in found} == {one.turn.id for one in true}
    if found:
        assert found[-1].id == max(true, key=lambda one: len(one.messages)).turn.id


@pytest.mark.timeout(60)
def test_very_many_messages_of_one_role_and_texts_of_one_message_are_hashed_in_linear_time() -> None:
    many = [Message.user("a" * 50)] * 200_000
    [ending] = lineage.endings([*many, Message.assistant("so")])
    assert ending.end == len(many) + 1
    [(role, blocks, end)] = lineage.runs(many)
    assert (role, len(blocks), end) == ("user", 200_000, 200_000)
    parts = Message("user", tuple(block for message in many for block in message.content))
    assert hash_of(parts, Message.assistant("so")) == ending.hash
