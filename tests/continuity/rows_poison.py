"""Rows about what makes every later request of a session fail, unless somebody leaves it out."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from PIL import Image

from cli_session_proxy.domain.client_tools import UNPARSED
from cli_session_proxy.domain.models import Block, Message, Tool
from cli_session_proxy.testing.rules import Rules
from cli_session_proxy.testing.script import Fail
from cli_session_proxy.testing.seen import Seen, parts

from ..media import document, paper
from .row import BOTH, NEW, Breaks, Row, Says
from .talk import EngineTalk, Refused, Talk


def engine(talk: Talk) -> EngineTalk:
    assert isinstance(talk, EngineTalk)
    return talk


def thoughts(seen: Seen) -> int:
    """How many sealed thoughts the model is shown again."""
    blocks = (block for message in seen.messages for block in parts(message["content"]))
    return sum(block["type"] == "thinking" for block in blocks)


def keeps(number: int) -> Callable[[Talk], None]:
    """Every thought of so many answers is shown again, and none had to be left out on the way."""

    def check(talk: Talk) -> None:
        assert thoughts(talk.upstream.requests[-1]) == number
        assert not talk.upstream.refused

    return check


# --- sealed thinking --------------------------------------------------------------------------------------


def _with(**extra: Any) -> Breaks:
    async def run(talk: Talk) -> None:
        talk.extra = {**talk.extra, **extra}

    return run


CLOCK = "You are a clerk at desk {n}. It is {n}:0{n} PM on Monday, November {n}, 2026. Request id: req_8f{n}a9c."


async def a_clock(talk: Talk) -> None:
    """The system prompt has another time at every turn, ten times."""
    talk.extra = {**talk.extra, "system": CLOCK.format(n=1)}
    await talk.tell()
    refused = len(talk.upstream.refused)
    for number in range(2, 12):
        before, kept = talk.upstream.requests[-1], thoughts(talk.upstream.requests[-1])
        talk.extra = {**talk.extra, "system": CLOCK.format(n=number)}
        await talk.tell()
        now = talk.upstream.requests[-1]
        assert now.body["system"] == before.body["system"]
        assert f"It is {number}:0{number} PM" in str(now.messages[-3:])
        if talk.settings.claude_bin is not None and talk.settings.claude_bin.readlink().name == "2.1":
            # CLI 1.0.120 itself changes the messages before, from the fifth turn on.
            assert thoughts(now) == kept + 1
            assert now.prefix_kept(before) == 1.0
            assert len(talk.upstream.refused) == refused


TOOLS = (Tool("get_time", "The time."), Tool("get_weather", "The weather.", {"properties": {"a": {}, "b": {}}}))
SHUFFLED = (Tool("get_weather", "The weather.", {"properties": {"b": {}, "a": {}}}), Tool("get_time", "The time."))


async def tools_in_another_order(talk: Talk) -> None:
    talk.extra = {**talk.extra, "tools": TOOLS}
    await talk.tell()
    await talk.tell()
    before, refused = talk.upstream.requests[-1], len(talk.upstream.refused)
    talk.extra = {**talk.extra, "tools": SHUFFLED}
    await talk.restart()
    await talk.tell()
    assert talk.upstream.requests[-1].prefix_kept(before) == 1.0
    assert len(talk.upstream.refused) == refused


async def branch(talk: Talk) -> None:
    known = engine(talk).turn.id
    facts = list(talk.facts)
    await talk.tell()
    talk.facts = facts
    engine(talk).once = {"continues": known}


async def rebuild(talk: Talk) -> None:
    await talk.down()
    talk.transcript.unlink()
    await talk.up()


async def restart(talk: Talk) -> None:
    await talk.restart()


# --- a history that a client brings along -----------------------------------------------------------------


def brings(*poison: Message) -> Breaks:
    """The client's history holds this behind what we know; the turn after it is the probe."""

    async def run(talk: Talk) -> None:
        talk = engine(talk)
        said = [message for fact in talk.facts for message in (Message.user(fact.text), Message.assistant(fact.answer))]
        talk.brings = (*said, *poison)

    return run


def _user(*blocks: Block) -> Message:
    return Message("user", blocks)


def _assistant(*blocks: Block) -> Message:
    return Message("assistant", blocks)


def _words(text: str) -> Block:
    return {"type": "text", "text": text}


def _call(id: str, **arguments: Any) -> Block:
    return {"type": "tool_use", "id": id, "name": "look", "input": arguments}


def _result(id: str) -> Block:
    return {"type": "tool_result", "tool_use_id": id, "content": "seen"}


def image(width: int, height: int, *, noise: bool = False) -> Block:
    picture = Image.new("RGB", (width, height), "teal")
    if noise:
        picture = Image.frombytes("RGB", (width, height), random.Random(1).randbytes(3 * width * height))
    file = io.BytesIO()
    picture.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def pdf(data: bytes) -> Block:
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(data).decode()}
    return {"type": "document", "source": source}


def brings_images(images: Sequence[Block]) -> Breaks:
    async def run(talk: Talk) -> None:
        await brings(_user(_words("what are these?"), *images), _assistant(_words("Dots.")))(talk)

    return run


async def a_huge_image(talk: Talk) -> None:
    await brings_images([image(1250, 1250, noise=True)])(talk)


async def many_large_images(talk: Talk) -> None:
    await brings_images([image(2100, 20) for _ in range(21)])(talk)


async def more_than_a_request(talk: Talk) -> None:
    talk.upstream.rules = replace(Rules(), request_bytes=200_000)
    await brings_images([image(260, 260, noise=True)])(talk)


async def an_unreadable_pdf(talk: Talk) -> None:
    """It is refused in words before anything is sent to the model."""
    talk = engine(talk)
    talk.beside = (document(paper(password="secret")),)
    asked = len(talk.upstream.requests)
    with suppress(Refused):
        await talk.tell()
    assert talk.refusals == ["invalid_request"]
    assert len(talk.upstream.requests) == asked
    talk.beside = ()


# --- limits and login -------------------------------------------------------------------------------------


async def renewed_login(talk: Talk) -> None:
    """The provider takes the login of the running process no more; a new process has a new one."""
    fact = talk.new_fact()
    talk.upstream.when(fact.key, Fail(401))
    await talk.tell(fact)


def _notes(number: int, *words: str) -> Says:
    return {number: "(.|\n)*".join(rf"\*\*repaired\*\*: .*{word}" for word in words)}


POISON = "poison"
SURROGATE = "half a \ud800 character"
REPLACED = r"The system prompt had changed: the new one stands at the head"
REPLACED_2 = f"{REPLACED}(?s:.*)asked again without 3 thoughts"
ANOTHERS: Block = {"type": "thinking", "thinking": "hm", "signature": "c2VhbGVk"}
CLOCKS = dict.fromkeys(range(5, 15), r"what is new of it went to the model with the prompt")
CUT_OFF = {UNPARSED: '{"city": "Be'}
ROWS = (
    Row(POISON, "sealed thinking, system prompt replaced", _with(system="You are BETA."), quick=BOTH, prefix=False,
        bare=False, says=(_notes(4, REPLACED_2), _notes(4, f"{REPLACED}(?s:.*)3 thoughts"))),
    Row(POISON, "sealed thinking, a clock in the system prompt, ten times", a_clock, quick=BOTH, prefix=False,
        bare=False, says=({4: REPLACED, **CLOCKS}, {4: REPLACED, **CLOCKS, 15: "1 thought of earlier answers"})),
    Row(POISON, "sealed thinking, a tool added", _with(tools=TOOLS), clis=NEW, quick=NEW, prefix=False, bare=False,
        says=_notes(4, "asked again without 3 thoughts")),
    Row(POISON, "sealed thinking, tools in another order and spelling, restarted", tools_in_another_order, clis=NEW,
        quick=NEW, prefix=False, bare=False, says=_notes(4, "asked again without 3 thoughts")),
    Row(POISON, "sealed thinking, a branch", branch, bare=False, quick=NEW, prefix=False, after=keeps(3), says={5: ""}),
    Row(POISON, "sealed thinking, rebuilt", rebuild, bare=False, quick=BOTH, after=keeps(3), says={4: "repaired"}),
    Row(POISON, "sealed thinking, restarted", restart, bare=False, after=keeps(3)),
    Row(POISON, "a brought history: an image over 5 MB", a_huge_image, bare=False, quick=BOTH,
        says=_notes(5, "1 image in the history that came in would have been too large")),
    Row(POISON, "a brought history: more than 20 images over 2,000 px", many_large_images, bare=False,
        says=_notes(5, "21 images in the history that came in would have been too large")),
    Row(POISON, "a brought history: images that fill the request (413)", more_than_a_request, bare=False, clis=("1.0",),
        says=_notes(5, "1 image of earlier turns left out")),
    Row(POISON, "a brought history: a PDF that cannot be read", brings(_user(_words("read"), pdf(b"no PDF")),
        _assistant(_words("I cannot."))), bare=False,
        says=_notes(5, "1 document in the history that came in could not be read")),
    Row(POISON, "a brought history: another's sealed thinking", brings(_user(_words("why?")), _assistant(ANOTHERS,
        _words("So."))), bare=False, quick=NEW,
        says=_notes(5, "1 thought in the client's history: left out")),
    Row(POISON, "a brought history: a call without its result", brings(_user(_words("look")), _assistant(_call("c1")),
        _user(_words("well?")), _assistant(_words("No."))), bare=False,
        says=_notes(6, "1 call in the client's history")),
    Row(POISON, "a brought history: ids of others, and one used twice", brings(_user(_words("look")), _assistant(
        _call("functions.look:0"), _call("x|1"), _call("x|1")), _user(_result("functions.look:0"), _result("x|1")),
        _assistant(_words("Seen."))), bare=False, quick=BOTH, says=_notes(6, "3 ids of tool calls")),
    Row(POISON, "a brought history: arguments cut off", brings(_user(_words("look")), _assistant(
        {**_call("c1"), "input": CUT_OFF}), _user(_result("c1")), _assistant(_words("Seen."))), bare=False,
        says=_notes(6, "The arguments of 1 call")),
    Row(POISON, "a brought history: empty text", brings(_user(_words("go on")), _assistant(_words(" "))), bare=False,
        says=_notes(5, "1 message in the client's history was empty")),
    Row(POISON, "a brought history: half a character", brings(_user(_words(SURROGATE)), _assistant(_words("Hm."))),
        bare=False, quick=NEW, says=_notes(5, "1 half character")),
    Row(POISON, "a PDF that cannot be read, sent live", an_unreadable_pdf, bare=False, quick=NEW, after=keeps(3)),
    Row(POISON, "a login that was renewed under a warm process", renewed_login, clis=NEW, quick=NEW, bare=False,
        settings={"cli_retries": 0}, says={4: r"\*\*repaired\*\*: Attempt 1 failed \(.*401"}),
)  # fmt: skip
