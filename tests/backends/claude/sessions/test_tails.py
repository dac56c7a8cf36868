"""Whose the records behind the path are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from uuid import UUID

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.sessions import paths
from cli_session_proxy.backends.claude.sessions.tails import Origin, origin
from cli_session_proxy.backends.claude.transcript import Scribe
from cli_session_proxy.domain.models import Agent, Block, Message, Record
from cli_session_proxy.errors import DamagedRow
from cli_session_proxy.stores.base import Store
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....talking import ask, heard, running

IMAGE: Block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
WORDS: Block = {"type": "text", "text": "What is this?"}
AGENT = Agent(1, "local", "ada", "ada", named=True, head=None, created_at=0.0)
SESSION, FRAME, ANOTHER = (str(UUID(int=number)) for number in (1, 2, 3))


class Frames:
    """A store that knows one frame of ours."""

    asked = 0

    async def own_frames(self, agent_key: int, uuids: Sequence[str]) -> set[str]:
        self.asked += 1
        return {FRAME} & set(uuids)


@pytest.mark.parametrize(("frame", "expected"), [(FRAME, "ours"), (ANOTHER, "theirs")], ids=["ours", "theirs"])
async def test_a_prompt_with_a_picture_is_known_by_its_record(tmp_path: Path, frame: str, expected: Origin) -> None:
    """It is compared block by block: each piece but the last has a name of its own."""
    scribe = Scribe(SESSION, tmp_path, "2.1.332", 1_790_000_000.0)
    known = [
        scribe.record(Message("user", (WORDS,)), "sonnet"),
        scribe.record(Message("assistant", (WORDS,)), "sonnet"),
    ]
    cut = scribe.record(Message("user", (IMAGE, WORDS)), "sonnet", record_uuid=frame)
    file = tmp_path / f"{SESSION}.jsonl"
    transcript.write(file, [*known, cut], SESSION)
    verdict = transcript.check(file, None, known)
    assert verdict is not None
    assert len(verdict.tail) == 2
    assert await origin(cast(Store, Frames()), AGENT, verdict) == expected


async def test_of_many_prompts_behind_the_path_the_store_is_asked_once(tmp_path: Path) -> None:
    """A shell may have written any number of them."""
    scribe, store = Scribe(SESSION, tmp_path, "2.1.332", 1_790_000_000.0), Frames()
    file = tmp_path / f"{SESSION}.jsonl"
    known = [scribe.record(Message("user", (WORDS,)), "sonnet")]
    transcript.write(file, [*known, *(scribe.record(Message("user", (WORDS,)), "sonnet") for _ in range(500))], SESSION)
    verdict = transcript.check(file, None, known)
    assert verdict is not None
    assert len(verdict.tail) == 500
    assert await origin(cast(Store, store), AGENT, verdict) == "theirs"
    assert store.asked == 1


@pytest.mark.parametrize("which", [-1, 1])
@pytest.mark.sample(1)
async def test_a_record_that_is_there_again_is_not_taken_for_an_exchange_of_a_person(
    make_settings: MakeSettings, claude: Path, upstream: Upstream, which: int
) -> None:
    """The chain took it in, as the record after itself. The CLI 1.0.120 then followed its parents without end, each
    time it was started for this agent."""
    settings = make_settings(claude_bin=claude)
    async with running(settings) as engine:
        for said in ("one", "two"):
            turn = await ask(engine, said)
    assert settings.claude_config_dir is not None
    [path] = settings.claude_config_dir.glob(f"projects/*/{turn.session_id}.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    messages = [record for record in records if record["type"] in ("user", "assistant")]
    again = messages[which] | {"parentUuid": messages[-1]["uuid"]}
    with path.open("a") as file:
        file.write(json.dumps(again) + "\n")
    async with running(settings) as engine:
        await ask(engine, "three")
        assert heard(upstream) == ["one", "two", "three"]
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        assert agent.head is not None
        kept = [json.loads(record.line).get("uuid") for record in await engine.store.records(agent.head)]
    assert kept.count(again["uuid"]) == 1


class Kept:
    """A store whose path has these records."""

    def __init__(self, *records: Record) -> None:
        self._records = records

    async def records(self, turn_id: str) -> tuple[Record, ...]:
        return self._records


async def test_a_uuid_that_a_turn_has_used_again_is_written_once(tmp_path: Path) -> None:
    """An agent's shell can add such records during a turn. A CLI loads the last one of a uuid: it forgot what was
    between, or followed its parents without end, each time it was started for this agent."""
    scribe = Scribe(SESSION, tmp_path, "2.1.332", 1_790_000_000.0)
    first, last = (scribe.record(Message(role, (WORDS,)), "sonnet") for role in ("user", "assistant"))
    again = json.loads(first.line) | {"parentUuid": last.uuid}
    beside, note = again | {"isSidechain": True}, again | {"type": "system"}
    del note["parentUuid"]
    child = json.loads(last.line) | {"uuid": ANOTHER, "parentUuid": first.uuid}
    forged = [Record(json.dumps(again), first.uuid), Record(json.dumps(beside), first.uuid), Record(json.dumps(note))]
    kept = Kept(first, last, *forged, Record(json.dumps(child), ANOTHER))
    shown = await paths.shown(cast(Store, kept), "turn")
    file = tmp_path / f"{SESSION}.jsonl"
    mark = transcript.write(file, shown, SESSION)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(record["uuid"], record["parentUuid"]) for record in written] == [
        (first.uuid, None), (last.uuid, first.uuid), (ANOTHER, last.uuid)
    ]  # fmt: skip
    transcript.reread(file, mark)


@pytest.mark.parametrize(
    "line", ["running", "7", "[" * 100_000, '{"type":"cli-session-proxy/mark","mark":"summary","uuids":["x"]}']
)
async def test_a_record_that_nobody_wrote_is_a_damaged_row(line: str) -> None:
    """It was a fault of ours, in the overview of its owner's agents, too."""

    class Damaged:
        async def records(self, turn_id: str) -> Sequence[Record]:
            return [Record(line)]

    async def read() -> None:
        transcript.parse_records(await paths.shown(cast(Store, Damaged()), "turn_1"))

    with pytest.raises(DamagedRow):
        await read()
