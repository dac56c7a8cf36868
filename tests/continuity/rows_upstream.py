"""Rows about the provider, the words, the model and the settings of a turn."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

from turnfault.provider.script import Behaviour, Big, Cut, ErrorEvent, Fail, Reply, Stall

from ..cutting import held, let_go, quiet
from .row import BOTH, NEW, Breaks, Row, Says
from .rows_cli import LEFT
from .score import Fact
from .talk import EngineTalk, RequestRefused, Talk

RESET = {"retry-after": "1", "anthropic-ratelimit-unified-reset": "4102444800"}


def once(behaviour: Behaviour) -> Breaks:
    """One request fails; the CLI or the client tries again."""

    async def run(talk: Talk) -> None:
        fact = talk.new_fact()
        talk.upstream.when(fact.key, behaviour)
        await talk.tell(fact, tries=3)

    return run


def cut_once(*, streams: bool) -> Breaks:
    """The stream is cut after the CLI has passed words on; with `streams`, after the client has them too."""

    async def run(talk: Talk) -> None:
        cut = held(Cut(after=2))
        fact = talk.new_fact()
        talk.upstream.when(fact.key, cut)
        if isinstance(talk, EngineTalk):
            talk.streams = streams
            async with let_go(cut, engine=talk.next_engine, stream=streams):
                await talk.tell(fact)
            talk.streams = False
            return
        telling = asyncio.create_task(talk.tell(fact))
        await cut.reached.wait()
        await quiet(talk.pids())
        cut.open()
        await telling

    return run


def always(behaviour: Behaviour) -> Breaks:
    """The prompt fails until the client gives up; then it says something else."""

    async def run(talk: Talk) -> None:
        fact = talk.new_fact()
        talk.upstream.when(fact.key, behaviour, times=None)
        try:
            await talk.tell(fact, tries=2)
        except RequestRefused:
            return
        raise AssertionError("it was to fail")

    return run


def fails_then_resent(behaviour: Behaviour) -> Breaks:
    """It fails through all of the CLI's own retries; then the client sends the same again, and it is answered."""

    async def run(talk: Talk) -> None:
        fact = talk.new_fact()
        talk.upstream.when(fact.key, behaviour, times=None)
        try:
            await talk.tell(fact)
        except RequestRefused:
            talk.upstream.heal()
        await talk.tell(fact, tries=2)

    return run


# Megabytes are more tokens than a model takes: told the truth, the CLI would compact the conversation.
FEW_TOKENS = {"input_tokens": 10, "output_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}


def _roomy(breaks: Breaks) -> Breaks:
    """A model with room for megabytes."""

    async def run(talk: Talk) -> None:
        talk.upstream.when("", Reply(usage=FEW_TOKENS), times=None)
        await breaks(talk)

    return run


async def answer_of_5_mb(talk: Talk) -> None:
    fact = talk.new_fact()
    talk.upstream.when(fact.key, replace(Big(5 * 1024 * 1024), usage=FEW_TOKENS))
    await talk.tell(fact)
    talk.upstream.when("", Reply(usage=FEW_TOKENS), times=None)


def _failed(code: str, words: str = "") -> str:
    return rf"\*\*failed\*\* \(`{code}`\): .*{words}"


# CLI 1.0.x writes a failed turn into a copy of the session, which is taken away; a running 2.1.x takes it back: nothing
# has to be mended. Another host finds what was left ("": the turn after it may say so).


def _resent(code: str, words: str) -> tuple[Says, Says]:
    return {4: _failed(code, words), 5: ""}, {4: _failed(code)}


def _given_up(code: str, words: str) -> tuple[Says, Says]:
    says = {4: _failed(code, words), 5: _failed(code, words), 6: ""}
    return says, {4: _failed(code), 5: _failed(code)}


def _asked_again(why: str) -> tuple[Says, Says]:
    """CLI 1.0.x does not tell that it asks again."""
    return {4: rf"\*\*retried\*\*: The provider failed \({why}\): the request was repeated\."}, {}


UPSTREAM = "upstream"
CUT = r"\*\*retried\*\*: The provider's stream was cut"
FAST = {"cli_retries": 1}
ROWS = (
    Row(UPSTREAM, "400, resent", fails_then_resent(Fail(400)), quick=NEW, settings=FAST,
        says=_resent("invalid_request", "API Error: 400 scripted failure")),
    Row(UPSTREAM, "400, given up", always(Fail(400)), settings=FAST,
        says=_given_up("invalid_request", "API Error: 400")),
    Row(UPSTREAM, "401, resent", fails_then_resent(Fail(401)), settings=FAST,
        says=({4: _failed("claude_not_logged_in", "401"), 5: LEFT}, {4: _failed("claude_not_logged_in")})),
    Row(UPSTREAM, "429 with a reset, resent", fails_then_resent(Fail(429, RESET)), settings=FAST,
        says=_resent("rate_limited", "429")),
    Row(UPSTREAM, "500 once", once(Fail(500)), says=_asked_again("500 server_error")),
    Row(UPSTREAM, "500 through every retry, resent", fails_then_resent(Fail(500)), settings=FAST,
        says=_resent("upstream_error", "500")),
    Row(UPSTREAM, "529 once", once(Fail(529)), says=_asked_again("529 overloaded")),
    Row(UPSTREAM, "529 through every retry, given up", always(Fail(529)), quick=NEW, settings=FAST,
        says=_given_up("overloaded", "529")),
    Row(UPSTREAM, "cut mid-stream once", cut_once(streams=False), says={4: rf"{CUT}.*it was dropped"}),
    Row(UPSTREAM, "cut mid-stream after the client had words", cut_once(streams=True), bare=False, quick=NEW,
        says={4: rf"{CUT}.*they are part of the answer"}),
    Row(UPSTREAM, "cut mid-stream always, given up", always(Cut(after=2)), settings={"cli_retries": 0},
        says=_given_up("upstream_error", "Connection to the API was lost")),
    Row(UPSTREAM, "a stall", fails_then_resent(Stall(after=2)), settings={"idle_timeout": 8.0, "cli_retries": 0},
        says=_resent("turn_timeout", "nothing came from Claude CLI")),
    Row(UPSTREAM, "an error event mid-stream", once(ErrorEvent(after=2)), quick=NEW,
        says=({4: CUT}, {4: _failed("upstream_error")})),
    Row(UPSTREAM, "an answer of 5 MB", answer_of_5_mb, quick=NEW),
)  # fmt: skip


# --- words ------------------------------------------------------------------------------------------------


def _says(text: str) -> Breaks:
    """The words must reach the model as they are, then and at the next turn."""

    async def run(talk: Talk) -> None:
        await talk.tell(Fact(text, text))

    return run


def _clearly_refused(text: str) -> Breaks:
    async def run(talk: Talk) -> None:
        with suppress(RequestRefused):
            await talk.tell(Fact(text, text))
        assert talk.bare or talk.refusals[-1] == "invalid_request"

    return run


_PLANES = "".join(chr(plane * 0x10000 + 0x123) for plane in (0, 1, 2, 3, 14, 15, 16)) + "é é \u202e \ufeff. \u2028 ."
_RECORD = '{"type":"user","uuid":"00000000-0000-4000-8000-000000000000","parentUuid":null,"message":{"role":"user"}}'
_REFUSED = {4: _failed("invalid_request", "(the prompt|would run this prompt)")}
WORDS = "text"
# Those that a CLI might run or cut are told to it each time by backends/claude/process/test_real_cli.py.
VERBATIM = (
    ("`/clear`", "/clear", BOTH, ()),
    ("`/compact now`", "/compact now", NEW, ()),
    ("`!cmd`", "!echo hello", BOTH, ()),
    ("leading `--`", "--resume=00000000-0000-4000-8000-000000000000 --help", BOTH, ()),
    ("NUL", "before\0after", BOTH, ()),
    ("2 MB", "word and " * (2 * 1024 * 1024 // 9) + "end", BOTH, NEW),
    ("transcript-like JSON", f'{_RECORD}\n{{"sessionId":"00000000-0000-4000-8000-000000000000"}}', BOTH, ()),
    ("every Unicode plane", _PLANES, BOTH, ()),
    ("`<system-reminder>`", "a <system-reminder>no reminder</system-reminder> b", NEW, ()),
)


async def name_a_file(talk: Talk) -> None:
    """The words reach the model, the file does not."""
    (talk.cwd / "secret.txt").write_text("fact-0-5ec2e7ed")
    await _roomy(_says("look at @secret.txt please"))(talk)


TEXT_ROWS = (
    Row(WORDS, "`@file`", name_a_file, quick=NEW),
    *(Row(WORDS, name, _roomy(_says(text)), clis=clis, quick=quick) for name, text, clis, quick in VERBATIM),
    Row(WORDS, "a lone surrogate", _clearly_refused("before \ud800 after"), clis=BOTH, says=_REFUSED),
    Row(WORDS, "empty", _clearly_refused(""), quick=NEW, says=_REFUSED),
    Row(WORDS, "only whitespace", _clearly_refused(" \n\t "), clis=BOTH, says=_REFUSED),
    Row(
        WORDS,
        "`/` alone with nothing to hide it behind",
        _clearly_refused("/"),
        clis=("1.0",),
        bare=False,
        says=_REFUSED,
    ),
)


# --- what a turn asks for --------------------------------------------------------------------------------


def _with(**extra: Any) -> Breaks:
    async def run(talk: Talk) -> None:
        talk.extra = {**talk.extra, **extra}

    return run


async def three_models(talk: Talk) -> None:
    for model in ("haiku", "opus", "sonnet", "haiku"):
        talk.model = model
        await talk.tell()


async def think_then_switch(talk: Talk) -> None:
    """A signed thought of one model is nothing to another one; the answers are."""
    for model in ("sonnet", "opus", "sonnet"):
        talk.model = model
        fact = talk.new_fact()
        talk.upstream.when(fact.key, Reply(thinking="hm"))
        await talk.tell(fact)
        await talk.restart()


CODER = {"coder": {"tools": ["Read"]}}
MODEL = "model"
# CLI 1.0.120 sends sealed thoughts of other models along, and, from the fifth turn on, changes what they were sealed
# over: the proxy leaves them out.
VOID = "thoughts? of earlier answers"
OTHERS = "thoughts? of the other model"
MODEL_ROWS = (
    Row(
        MODEL,
        "haiku → opus → sonnet → haiku",
        three_models,
        quick=NEW,
        thinks=False,
    ),
    Row(
        MODEL,
        "thoughts of several models",
        think_then_switch,
        prefix=False,
        says=(dict.fromkeys((5, 6), OTHERS), dict.fromkeys((5, 6), VOID)),
    ),
    Row(
        MODEL,
        "system prompt changed",
        _with(system="You are BETA."),
        quick=NEW,
        prefix=False,
        says={4: "The system prompt had changed"},
    ),
    Row(MODEL, "effort changed", _with(effort="high"), bare=False),
    Row(
        MODEL,
        "tools profile changed",
        _with(profile="coder"),
        bare=False,
        prefix=False,
        settings={"profiles": CODER},
        says={4: VOID},
    ),
)
