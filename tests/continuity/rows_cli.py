"""Rows about session ids and the CLI's processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

from turnfault.provider.script import HeldReply, Reply

from ..until import until
from .misbehaving import MisbehavingCli
from .row import NEW, Breaks, Row, Says
from .rows_files import break_a_parent
from .talk import EngineTalk, RequestRefused, Talk, by_hand, run_by_hand


def _order(talk: Talk, word: str) -> MisbehavingCli:
    assert talk.settings.claude_bin is not None
    cli = MisbehavingCli.at(talk.settings.claude_bin.parent)
    cli.next(word)
    return cli


def _at_start(word: str) -> Breaks:
    """The next CLI that starts misbehaves once, while the client says something."""

    async def run(talk: Talk) -> None:
        await talk.down()
        cli = _order(talk, word)
        await talk.up()
        await talk.tell(tries=2)
        assert cli.done

    return run


def _at_the_result(word: str) -> Breaks:
    async def run(talk: Talk) -> None:
        cli = _order(talk, word)
        await talk.tell(tries=2)
        assert cli.done

    return run


async def fork_at_every_resume(talk: Talk) -> None:
    """From now on every resume answers with a new id, as CLI 1.0.x does and others were seen to do."""
    _order(talk, "fork")
    for _ in range(2):
        await talk.restart()
        await talk.tell()


# --- somebody else's hand on the session


async def type_clear(talk: Talk) -> None:
    """An interactive CLI on this session, in which somebody types /clear and goes on talking."""
    async with by_hand(talk) as hand:
        hand.type("/clear")
        hand.type("this is said after the clearing")
        result = await hand.result()
        while "said after" not in str(result.get("result")):
            result = await hand.result()
        assert result["session_id"] != talk.session_id


async def continue_by_hand(talk: Talk) -> None:
    for _ in range(2):
        fact = talk.new_fact()
        result = await run_by_hand(talk, fact.text, talk.session_id)
        talk.session_id = result["session_id"]
        talk.remember(fact, str(result["result"]))


async def continue_by_hand_behind_a_broken_parent(talk: Talk) -> None:
    """Nobody looks at the file while the warm process goes on; the person's CLI loads what stands behind the break."""
    break_a_parent(talk)
    await talk.tell()
    await continue_by_hand(talk)


async def continue_by_hand_while_stopped(talk: Talk) -> None:
    await talk.down()
    await continue_by_hand(talk)
    await talk.up()


def _lines_of(talk: Talk) -> list[str]:
    return talk.transcript.read_text(encoding="utf-8").splitlines()


async def a_hand_that_finishes(talk: Talk) -> None:
    """Somebody is in the middle of a turn when the client asks; it is waited for, and both are remembered."""
    gate = HeldReply()
    fact = talk.new_fact()
    talk.upstream.when(fact.key, gate)
    async with by_hand(talk) as hand:
        hand.type(fact.text)
        await gate.reached.wait()
        # The CLI notes it as queued before, and asks the model before it writes the prompt itself.
        await until(lambda: any(fact.key in line and '"type":"user"' in line for line in _lines_of(talk)))
        asking = asyncio.create_task(talk.tell())
        await asyncio.wait([asking], timeout=0.5)
        assert not asking.done()
        gate.open()
        result = await hand.result()
        talk.remember(fact, str(result["result"]))
        await asking
    talk.facts.sort(key=lambda one: one.number)


# --- kill -9


async def kill_before_the_prompt_is_on_disk(talk: Talk) -> None:
    """A warm process is stopped in its tracks, given the prompt, and killed; one that starts is killed at once."""
    warm = talk.pids()
    for pid in warm:
        os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(talk.tell(tries=2))
    if isinstance(talk, EngineTalk) and warm:
        await until(talk.busy)
    else:
        await until(talk.pids)
    talk.kill()
    await asking


async def kill_after_the_prompt_is_on_disk(talk: Talk) -> None:
    gate, fact = HeldReply(), talk.new_fact()
    talk.upstream.when(fact.key, gate)
    asking = asyncio.create_task(talk.tell(fact, tries=2))
    await gate.reached.wait()
    with suppress(TimeoutError):  # CLI 1.0.x writes it later
        await until(lambda: _on_disk(talk, fact.key), timeout=2.0)
    talk.kill()
    await asking


async def kill_in_mid_answer(talk: Talk) -> None:
    """The first block of the answer is said, the second is under way. A client of ours has a part of it: that turn
    fails, and the client asks again."""
    fact = talk.new_fact()
    blocks = [{"type": "text", "text": f"one {fact.key}"}, {"type": "text", "text": "two two two two two two"}]
    gate = HeldReply(after=len(blocks[0]["text"]) // 8 + 2, reply=Reply(blocks))
    talk.upstream.when(fact.key, gate)
    asking = asyncio.create_task(talk.tell(fact, tries=2))
    await gate.reached.wait()
    if isinstance(talk, EngineTalk):
        await until(lambda: any(turn.text for turn in talk.engine.progress()))
    talk.kill()
    await asking


async def kill_while_idle(talk: Talk) -> None:
    talk.kill()
    await talk.all_dead()


def _on_disk(talk: Talk, what: str) -> bool:
    # A breakage before this one may have put a folder in a transcript's place, or bytes that are no text into it.
    files = (path for path in talk.projects.glob("*/*.jsonl") if path.is_file())
    return any(what.encode() in path.read_bytes() for path in files)


# --- another binary


def _point_at(talk: Talk, version: str) -> None:
    assert talk.settings.claude_bin is not None
    lab = talk.settings.claude_bin.parent
    talk.settings.claude_bin.unlink()
    talk.settings.claude_bin.symlink_to(lab / version)


def _versions(*versions: str, restarting: bool) -> Callable[[Talk], Awaitable[None]]:
    async def run(talk: Talk) -> None:
        for version in versions:
            if restarting:
                await talk.down()
            _point_at(talk, version)
            if restarting:
                await talk.up()
            await talk.tell()

    return run


async def remove_and_put_back(talk: Talk) -> None:
    binary = talk.settings.claude_bin
    assert binary is not None
    target = os.readlink(binary)
    binary.unlink()
    with suppress(RequestRefused):
        await talk.tell()
    assert talk.refusals
    binary.symlink_to(target)


def _again(why: str) -> Says:
    sent = "(; attempt 2 sent the prompt again| before the prompt was sent; attempt 2 sent it)"
    return {4: rf"\*\*retried\*\*: Attempt 1 failed \({why}\){sent}"}


def _without_result(code: int) -> tuple[Says, Says]:
    """CLI 1.0.x wrote into a copy of the session, which is taken away: nothing has to be mended."""
    failed = rf"\*\*failed\*\* .*it ended with exit code {code} before the result"
    return {4: failed, 5: LEFT}, {4: failed}


LEFT = (
    r"\*\*repaired\*\*.*The session's transcript still held records of an attempt that was not kept: it "
    r"was written again from the chain \(\d+ lines\)\."
)
_KILLED = _again("it ended with exit code -9 before the result")
_THEIRS = r"adopted(.|\n)*A person continued this session outside the proxy: \d turns? became part of"
_FORKED = r"link \(`forked_by_cli`, .*CLI {} was asked to resume session \w{{8}} and answered as a new one, \w{{8}}:"
# CLI 1.0.x opens its requests otherwise: thoughts that were sealed over the other head are void.
_FORKED_AND_VOID = _FORKED.format(r"1\.0\.120") + r"(.|\n)*would have refused \d+ thoughts? of earlier answers"
_FORKED_2 = _FORKED.format(r"2\.1\.\d+")
IDS = "ids"
CLI = "CLI process"
ROWS = (
    Row(IDS, "new id at every resume", fork_at_every_resume, clis=NEW, quick=NEW, continuity="resumed", wrapped=True,
        says={4: _FORKED_2, 5: _FORKED_2, 6: _FORKED_2}),
    Row(IDS, "`/clear` typed into an interactive CLI", type_clear, clis=NEW, quick=NEW),
    Row(IDS, "continued by hand under a warm process", continue_by_hand, clis=NEW, quick=NEW, link="adopted",
        thinks=False, says={0: _THEIRS}),
    Row(IDS, "the same behind a parent that was broken", continue_by_hand_behind_a_broken_parent, clis=NEW,
        bare=False, link="adopted", thinks=False, says={0: _THEIRS}),
    # What a person says on one host is known elsewhere when that host's proxy has seen it whole.
    Row(IDS, "continued by hand while stopped", continue_by_hand_while_stopped, clis=NEW, link="adopted",
        thinks=False, says={5: _THEIRS}, on_hosts=False),
    Row(IDS, "somebody is in the middle of a turn", a_hand_that_finishes, clis=NEW, quick=NEW, bare=False,
        thinks=False, says={4: _THEIRS}, on_hosts=False),
    Row(IDS, '"No conversation found" with a fresh id', _at_start("no_conversation"), quick=NEW, wrapped=True,
        says=_again('it said "No conversation found", and it ended with exit code 1 before the result')),
    Row(CLI, "kill -9 before the prompt is on disk", kill_before_the_prompt_is_on_disk, quick=NEW, says=_KILLED),
    Row(CLI, "kill -9 after it", kill_after_the_prompt_is_on_disk, says=_KILLED),  # each time: test_hosts.py
    Row(CLI, "kill -9 in mid-answer", kill_in_mid_answer, says=_without_result(-9)[1]),
    Row(CLI, "kill -9 between the answer and the result", _at_the_result("kill_before_result"), quick=NEW,
        wrapped=True, says=_without_result(137)),
    Row(CLI, "kill -9 while idle", kill_while_idle, clis=NEW, quick=NEW, bare=False, continuity="resumed",
        says={4: r"warm CLI process of this session had ended with exit code -9"}),
    Row(CLI, "exit 0 before it answers", _at_start("exit_0"), wrapped=True,
        says=_again("it ended with exit code 0 before the result")),
    Row(CLI, "exit 0 with no result", _at_the_result("exit_0_before_result"), quick=NEW, wrapped=True,
        says=_without_result(0)),
    Row(CLI, "garbage on stdout", _at_start("garbage"), quick=NEW, wrapped=True),
    Row(CLI, "upgraded", _versions("2.1", restarting=True), clis=("1.0",), quick=("1.0",), prefix=False,
        replaced=True,
        says={4: r"The model had changed: the request was sent without 3 thoughts of the other model"}),
    Row(CLI, "downgraded", _versions("1.0", restarting=True), clis=NEW, prefix=False, replaced=True,
        says={0: _FORKED_AND_VOID}),
    Row(CLI, "downgraded and upgraded under a running proxy", _versions("1.0", "2.1", restarting=False), clis=NEW,
        quick=NEW, prefix=False, replaced=True, says={0: _FORKED_AND_VOID}),
    Row(CLI, "removed and put back", remove_and_put_back, quick=NEW, replaced=True,
        says={4: r"\*\*failed\*\* \(`claude_unavailable`\): no Claude CLI at \S+"}),
)  # fmt: skip
