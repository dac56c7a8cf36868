"""What a turn added to a transcript, where the CLI makes it hard to see."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.sessions.capture import (
    SMALL,
    LiveSession,
    TurnOutcome,
    continues,
    is_copied,
    up_to_end_of_turn,
)
from cli_session_proxy.backends.claude.sessions.manager import Sessions
from cli_session_proxy.backends.claude.transcript import Entry, Parsed, Reader, Scribe
from cli_session_proxy.backends.claude.transcript.entries import MAX_BYTES
from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import Block, Message, Role, Turn
from cli_session_proxy.stores.base import KeptTurn
from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....talking import ask, by_hand, heard, running, text
from ....tools.test_loops import TOOLS, both, calls, result, results


@pytest.mark.full
async def test_a_turn_cut_at_a_stop_sequence_behind_a_prompt_that_the_old_cli_cuts_is_remembered(
    claude_1: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_1)
    upstream.when("two", Reply("one two three four five six seven eight nine ten"))
    async with running(settings) as engine:
        await ask(engine, "/one is a path")
        turn = await ask(engine, "two", stop=["five"])
        own = [record for record in await engine.store.own_records(turn.id) if record.uuid]
        await ask(engine, "three")
    assert text(turn) == "one two three four "
    assert len(own) == 2
    assert heard(upstream) == ["/one is a pat", "h", "two", "three"]


@pytest.mark.parametrize("clocks", [["monotonic"], ["monotonic", "process_time"]], ids=["paused", "busy"])
@pytest.mark.sample(1)
async def test_a_proxy_that_was_paused_or_is_busy_still_waits_for_what_its_cli_writes(
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    clocks: list[str],
) -> None:
    hidden = 20
    appended = Reader.appended

    def late(reader: Reader, most: int = MAX_BYTES, without: Collection[str] = ()) -> tuple[Parsed, Reader] | None:
        """Each look is a second after the one before it, and the first ones come too early. A busy proxy has used
        that second for other agents."""
        nonlocal hidden
        if not hidden:
            return appended(reader, most, without)
        hidden -= 1
        return transcript.parse(b""), reader

    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "one")
        for name in clocks:
            clock = getattr(time, name)
            monkeypatch.setattr(time, name, lambda clock=clock: clock() + 20 - hidden)
        monkeypatch.setattr(Reader, "appended", late)
        turn = await ask(engine, "two")
        assert (hidden, turn.evidence.records) == (0, "transcript")
        assert (await ask(engine, "three")).continuity == "warm"


@pytest.mark.full
async def test_what_a_person_says_before_an_answer_is_taken_over_is_a_turn_of_its_own(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, capture = make_settings(claude_bin=claude_2), Sessions.capture

    async def later(self: Sessions, ready: LiveSession, turn: Turn, said: TurnOutcome) -> tuple[KeptTurn, Evidence]:
        monkeypatch.setattr(Sessions, "capture", capture)
        await by_hand(settings, ready.session.id, "by hand")
        return await capture(self, ready, turn, said)

    async with running(settings) as engine:
        await ask(engine, "one")
        monkeypatch.setattr(Sessions, "capture", later)
        two = await ask(engine, "two")
        assert (text(two), two.evidence.records) == ("You said: two (2)", "transcript")
        for word in ("three", "four"):
            await ask(engine, word)
        path = await engine.store.path((await ask(engine, "five")).id)
        assert [turn.continuity for turn in path[-2:]] == ["warm", "warm"]
    said = ["one", "two", "by hand", "three", "four", "five"]
    assert [[block["text"] for block in turn.input[0].content] for turn in path] == [[word] for word in said]
    assert heard(upstream) == said
    assert all(after.prefix_kept(before) == 1.0 for before, after in pairwise(upstream.requests[-3:]))


@pytest.mark.parametrize("found", [["nothing", "a line"] * 3, ["nothing"]], ids=["in parts", "at once"])
@pytest.mark.sample(1)
async def test_a_transcript_that_comes_to_be_between_two_looks_is_waited_for(
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    found: list[str],
) -> None:
    looks = iter(found)
    appended = Reader.appended

    def late(reader: Reader, most: int = MAX_BYTES, without: Collection[str] = ()) -> tuple[Parsed, Reader] | None:
        """What is found at each look; then what there is."""
        got = appended(reader, most, without)
        look = None if got is None else next(looks, None)
        if look == "a line":
            return transcript.parse(Path(reader.path).read_bytes().split(b"\n")[0]), reader
        return None if look == "nothing" else got

    async with running(make_settings(claude_bin=claude_2)) as engine:
        monkeypatch.setattr(Reader, "appended", late)
        turn = await both(engine, upstream)
        assert (next(looks, None), turn.evidence.records) == (None, "transcript")
        weather, noon = calls(turn)
        answered = await ask(engine, results(result(weather, "sunny"), result(noon, "noon")), tools=TOOLS)
        assert answered.continuity == "warm"
    before, after = upstream.requests
    assert after.prefix_kept(before) == 1.0


@pytest.mark.parametrize(("size", "beside"), [(100, [False]), (2 * SMALL, [False, True])])
@pytest.mark.sample(1)
async def test_a_large_addition_is_read_beside_the_event_loop(
    claude_2: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, size: int, beside: list[bool]
) -> None:
    looks: list[bool] = []
    appended = Reader.appended

    def seen(reader: Reader, most: int = MAX_BYTES, without: Collection[str] = ()) -> tuple[Parsed, Reader] | None:
        looks.append(threading.current_thread() is not threading.main_thread())
        return appended(reader, most, without)

    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "one")
        monkeypatch.setattr(Reader, "appended", seen)
        turn = await ask(engine, "x" * size)
        assert (looks, turn.evidence.records) == (beside, "transcript")
        assert (await ask(engine, "three")).continuity == "warm"


# --- what the records show of what a process had loaded


def talk(*said: str, at: float = 1_700_000_000.0, parent: str | None = None) -> list[Entry]:
    """Records of these words, in turn the user's and the assistant's."""
    scribe = Scribe("11111111-1111-4111-8111-111111111111", Path("/somewhere"), "", at, parent)
    messages = [(Message.assistant if n % 2 else Message.user)(words) for n, words in enumerate(said)]
    return transcript.parse_records([scribe.record(message, "sonnet") for message in messages]).path


OURS = talk("one", "first", "two", "second")


def test_a_frame_that_hangs_on_the_path_is_behind_it_wherever_it_hangs() -> None:
    for on in (OURS[-1], OURS[1]):
        mine = talk("three", "third", parent=on.uuid)
        assert continues(OURS, [*OURS, *mine], str(mine[0].uuid))
        assert continues(OURS, mine, str(mine[0].uuid))
    assert continues(OURS, OURS, "a frame that was not written down")


def test_a_frame_that_hangs_on_another_conversation_is_not() -> None:
    others = talk("one", "first")
    mine = talk("three", "third", parent=others[-1].uuid)
    for file in ([*others, *mine], [*OURS, *mine], talk("three", "third", parent="x")):
        assert not continues(OURS, file, str(file[-2].uuid))


def test_a_compaction_leaves_a_frame_where_it_is() -> None:
    boundary = {"type": "system", "uuid": "b", "parentUuid": None, "subtype": "compact_boundary"}
    entry = Entry("", boundary | {"logicalParentUuid": OURS[-1].uuid})
    mine = talk("three", "third", parent="b")
    assert continues(OURS, [*OURS, entry, *mine], str(mine[0].uuid))


@pytest.mark.parametrize(
    ("copy", "wholly", "partly"),
    [
        (("one", "first", "two", "second", "three", "third"), True, True),
        (("two", "second", "three", "third"), True, True),  # the CLI left something out
        (("one", "first", "TWO", "second", "three", "third"), False, True),  # damaged
        (("six", "sixth", "three", "third"), False, False),
        (("three", "third"), False, False),
    ],
)
def test_a_copy_of_another_conversation_is_told_from_a_poor_one(
    copy: tuple[str, ...], wholly: bool, partly: bool
) -> None:
    assert is_copied(OURS, talk(*copy), wholly=True) is wholly
    assert is_copied(OURS, talk(*copy), wholly=False) is partly


def test_an_empty_copy_and_a_summary_show_nothing() -> None:
    summary = Entry("", {**talk("All about one.")[0].data, "isCompactSummary": True})
    for copy in ([], [summary, *talk("three", "third")]):
        assert is_copied(OURS, copy, wholly=True)


def test_a_result_that_an_ending_cli_made_up_for_a_call_is_not_the_turns_own() -> None:
    scribe = Scribe("s", Path("/"), "2.1.330", 1_700_000_000.0)

    def said(role: Role, block: Block) -> Entry:
        return transcript.parse_records([scribe.record(Message(role, (block,)), "sonnet")]).entries[0]

    call: Block = {"type": "tool_use", "id": "call_1", "name": "mcp__client__f", "input": {}}
    asked, called = said("user", {"type": "text", "text": "ours"}), said("assistant", call)
    made_up = said("user", {"type": "tool_result", "tool_use_id": "call_1", "content": "interrupted", "is_error": True})
    after = said("assistant", {"type": "text", "text": "it was interrupted"})
    file = [asked, called, made_up, after]
    assert up_to_end_of_turn(file, str(asked.uuid), {"call_1"}) == [asked, called]
    assert up_to_end_of_turn(file, str(asked.uuid), {"call_2"}) == file


def test_what_somebody_else_wrote_among_the_lines_of_a_turn_is_not_the_turns_own() -> None:
    scribe = Scribe("s", Path("/"), "2.1.330", 1_700_000_000.0)

    def said(role: Role, words: str, behind: str | None, model: str = "sonnet") -> Entry:
        scribe.parent = behind
        record = scribe.record(Message(role, ({"type": "text", "text": words},)), model)
        return transcript.parse_records([record]).entries[0]

    asked = said("user", "ours", "leaf")
    answer = said("assistant", "our answer", asked.uuid)
    made_up = said("assistant", "No response requested.", asked.uuid, "<synthetic>")
    on_ours = [made_up, prompt := said("user", "theirs", made_up.uuid), said("assistant", "to them", prompt.uuid)]
    on_leaf = [prompt := said("user", "theirs", "leaf"), said("assistant", "to them", prompt.uuid)]
    after = [prompt := said("user", "theirs", answer.uuid), said("assistant", "to them", prompt.uuid)]
    for theirs in (on_ours, on_leaf):
        for file in ([asked, *theirs, answer], [asked, theirs[0], answer, *theirs[1:]], [asked, answer, *theirs]):
            assert up_to_end_of_turn(file, str(asked.uuid)) == [asked, answer]
    assert up_to_end_of_turn([*on_leaf, asked, answer], str(asked.uuid)) == [asked, answer]
    assert up_to_end_of_turn([asked, answer, *after], str(asked.uuid)) == [asked, answer]
    # its proxy was killed before the answer: nothing in the file is one
    assert up_to_end_of_turn([asked, *on_ours], str(asked.uuid)) == [asked]
