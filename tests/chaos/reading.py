"""A `messages` array as the exchanges that it tells. Pure."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from cli_session_proxy.backends.claude.sessions import summaries
from cli_session_proxy.backends.claude.sessions.composing import CLOSING
from cli_session_proxy.backends.claude.sessions.history import NO_RESULT
from cli_session_proxy.backends.claude.transcript import mending
from cli_session_proxy.domain.client_tools import NOT_ANSWERED
from cli_session_proxy.domain.lineage import TEXT_JOIN
from cli_session_proxy.git_memory.records import CLOSE as END_OF_ATTEMPTS
from cli_session_proxy.git_memory.records import OPEN as EARLIER_ATTEMPTS
from turnfault.provider.seen import parts, spoken

from . import pictures
from .journal import JSON, Answer, Asking, Result

# How 2.1.330 asks the model to go on from the blocks of an answer that were finished before its stream was cut, or had
# stood still for 10 s; and how it asks once more after a refusal, where the proxy has not ended it by then (2.1.332 in
# a reminder).
GO_ON = ("Your response above was cut off mid-stream.", "Your response above was stopped by a safety classifier")
REMINDER = "<system-reminder>"
# The key of a call's arguments under which the scripted model puts the call's token.
TOKEN = "token"
# How the token of a call without U+2028 begins: LiteLLM ends a line of a stream there (1.108), and loses that event.
PLAIN = "plain-"
# The text that the CLI puts behind a picture: the file in which it has kept it (2.1.330).
KEPT_PICTURE = "[Image: source: "
# How the CLI begins a conversation that it has summed up, how the proxy does, and the scripted model's mark in each
# summary.
SUMMED_UP = "This session is being continued from a previous conversation"
SUMMARY = re.compile(r"\bsummary-(\d+)\b")
# The scripted model's mark in each attempt that is written to a repository.
COMMITTED = re.compile(r"\bcommit-(\d+)\b")
# Under which generateContent's clients wrap the text of a result.
WRAPPED = "result"


def arguments(call: str) -> JSON:
    """All that the scripted model says in the call of this token: of each JSON type, and of no other call."""
    number = zlib.crc32(call.encode())
    text = "ä\n" if call.startswith(PLAIN) else "ä\u2028\n"
    return {
        TOKEN: call,
        "where": {"line": number, "column": number % 7 + 0.5},
        "of": [text, None, number % 2 == 0],
    }


def token(given: Mapping[str, Any]) -> str:
    """The token of a call; beside it what was said, where that is not what the model says in this call."""
    call = str(given.get(TOKEN))
    return call if given == arguments(call) else f"{call} with {json.dumps(given, sort_keys=True)}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was asked and what was answered to it, None where the next message is the user's again.

    `left_open` are the calls before it that the proxy says the client did not answer, `attempts` the numbers of the
    earlier attempts that are told at its head.
    """

    asked: Asking
    answer: Answer | None
    left_open: tuple[str, ...] = ()
    attempts: frozenset[int] = frozenset()

    @property
    def summary(self) -> int | None:
        """The number of the summary that stands here for all before it."""
        if not isinstance(self.asked, str) or not self.asked.startswith((SUMMED_UP, mending.SUMMARY)):
            return None
        found = SUMMARY.search(self.asked)
        return None if found is None else int(found[1])


def in_full(told: Sequence[Exchange], summed: Mapping[int, Sequence[Exchange]]) -> list[Exchange]:
    """The same with what each summary stands for in its place. The CLI repeats the end of that behind a summary.

    An end of `summed` without words are calls that were left open where the CLI asked for the summary: they are those
    of the first words behind it.
    """
    whole: list[Exchange] = []
    for at, one in enumerate(told):
        if one.summary is None or one.summary not in summed:
            whole.append(one)
            continue
        whole = list(summed[one.summary])
        if one.answer is not None and whole and all(one.answer != kept.answer for kept in whole):
            whole[-1] = replace(whole[-1], answer=one.answer)
        rest = told[at + 1 :]
        if whole and not whole[-1].asked and whole[-1].left_open:
            left_open = whole.pop().left_open
            rest = [replace(first, left_open=first.left_open or left_open) for first in rest[:1]] + list(rest[1:])
        again = next((n for n in range(min(len(whole), len(rest)), 0, -1) if _repeats(whole[-n:], rest)), 0)
        return in_full([*whole[: len(whole) - again], *rest], summed)
    return whole


def piece(messages: Sequence[JSON]) -> tuple[str, str] | None:
    """The summary before it and the text that the proxy has the model sum up; None where the CLI asks."""
    users = [message for message in messages if message["role"] == "user"]
    said = "".join(str(block.get("text", "")) for block in parts(users[-1]["content"]))
    _, asks, rest = said.partition(summaries.ASK)
    before, _, text = rest.partition("The conversation:\n\n")
    return (before, text) if asks else None


def is_told(one: Exchange, text: str) -> bool:
    """Whether such a text says all of this exchange. Of a picture it only says that there was one."""
    words = [pictures.bare(one.asked)] if isinstance(one.asked, str) else []
    if not isinstance(one.asked, str):  # up to the turn's number: the rest may be escaped
        words = [result.text.partition("# of")[0] for result in one.asked]
    if one.answer is not None:
        words += [*one.answer.text.split(TEXT_JOIN), *one.answer.calls]
    return all(word in text for word in words)


def without_closing(messages: Sequence[JSON]) -> list[JSON]:
    """Without the answers that the proxy writes behind results for a new process: the CLI leaves them out of each
    request but the one for a summary (2.1.332)."""
    told = []
    for message in messages:
        if message["role"] == "assistant":
            blocks = [block for block in parts(message["content"]) if block.get("text") != CLOSING]
            told += [{**message, "content": blocks}] if blocks else []
        else:
            told.append(message)
    return told


def _repeats(end: Sequence[Exchange], rest: Sequence[Exchange]) -> bool:
    """Whether `rest` begins with this end of a conversation; the last of it may have been answered since."""
    return all(
        (one.asked, one.left_open) == (again.asked, again.left_open) and one.answer in (None, again.answer)
        for one, again in zip(end, rest, strict=False)
    )


def exchanges(messages: Sequence[JSON]) -> list[Exchange]:
    """The conversation without what the CLI adds on its own (`system` messages, reminders, and that the model may go
    on from an answer that was cut or refused)."""
    told: list[Exchange] = []
    calls: dict[str, str] = {}  # the token of each call by its id
    cut: Answer | None = None  # what was said before the CLI asked the model to go on
    spoken_messages = [message for message in messages if message["role"] != "system"]
    for role, run in groupby(spoken_messages, key=lambda message: str(message["role"])):
        blocks = [block for message in run for block in parts(message["content"])]
        if role == "user":
            texts = (str(block.get("text", "")).lstrip().removeprefix(REMINDER) for block in blocks)
            if any(text.lstrip().startswith(GO_ON) for text in texts):
                last = told.pop()
                told.append(replace(last, answer=None))
                cut = last.answer
            else:
                told += _asked(blocks, calls)
            continue
        for block in blocks:
            if block["type"] == "tool_use":
                calls[block["id"]] = token(block["input"])
        if not told or told[-1].answer is not None:
            told.append(Exchange("", None))
        last, answer = told.pop(), _answer(blocks)
        if cut is not None:
            answer, cut = Answer(TEXT_JOIN.join(filter(None, (cut.text, answer.text))), cut.calls + answer.calls), None
        told.append(replace(last, answer=answer))
    return told


def _asked(blocks: Sequence[JSON], calls: dict[str, str]) -> Iterator[Exchange]:
    results = tuple(
        Result(calls.get(block["tool_use_id"], str(block["tool_use_id"])), _text(block.get("content")))
        for block in blocks
        if block["type"] == "tool_result"
    )
    left_open: tuple[str, ...] = ()
    if results and all(result.text in (NOT_ANSWERED, NO_RESULT) for result in results):
        left_open = tuple(result.call for result in results)
    elif results:
        yield Exchange(results, None)
    shown = ""  # the pictures before a text
    attempts: frozenset[int] = frozenset()
    for text in (text for block in blocks if (text := _told(block)) is not None):
        if text.startswith(pictures.SHOWN):
            shown += f"{text} "
            continue
        said = text
        if text.startswith(EARLIER_ATTEMPTS):
            notes, _, said = text.rpartition(END_OF_ATTEMPTS)
            attempts = frozenset(map(int, COMMITTED.findall(notes)))
            if not (said := said.lstrip()):  # another model is given both as one text
                continue
        yield Exchange(shown + said, None, left_open, attempts)
        left_open, shown, attempts = (), "", frozenset()
    if shown:
        yield Exchange(shown, None, left_open)
        left_open = ()
    if left_open:
        yield Exchange("", None, left_open)


def _told(block: JSON) -> str | None:
    """A prompt; None of a result and of the CLI's own reminders."""
    if block["type"] == "tool_result":
        return None
    if block["type"] == "image":
        return pictures.mark(base64.b64decode(block["source"]["data"]))
    if block["type"] != "text":
        return f"[{block['type']}]"
    text = spoken(block["text"])
    return None if text is None or text.startswith(KEPT_PICTURE) else text.strip()


def _answer(blocks: Sequence[JSON]) -> Answer:
    texts = [block["text"].strip() for block in blocks if block["type"] == "text"]
    calls = [token(block["input"]) for block in blocks if block["type"] == "tool_use"]
    return Answer(TEXT_JOIN.join(filter(None, texts)), tuple(calls))


def _text(content: object) -> str:
    text = "".join(part.get("text", "[image]") for part in parts(content))
    if not text.startswith("{"):
        return text
    whole = json.loads(text)
    return str(whole[WRAPPED]) if list(whole) == [WRAPPED] else text
