"""An interrupted result is no result: what a CLI makes up when its proxy is gone becomes part of nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.process.guardian import start_time
from cli_session_proxy.backends.claude.sessions.exchanges import TranscriptExchange, exchanges, has_invented_result
from cli_session_proxy.backends.claude.sessions.tails import adoptable
from cli_session_proxy.commands import verifying
from cli_session_proxy.domain.models import Agent, Message, Record, Turn
from cli_session_proxy.settings import Settings
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..fakes import turn as a_turn
from ..talking import ask, by_hand, heard, running, text
from ..tools.test_loops import TOOLS, called, calls, result, results, tool_blocks
from ..until import until
from .leftovers import MADE_UP, RECORDED, calls_in, leave
from .others import Other, other_proxy
from .test_kill import turns_of

TOLD = [tool.as_json() for tool in TOOLS]
BOTH = ToolUse([called("get_weather"), called("get_time")])


def transcript_of(settings: Settings) -> Path:
    assert settings.claude_config_dir is not None
    [path] = settings.claude_config_dir.glob("projects/*/*.jsonl")
    return path


async def killed(other: Other, settings: Settings) -> None:
    """The proxy is killed, and its CLIs have written what they write then."""
    notes = list((settings.var / "run").glob("*/[0-9]*"))
    await other.end(signal.SIGKILL)
    for note in notes:

        async def gone(pid: int = int(note.name)) -> bool:
            return start_time(pid) is None

        await until(gone)


def only_up_to_the_calls(path: Path, made: int) -> list[tuple[str, str]]:
    """Cut the transcript behind the last of so many calls, whatever its CLI wrote there; the calls."""
    found = calls_in(path)[-made:]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    last = next(at for at, line in enumerate(lines) if json.loads(line).get("uuid") == found[-1][1])
    path.write_text("".join(lines[: last + 1]), encoding="utf-8")
    return found


def asked_of_the_chain(upstream: Upstream) -> list[str]:
    """All that reached the model with the last request, made-up results included."""
    return [said for _, said in upstream.requests[-1].texts()]


async def test_a_proxy_killed_just_as_calls_are_made_gives_them_to_who_asks_again(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    upstream.when("where", BOTH, times=2)
    async with other_proxy(settings, die_at="before commit") as other:
        assert await other.ask("hello", tools=TOLD) is not None
        assert await other.ask("where", tools=TOLD, die=True) is None
        await killed(other, settings)
    path = transcript_of(settings)
    leave(path, only_up_to_the_calls(path, 2))
    async with running(settings) as engine:
        _, left = await turns_of(engine)
        assert (left.status, left.output) == ("cancelled", ())
        again = await ask(engine, "where", tools=TOOLS)
        weather, noon = calls(again)
        answered = await ask(engine, results(result(weather, "sunny"), result(noon, "noon")), tools=TOOLS)
        await ask(engine, "list", tools=TOOLS)
        turns = await turns_of(engine)
    assert text(answered) == "The tool said: noon"
    assert [turn.origin for turn in turns] == ["chat"] * 4
    ids = [weather["id"], noon["id"]]
    assert tool_blocks(upstream) == [(kind, one) for kind in ("call", "result") for one in ids]
    assert heard(upstream) == ["hello", "where", "tool_result: sunny", "tool_result: noon", "list"]
    assert not any(MADE_UP in said for said in asked_of_the_chain(upstream))


async def test_what_a_person_says_behind_a_turn_that_a_crash_left_open_is_a_turn_of_its_own(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with other_proxy(settings, die_at="after result") as other:
        assert await other.ask("one") is not None
        assert await other.ask("two", die=True) is None
        await killed(other, settings)
    await by_hand(settings, transcript_of(settings).stem, "by hand")
    async with running(settings) as engine:
        assert text(await ask(engine, "two")) == "You said: two (2)"
        path = await engine.store.path((await ask(engine, "three")).id)
        assert [[block["text"] for block in turn.input[0].content] for turn in path] == [
            ["one"], ["two"], ["by hand"], ["three"],
        ]  # fmt: skip
    assert heard(upstream) == ["one", "two", "by hand", "three"]


@pytest.mark.parametrize("when", ["while it is warm", "after a restart"])
@pytest.mark.sample(1)
async def test_what_an_orphan_writes_behind_results_that_went_elsewhere_is_adopted_by_nobody(
    when: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """Calls out of one proxy, their results to another; then the first dies, and its CLI goes on by itself."""
    settings = make_settings(claude_bin=claude_2)
    upstream.when("where", BOTH)
    async with running(settings) as engine:
        async with other_proxy(settings) as other:
            said = await other.ask("where", tools=TOLD)
            assert said is not None
            weather, noon = said["output"]
            found = calls_in(transcript_of(settings))
            await ask(engine, results(result(weather, "sunny"), result(noon, "noon")), tools=TOOLS)
            await other.end(signal.SIGKILL)
        if when == "while it is warm":
            leave(transcript_of(settings), found)
            last = await ask(engine, "list", tools=TOOLS)
            turns = await turns_of(engine)
    if when == "after a restart":
        leave(transcript_of(settings), found)
        async with running(settings) as engine:
            last = await ask(engine, "list", tools=TOOLS)
            turns = await turns_of(engine)
    assert [turn.origin for turn in turns] == ["chat"] * 3
    assert last.parent_id == turns[1].id
    assert heard(upstream) == ["where", "tool_result: sunny", "tool_result: noon", "list"]
    assert not any(MADE_UP in said for said in asked_of_the_chain(upstream))


async def test_what_stands_behind_open_calls_is_left_for_their_results(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """Its CLI goes on by itself, and a person behind that: the results are taken, and the person's words are kept."""
    settings = make_settings(claude_bin=claude_2)
    upstream.when("where", BOTH)
    async with running(settings) as engine:
        waits = await ask(engine, "where", tools=TOOLS)
        weather, noon = calls(waits)
    path = transcript_of(settings)
    leave(path, only_up_to_the_calls(path, 2))
    await by_hand(settings, path.stem, "by hand")
    [found] = await verifying.verify(settings, None, None)
    assert "unknown" in [one.kind for one in found.differences]
    async with running(settings) as engine:
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        assert agent.head == waits.id
        answered = await ask(engine, results(result(weather, "sunny"), result(noon, "noon")), tools=TOOLS)
        await ask(engine, "list", tools=TOOLS)
    assert answered.parent_id == waits.id
    assert heard(upstream) == ["where", "tool_result: sunny", "tool_result: noon", "list"]
    [kept] = (settings.var / "salvage").iterdir()
    assert "by hand" in kept.read_text(encoding="utf-8")


async def test_leftovers_of_killed_turns_are_notes_of_verify(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    upstream.when("where", BOTH)
    async with other_proxy(settings) as other:
        assert await other.ask("where", tools=TOLD) is not None
        await killed(other, settings)
    path = transcript_of(settings)
    found = only_up_to_the_calls(path, 2)
    [before] = await verifying.verify(settings, None, None)
    assert (before.differences, before.notes) == ((), ())
    leave(path, found)
    [after] = await verifying.verify(settings, None, None)
    assert (after.differences, [note.kind for note in after.notes]) == ((), ["leftover"])
    assert "3 records that a CLI made up when its proxy was gone" in after.notes[0].text
    assert after.as_json()["equal"] is True
    printed = list(verifying.report_lines([after]))
    assert printed[0].startswith("a: equal (1 session, ")
    assert printed[1].startswith("  leftover   session ")


# --- the rule


class NoFrames:
    """A store in which nothing was sent by us."""

    async def records(self, turn_id: str) -> list[Record]:
        return []

    async def own_frames(self, agent_key: int, uuids: list[str]) -> set[str]:
        return set()


def cut(*lines: dict[str, Any]) -> list[TranscriptExchange]:
    return list(exchanges(transcript.parse("\n".join(map(json.dumps, lines)).encode()).entries))


def record(kind: str, uuid: str, parent: str | None, *content: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "message": {"role": kind, "content": list(content)}}


def said(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def call(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": name, "input": {}}


GIVEN = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}


def test_only_results_that_we_brought_answer_a_clients_tool() -> None:
    def talk(name: str) -> TranscriptExchange:
        [one] = cut(
            record("user", "u", None, said("where")), record("assistant", "c", "u", call(name)),
            record("user", "r", "c", GIVEN), record("assistant", "a", "r", said("It is sunny.")),
        )  # fmt: skip
        return one

    assert has_invented_result(talk("mcp__client__get_weather").entries)
    assert not has_invented_result(talk("mcp__client__get_weather").entries, [GIVEN])
    assert has_invented_result(talk("mcp__client__get_weather").entries, [{**GIVEN, "content": "rainy"}])
    assert not has_invented_result(talk("Read").entries)
    assert not has_invented_result(talk("mcp__other__get_weather").entries)


def test_a_result_to_a_call_from_before_is_none_of_somebody_elses() -> None:
    [one] = cut(record("user", "r", "c", GIVEN), record("assistant", "a", "r", said("It is sunny.")))
    assert has_invented_result(one.entries)
    assert not has_invented_result(one.entries, [GIVEN])


def test_an_exchange_with_results_that_the_cli_made_up_is_not_complete() -> None:
    recorded = RECORDED.read_text(encoding="utf-8")
    made_up = [json.loads(line) for line in recorded.splitlines() if '"type":"user"' in line]
    made = [{**call("mcp__client__get_weather"), "id": one["message"]["content"][0]["tool_use_id"]} for one in made_up]
    asked = [record("user", "u", None, said("where")), record("assistant", made_up[0]["parentUuid"], "u", *made)]
    [one] = exchanges(transcript.parse("\n".join([*map(json.dumps, asked), recorded]).encode()).entries)
    assert transcript.is_complete(one.path)
    assert not one.complete


def test_the_clis_word_for_an_interruption_is_nobodys_prompt() -> None:
    marker = said("[Request interrupted by user for tool use]")
    first, second = cut(
        record("user", "u", None, said("where")), record("assistant", "a", "u", said("Let me")),
        record("user", "m", "a", marker), record("user", "v", "m", said("never mind")),
        record("assistant", "b", "v", said("Well then.")),
    )  # fmt: skip
    assert [entry.uuid for entry in first.path] == ["u", "a"]
    assert second.input == (Message("user", (said("never mind"),)),)


@pytest.mark.parametrize(("parent", "adopted"), [("p", True), ("elsewhere", False)])
async def test_only_what_hangs_on_the_path_is_adopted(parent: str, adopted: bool) -> None:
    [one] = cut(record("user", "u", parent, said("by hand")), record("assistant", "a", "u", said("Yes.")))
    verdict = transcript.FileVerdict("tail", "", tail=tuple(one.path), leaf="p")
    found = await adoptable(NoFrames(), AGENT, a_turn(1), verdict)  # type: ignore[arg-type]
    assert bool(found) is adopted


async def test_nothing_behind_open_calls_is_adopted() -> None:
    [one] = cut(record("user", "u", "p", said("by hand")), record("assistant", "a", "u", said("Yes.")))
    verdict = transcript.FileVerdict("tail", "", tail=tuple(one.path), leaf="p")
    waits: Turn = a_turn(1, output=(call("get_weather"),), status="requires_action")
    assert await adoptable(NoFrames(), AGENT, waits, verdict) == ()  # type: ignore[arg-type]


AGENT = Agent(1, "local", "a", "a", True, None, 1.0)
