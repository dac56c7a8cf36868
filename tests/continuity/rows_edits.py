"""Rows about turns that are taken back: what was edited away never reaches the model again, and the rest does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cli_session_proxy.errors import ProxyError
from turnfault.provider.script import HeldReply, Reply

from ..talking import ask, request
from .row import BOTH, NEW, Breaks, Row
from .rows_files import cut_the_last_line, delete
from .talk import EngineTalk, Talk

EDITS = "edits"


async def edit(talk: Talk, turns: int = 1) -> None:
    """The last turns are told anew."""
    assert isinstance(talk, EngineTalk)
    await talk.engine.rewind("local", talk.agent, f"-{turns}")
    del talk.facts[-turns:]
    await talk.tell()


async def edited(talk: Talk) -> None:
    await edit(talk)
    await edit(talk, 2)


async def edited_while_it_dies(talk: Talk) -> None:
    assert isinstance(talk, EngineTalk)
    await talk.engine.rewind("local", talk.agent, "-1")
    talk.facts.pop()
    fact, gate = talk.new_fact(), HeldReply()  # before a word of the answer: with one, the turn is not run again
    talk.upstream.when(fact.key, gate)
    asked = asyncio.create_task(talk.tell(fact))
    await gate.reached.wait()
    talk.kill()
    await asked


def edited_and_then(breaks: Callable[[Talk], None], *, killed: bool = False) -> Breaks:
    async def run(talk: Talk) -> None:
        await edit(talk)
        if killed:
            talk.kill()
            await talk.all_dead()
        await talk.down()
        breaks(talk)
        await talk.up()

    return run


async def cancelled(talk: Talk) -> None:
    """In the middle of its answer."""
    assert isinstance(talk, EngineTalk)
    gate = HeldReply(after=2, reply=Reply("Nobody hears this to its end, and the model never sees it."))
    talk.upstream.when("cancelled words", gate)
    answer = await talk.engine.submit(request("cancelled words", agent=talk.agent))
    await gate.reached.wait()
    await talk.engine.cancel("local", talk.agent, None)
    with pytest.raises(ProxyError):
        await answer.turn()
    answer.leave()
    gate.open()
    talk.before = talk.sound


async def of_a_stranger(talk: Talk) -> None:
    """The conversation is a stranger's from here on. Others ask at the same time, their CLIs die, and others ask."""
    assert isinstance(talk, EngineTalk)
    talk.unnamed = True
    talk.facts.clear()
    await talk.tell()
    others = [talk.new_fact() for _ in range(8)]
    await asyncio.gather(*(ask(talk.engine, other.text, agent=None) for other in others[:4]))
    talk.kill()
    await talk.all_dead()
    await asyncio.gather(*(ask(talk.engine, other.text, agent=None) for other in others[4:]))


def _row(
    name: str,
    breaks: Breaks,
    *,
    quick: tuple[str, ...] = NEW,
    says: dict[int, str] | None = None,
    settings: dict[str, str] | None = None,
) -> Row:
    return Row(
        EDITS, name, breaks, BOTH, quick, bare=False, prefix=False, calls=2, says=says or {0: ""},
        settings=settings or {},
    )  # fmt: skip


ROWS = (
    _row("edited, and edited again", edited),
    _row("edited, and the CLI dies in it", edited_while_it_dies),
    _row("edited, and the transcript is deleted", edited_and_then(delete), quick=()),
    _row("edited, killed, and the last line is cut", edited_and_then(cut_the_last_line, killed=True)),
    _row("edited, and everything starts anew", edited_and_then(lambda _: None), quick=()),
    _row("cancelled in the middle of its answer", cancelled, says={4: "cancelled", 5: ""}),
    _row("asked in a process that strangers share", of_a_stranger, settings={"share_processes": "always"}),
)
