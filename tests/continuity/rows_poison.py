"""Rows about what makes every later request of a session fail, unless somebody leaves it out."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cli_session_proxy.backends.claude.sessions import summaries
from cli_session_proxy.commands import moving
from cli_session_proxy.domain.client_tools import UNPARSED
from cli_session_proxy.domain.models import Block, Message, Tool
from turnfault.provider.rules import Rules
from turnfault.provider.script import Fail, Reply
from turnfault.provider.seen import Seen, parts

from ..media import document, image, paper, picture
from .row import NEW, Breaks, Row, Says
from .rows_upstream import FEW_TOKENS
from .score import Fact, Thinking
from .talk import ASKS_FOR_SUMMARY, EngineTalk, RequestRefused, Talk


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
        kept = thoughts(talk.upstream.requests[-1])
        talk.measured = Thinking("a repair, a restart and a branch", kept, number)
        assert kept == number
        assert not talk.upstream.refused

    return check


# --- sealed thinking --------------------------------------------------------------------------------------


def _with(**extra: Any) -> Breaks:
    async def run(talk: Talk) -> None:
        talk.extra = {**talk.extra, **extra}

    return run


KEPT = 0.95
CLOCK = "You are a clerk at desk {n}. It is {n}:0{n} PM on Monday, November {n}, 2026. Request id: req_8f{n}a9c."


def _is_new(talk: Talk) -> bool:
    return talk.settings.claude_bin is not None and talk.settings.claude_bin.readlink().name == "2.1"


async def a_clock(talk: Talk) -> None:
    """The system prompt has another time at every turn, ten times."""
    talk.extra = {**talk.extra, "system": CLOCK.format(n=1)}
    await talk.tell()
    refused = len(talk.upstream.refused)
    kept, prefixes = 0, []
    for number in range(2, 12):
        before = talk.upstream.requests[-1]
        talk.extra = {**talk.extra, "system": CLOCK.format(n=number)}
        await talk.tell()
        now = talk.upstream.requests[-1]
        assert now.body["system"] == before.body["system"]
        assert f"It is {number}:0{number} PM" in str(now.messages[-3:])
        kept += thoughts(now)
        prefixes.append(now.prefix_kept(before))
    # Of the answers since the first clock: one more at each turn.
    talk.measured = Thinking("ten changes of a clock in the system prompt", kept, sum(range(1, 11)), min(prefixes))
    if _is_new(talk):  # CLI 1.0.120 itself changes the messages before, from the fifth turn on
        assert talk.measured.share >= KEPT
        assert min(prefixes) >= KEPT
        assert len(talk.upstream.refused) == refused


async def another_model_and_back(talk: Talk) -> None:
    """A sealed thought of one model is nothing to another one, and is shown again to the first."""
    talk.model = "opus"
    await talk.tell()
    assert not thoughts(talk.upstream.requests[-1])
    talk.model = "sonnet"


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


async def foreign_ids(talk: Talk) -> None:
    """Written anew once: a repair comes to the same ones."""
    calls = (_call("functions.look:0"), _call("x|1"), _call("x|1"))
    results = (_result("functions.look:0"), _result("x|1"))
    await brings(_user(_words("look")), _assistant(*calls), _user(*results), _assistant(_words("Seen.")))(talk)
    await talk.tell()
    assert len(set(_ids(talk.upstream.requests[-1]))) == len(calls)
    await rebuild(talk)


def same_ids(talk: Talk) -> None:
    assert _ids(talk.upstream.requests[-1]) == _ids(talk.upstream.requests[-2])


def _ids(seen: Seen) -> list[str]:
    return [block["id"] for message in seen.messages for block in parts(message["content"]) if block.get("id")]


def brings_images(images: Sequence[Block]) -> Breaks:
    async def run(talk: Talk) -> None:
        await brings(_user(_words("what are these?"), *images), _assistant(_words("Dots.")))(talk)

    return run


async def a_huge_image(talk: Talk) -> None:
    """The provider counts its pixels, the scripted one its bytes: the CLI would think that the context is full."""
    talk.upstream.behave = lambda seen: Reply(thinking=f"thought {len(seen.messages)}", usage=FEW_TOKENS)
    await brings_images([image(picture(1500, 1500, noise=True))])(talk)


async def many_large_images(talk: Talk) -> None:
    await brings_images([image(picture(2100, 20)) for _ in range(21)])(talk)


async def more_than_a_request(talk: Talk) -> None:
    """CLI 2.1 would have the conversation summarised; that request is not taken either."""
    talk.upstream.when(ASKS_FOR_SUMMARY, TOO_LONG, times=None)
    talk.upstream.rules = replace(Rules(), request_bytes=200_000)
    await brings_images([image(picture(260, 260, noise=True))])(talk)


async def an_image_that_is_refused_later(talk: Talk) -> None:
    """The provider took it, and refuses every later request with it."""
    talk = engine(talk)
    talk.beside = (image(picture(200, 200)),)
    await talk.tell()
    talk.beside = ()
    talk.upstream.rules = replace(Rules(), image_side=100)


async def a_document_that_is_refused_later(talk: Talk) -> None:
    """As the image: what was read once is too long now."""
    talk = engine(talk)
    talk.beside = (document(paper(3)),)
    await talk.tell()
    talk.beside = ()
    talk.upstream.rules = replace(Rules(), pdf_pages=2)


async def an_adopted_session(talk: Talk) -> None:
    """Somebody's own session, with an image in it that no model takes, becomes another agent."""
    talk = engine(talk)
    lines = [json.loads(line) for line in talk.transcript.read_text().splitlines()]
    await talk.down()
    leaf = [line for line in lines if line.get("type") == "assistant"][-1]
    said = {**leaf, "uuid": str(uuid.uuid4()), "parentUuid": leaf["uuid"], "type": "user"}
    said["message"] = {"role": "user", "content": [_words("what is this?"), image(picture(9000, 100))]}
    answer = {**leaf, "uuid": str(uuid.uuid4()), "parentUuid": said["uuid"]}
    answer["message"] = {**leaf["message"], "id": "msg_of_theirs", "content": [_words("A bar.")]}
    file = talk.settings.var / "theirs.jsonl"
    theirs = (json.dumps(line).replace(talk.session_id, str(SESSION)) for line in (*lines, said, answer))
    file.write_text("".join(f"{line}\n" for line in theirs))
    await moving.adopt(talk.settings, "local", str(file), "b")
    talk.agent = "b"
    await talk.up()


async def an_unreadable_pdf(talk: Talk) -> None:
    """It is refused in words before anything is sent to the model."""
    talk = engine(talk)
    talk.beside = (document(paper(password="secret")),)
    asked = len(talk.upstream.requests)
    with suppress(RequestRefused):
        await talk.tell()
    assert talk.refusals == ["invalid_request"]
    assert len(talk.upstream.requests) == asked
    talk.beside = ()


async def an_oversized_image(talk: Talk) -> None:
    """The CLI makes it smaller by itself."""
    talk = engine(talk)
    talk.beside = (image(picture(9000, 100)),)
    await talk.tell()
    talk.beside = ()


# --- a context that is full -------------------------------------------------------------------------------


async def full(talk: Talk) -> None:
    """The provider counts more than the CLI lets a request have: it has the conversation summarised."""
    fact = talk.new_fact()
    thinking = None if talk.upstream.behave is None else "hm"
    talk.upstream.when(fact.key, Reply(usage={"input_tokens": 990_000}, thinking=thinking))
    await talk.tell(fact)
    talk.upstream.when(ASKS_FOR_SUMMARY, Reply(f"<summary>{' '.join(fact.key for fact in talk.facts)}</summary>"))


async def full_at_once(talk: Talk) -> None:
    """No request that holds the whole conversation is taken, the CLI's own for a summary neither."""
    for _ in range(6):
        fact = talk.new_fact()
        await talk.tell(Fact(f"{fact.text} {'word ' * 800}", fact.key))
    talk.upstream.rules = Rules(context=6000)
    talk.upstream.when(ASKS_FOR_SUMMARY, TOO_LONG, times=None)
    talk.upstream.behave = lambda seen: Reply(
        " ".join(dict.fromkeys(KEY.findall(seen.prompt))) if summaries.ASK in seen.prompt else None, thinking="hm"
    )


# --- limits and login -------------------------------------------------------------------------------------


async def renewed_login(talk: Talk) -> None:
    """By `claude auth login` in another terminal; the provider takes the login of the running process no more."""
    env = {name: value for name, value in talk.settings.claude_env.items() if name != "ANTHROPIC_API_KEY"}
    await talk.down()
    _logged_in(talk, "old")
    await talk.up(claude_env=env)
    await talk.tell()
    assert _token(talk.upstream.requests[-1]) == "old"
    _logged_in(talk, "new")
    talk.upstream.behave = lambda seen: Reply(thinking="hm") if _token(seen) == "new" else Fail(401)


def _logged_in(talk: Talk, token: str) -> None:
    assert talk.settings.claude_config_dir is not None
    file = talk.settings.claude_config_dir / ".credentials.json"
    login = {"accessToken": token, "refreshToken": None, "expiresAt": None, "scopes": ["user:inference"]}
    file.write_text(json.dumps({"claudeAiOauth": login}))
    file.chmod(0o600)


def _token(seen: Seen) -> str:
    return seen.headers.get("authorization", "").removeprefix("Bearer ")


async def refused_login(talk: Talk) -> None:
    """The provider takes the login of the running process no more; a new process has a new one."""
    fact = talk.new_fact()
    talk.upstream.when(fact.key, Fail(401))
    await talk.tell(fact)


def _notes(number: int, *words: str) -> Says:
    return {number: "(.|\n)*".join(rf"\*\*(note|retried|repaired)\*\*: .*{word}" for word in words)}


POISON = "poison"
SESSION = uuid.UUID(int=1, version=4)


def poison(name: str, breaks: Breaks, **more: Any) -> Row:
    """The next turn is answered with one request upstream more than it takes, at most."""
    return Row(POISON, name, breaks, **{"bare": False, "calls": 2, **more})


KEY = re.compile(r"fact-\d+-[0-9a-f]{8}")
TOO_LONG = Fail(400, message="prompt is too long: 2 tokens > 1 maximum")
CODER = {"coder": {"tools": ["Read"]}}
SURROGATE = "half a \ud800 character"
REPLACED = r"The system prompt had changed: the request begins with the new one"
REPLACED_2 = f"{REPLACED}(?s:.*)asked again without 3 thoughts"
ANOTHERS: Block = {"type": "thinking", "thinking": "hm", "signature": "c2VhbGVk"}
CLOCKS = dict.fromkeys(range(5, 15), r"The system prompt had new values: they were sent with the prompt")
TOO_LARGE = "1 image of the prompt or the history would have been too large"
IN_PIECES = "the model is shown a summary of its first 9 exchanges"
CUT_OFF = {UNPARSED: '{"city": "Be'}
ROWS = (
    poison("sealed thinking, system prompt replaced", _with(system="You are BETA."), quick=NEW, prefix=False,
        says=(_notes(4, REPLACED_2), _notes(4, f"{REPLACED}(?s:.*)3 thoughts"))),
    poison("sealed thinking, a clock in the system prompt, ten times", a_clock, quick=NEW, prefix=False,
        says=({4: REPLACED, **CLOCKS}, {4: REPLACED, **CLOCKS, 15: "1 thought of earlier answers"})),
    poison("sealed thinking, a tool added", _with(tools=TOOLS), clis=NEW, prefix=False,
        says=_notes(4, "asked again without 3 thoughts")),
    poison("sealed thinking, tools in another order and spelling, restarted", tools_in_another_order, clis=NEW,
        prefix=False, says=_notes(4, "asked again without 3 thoughts")),
    poison("sealed thinking, the CLI's own tools changed", _with(profile="coder"), prefix=False,
        settings={"profiles": CODER}, says=_notes(4, "3 thoughts")),
    poison("sealed thinking, another model and back", another_model_and_back, prefix=False,
        says={4: "3 thoughts", 5: "1 thought"}),
    poison("sealed thinking, a branch", branch, prefix=False, after=keeps(3), says={5: ""}),
    poison("sealed thinking, rebuilt", rebuild, after=keeps(3), says={4: "repaired"}),
    poison("sealed thinking, restarted", restart, after=keeps(3)),
    poison("a brought history: an image over 5 MB", a_huge_image, says=_notes(5, TOO_LARGE)),
    poison("a brought history: more than 20 images over 2,000 px", many_large_images,
        says=_notes(5, "21 images of the prompt or the history would have been too large")),
    poison("an adopted session: an image over 8,000 px", an_adopted_session, prefix=False,
        says=({4: "adopted", **_notes(5, TOO_LARGE)}, {4: "adopted", **_notes(5, TOO_LARGE, "3 thoughts")})),
    # CLI 2.1 asks again without the image, and then without the thoughts behind it.
    poison("an image that the provider refuses later", an_image_that_is_refused_later, prefix=False, calls=3,
        says=(_notes(5, "asked again without 1 image"), _notes(5, "sent without 1 image of earlier turns"))),
    poison("a document that the provider refuses later", a_document_that_is_refused_later, prefix=False, calls=3,
        says=_notes(5, "1 document")),
    poison("a brought history: images that fill the request (413)", more_than_a_request, prefix=False,
        says=_notes(5, "sent without 1 image of earlier turns")),
    poison("a brought history: a PDF that cannot be read", brings(_user(_words("read"), document(b"no PDF")),
        _assistant(_words("I cannot."))), says=_notes(5, "1 document of the prompt or the history could not")),
    poison("a brought history: another's sealed thinking", brings(_user(_words("why?")), _assistant(ANOTHERS,
        _words("So."))), says=_notes(5, "1 thought in the client's history: left out")),
    poison("a brought history: a call without its result", brings(_user(_words("look")), _assistant(_call("c1")),
        _user(_words("well?")), _assistant(_words("No."))), says=_notes(6, "1 call in the client's history")),
    poison("a brought history: ids of others, and one used twice", foreign_ids, after=same_ids,
        says={**_notes(6, "3 ids of tool calls"), 7: "repaired"}),
    poison("a brought history: arguments cut off", brings(_user(_words("look")), _assistant(
        {**_call("c1"), "input": CUT_OFF}), _user(_result("c1")), _assistant(_words("Seen."))),
        says=_notes(6, "The arguments of 1 call")),
    poison("a brought history: empty text", brings(_user(_words("go on")), _assistant(_words(" "))),
        says=_notes(5, "1 message in the client's history was empty")),
    poison("a brought history: half a character", brings(_user(_words(SURROGATE)), _assistant(_words("Hm."))),
        says=_notes(5, "1 half character")),
    poison("a PDF that cannot be read, sent live", an_unreadable_pdf, after=keeps(3)),
    poison("an image over 8,000 px, sent live", an_oversized_image,
        says={4: "The CLI made 1 image of the prompt smaller"}),
    # CLI 1.0.120 asks for its summary under another head: with sealed thoughts that is refused, and nothing is lost.
    poison("a full context", full, summarised=True, prefix=False, says=({5: "compacted"}, {})),
    # Without thoughts it gets its summary, with the prompt in it: it is stopped there, and the proxy makes one.
    poison("a full context, without thoughts", full, thinks=False, summarised=True, prefix=False,
        says=({5: "compacted"}, {5: "the model is shown a summary of its first"})),
    poison("a full context that cannot be summarised at once", full_at_once, summarised=True, prefix=False,
        says=({10: IN_PIECES}, {6: "5 thoughts", 7: "1 thought", 8: "1 thought", 9: "1 thought", 10: IN_PIECES})),
    # Of the warm process of one host: at another one the turn has a new one, and the login there.
    poison("a login that was renewed under a warm process", renewed_login, on_hosts=False),
    poison("a login that the running process does not take up", refused_login, clis=NEW, quick=NEW, on_hosts=False,
        settings={"cli_retries": 0}, says={4: r"\*\*retried\*\*: Attempt 1 failed \(.*401"}),
)  # fmt: skip
