"""The benchmark for everybody: toy servers score what they deserve on each row, and the matrix judges by its code."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, get_args
from xml.etree import ElementTree

import pytest
import uvloop

from cli_session_proxy import cli
from turnfault import bench, faults, rows
from turnfault import report as table
from turnfault.errors import TargetError
from turnfault.ports import free_port
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream
from turnfault.running import TOLD, RowResult, provider, run
from turnfault.score import Fact, Score, score
from turnfault.talk import RequestRefused
from turnfault.targets.command import print_mode
from turnfault.targets.server import ServerTalk, ServerTarget, WireName

from ..conftest import MakeSettings
from ..without_cli import proxied_without_cli

TOY = Path(__file__).parent / "toy.py"
# Turns that a test tells by itself.
KNOWN = 3


def command(kind: str, port: int) -> str:
    return shlex.join([sys.executable, str(TOY), kind, str(port)])


@asynccontextmanager
async def toy(kind: str, folder: Path, *, named: bool = True) -> AsyncIterator[tuple[ServerTarget, Upstream]]:
    port = free_port()
    async with provider() as upstream:
        header = "X-Agent-Id" if named else None
        server = ServerTarget(
            f"http://127.0.0.1:{port}/v1", "chat", upstream, folder, agent_header=header, start=command(kind, port)
        )
        await server.up()
        try:
            yield server, upstream
        finally:
            await server.down()


async def measured(kind: str, folder: Path, *, named: bool = True) -> dict[str, Score | None]:
    async with toy(kind, folder, named=named) as (server, upstream):
        results = await run(server, upstream, lambda _result: None, [row for row in rows.ROWS if row.name != "200 KB"])
    return {str(result.row): result.score for result in results}


def lost(found: Score) -> bool:
    """Of what was told before, nothing is there."""
    return found.remembered == 0 and found.lost >= TOLD[0] and found.foreign == found.doubled == 0


def doubled(found: Score) -> bool:
    return found.doubled >= TOLD[0] and found.lost == 0


def squeezed(found: Score) -> bool:
    return found.flattened >= 1 and not found.remembered and not found.lost


@pytest.mark.parametrize(
    ("kind", "deserves"),
    [
        pytest.param("forgetful", lost, id="forgetful"),
        pytest.param("doubling", doubled, id="doubling", marks=pytest.mark.full),
        pytest.param("flat", squeezed, id="flat", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
async def test_a_server_that_is_wrong_at_every_turn_scores_so_on_each_row(
    kind: str, deserves: Callable[[Score], bool], tmp_path: Path
) -> None:
    found = await measured(kind, tmp_path, named=kind == "forgetful")
    ran = {name: one for name, one in found.items() if one is not None}
    assert len(ran) > 15
    wrong = {name: one for name, one in ran.items() if not deserves(one)}
    # A turn that is told as a whole text is squeezed or lost with it; an edited history has one turn before.
    assert not {name: one for name, one in wrong.items() if not name.startswith("text:") and "edited" not in name}, (
        wrong
    )
    assert not [name for name, one in ran.items() if one.whole]


async def test_a_server_that_keeps_all_in_its_memory_forgets_only_with_it(tmp_path: Path) -> None:
    found = await measured("memory", tmp_path)
    ended = {str(row) for row in rows.ROWS if row.needs == {"process"} and row.by_id and "CLI" not in row.name}
    assert {name for name, one in found.items() if one is not None and not one.whole} == ended | {
        "client: it leaves while it waits, and sends again",  # it does not know its client has gone, and keeps both
    }
    left_out = {name for name, one in found.items() if one is None}
    assert left_out == {str(row) for row in rows.ROWS if "files" in row.needs or "its CLI" in row.name}


async def test_answers_that_overtake_each_other_are_no_other_order(tmp_path: Path) -> None:
    class Overtaken(ServerTalk):
        """Its client reads six answers from the last to the first."""

        waiting: ClassVar[list[asyncio.Event]] = []

        async def _say(self, said: str) -> str:
            answer = await super()._say(said)
            if KNOWN <= len(self.facts) < KNOWN + faults.AT_ONCE:
                self.waiting.append(asyncio.Event())
                mine = self.waiting[-1]
                if len(self.waiting) == faults.AT_ONCE:
                    mine.set()
                await mine.wait()
                self.waiting.remove(mine)
                if self.waiting:
                    asyncio.get_running_loop().call_soon(self.waiting[-1].set)
            return answer

    async with toy("memory", tmp_path) as (server, upstream):
        talk = Overtaken(server, "overtaken", by_id=True)
        for _ in range(KNOWN):
            await talk.tell()
        await faults.six_at_once(faults.Lab("overtaken", server, upstream, talk))
        found = await talk.probe()
    assert (found.remembered, found.reordered) == (KNOWN + faults.AT_ONCE, 0)


async def test_another_agents_words_are_foreign(tmp_path: Path) -> None:
    async with toy("shared", tmp_path) as (server, upstream):
        chosen = [row for row in rows.ROWS if row.name == "two agents alternate"]
        (result,) = await run(server, upstream, lambda _result: None, chosen)
    assert result.score is not None
    assert (result.score.foreign, result.score.whole, result.score.remembered) == (2, False, result.score.acknowledged)
    assert result.calls == result.score.acknowledged + 3


async def test_this_proxy_keeps_them_on_every_wire(
    make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """The benchmark's own client of each wire. With the real CLI: the next one, and the matrix."""
    chosen = [row for row in rows.ROWS if row.name == "one more turn"]
    async with proxied_without_cli(make_settings(), upstream) as (_, root):
        url = f"{root}/v1"
        for wire in get_args(WireName):
            at = {"generate": f"{root}/v1beta", "ollama": root}.get(wire, url)
            header = None if wire == "responses" else "X-Agent-Id"
            server = ServerTarget(at, wire, upstream, tmp_path, agent_header=header)
            await server.up()
            by_id, by_history = await run(server, upstream, lambda _result: None, chosen)
            assert by_id.score is not None
            assert by_history.score is not None
            assert (by_id.score.whole, by_history.score.whole) == (True, True), wire
            assert by_id.score.prefix == 1.0


def test_the_command_prints_the_table_and_writes_json_a_badge_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    words = ["bench-continuity", "--target", f"http://127.0.0.1:{port}/v1", "--agent-header", "X-Agent-Id",
             "--start", command("forgetful", port), "--only", "one more turn", "-o", str(tmp_path / "out")]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "0 of 2 rows kept every acknowledged turn once and in order" in printed
    data = json.loads((tmp_path / "out" / "seed-0.json").read_text())
    assert (data["schema"], data["whole"], data["rows_run"]) == (table.SCHEMA, 0, 2)
    told = data["rows"][0]["acknowledged"]
    assert (data["rows"][0]["lost"], data["seed"]) == (told, 0)
    for file in ("badge.svg", "picture.svg"):
        ElementTree.parse(tmp_path / "out" / file)
    assert f"0/{told}, {told} lost" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"targets": ("ftp://x",)}, "must be `cli`, .* or a URL"),
        ({"targets": ("http://127.0.0.1:1/v1",)}, "--upstream-port"),
        ({"targets": ("http://127.0.0.1:1/v1",), "wire": "chatt", "start": "true"}, "did you mean `chat`"),
        ({"targets": ("http://127.0.0.1:1/v1",), "only": "nothing like it"}, "fits no row"),
        ({"targets": ("http://127.0.0.1:1/v1",), "start": "false"}, "nothing takes connections"),
    ],
)
async def test_what_cannot_be_run_is_refused_in_words(wrong: dict[str, Any], says: str) -> None:
    only = wrong.pop("only", None)
    with pytest.raises(TargetError, match=says):
        await bench.bench(bench.Options(**wrong), lambda _line: None, only=only)


def test_flattened_turns_are_told_apart_from_lost_ones() -> None:
    facts = [Fact("remember fact-1-aaaaaaaa = known", "fact-1-aaaaaaaa", "Noted one."),
             Fact("remember fact-2-bbbbbbbb = known", "fact-2-bbbbbbbb", "Noted two.")]  # fmt: skip
    probe = Fact("remember fact-3-cccccccc = known", "fact-3-cccccccc")

    def found(*messages: tuple[str, str]) -> Score:
        body = {"messages": [{"role": role, "content": text} for role, text in messages]}
        return score(Seen("POST", "/", {}, json.dumps(body).encode(), body), facts, probe, [])

    one, two = ((fact.text, fact.answer) for fact in facts)
    whole = found(
        ("user", one[0]), ("assistant", one[1]), ("user", two[0]), ("assistant", two[1]), ("user", probe.text)
    )
    flat = found(("user", " ".join([*one, *two, probe.text])))
    backwards = found(("user", " ".join([*two, *one, probe.text])))
    halves = found(("user", " ".join([one[0], two[0], probe.text])))
    assert (str(whole), whole.whole) == ("2/2", True)
    assert (str(flat), flat.whole, flat.complete) == ("0/2, 2 flattened", False, True)
    assert (backwards.reordered, backwards.flattened) == (1, 2)
    assert (str(halves), halves.flattened) == ("0/2, 2 lost", 0)


def test_an_answer_may_stand_in_messages_that_follow_each_other() -> None:
    """What was said before a cut and after it: the API takes neighbours of one role as one message."""
    fact = Fact("remember fact-1-aaaaaaaa = known", "fact-1-aaaaaaaa", "Noted\n\none.")
    probe = Fact("remember fact-3-cccccccc = known", "fact-3-cccccccc")

    def found(*answers: str) -> str:
        messages = [("user", fact.text), *(("assistant", text) for text in answers), ("user", probe.text)]
        body = {"messages": [{"role": role, "content": text} for role, text in messages]}
        return str(score(Seen("POST", "/", {}, json.dumps(body).encode(), body), [fact], probe, []))

    assert found("Noted", "one.") == found("Noted one.") == "1/1"
    assert found("Noted") == found("Noted", "two.") == "0/1, 1 lost"
    assert found("Noted one.", "Noted one.") == "0/1, 1 doubled"


def test_a_row_that_was_left_out_says_why() -> None:
    row = rows.ROWS[1]
    results = [RowResult(row, None, why="it has no files")]
    assert "– (it has no files)" in table.table("toy", results)
    assert table.as_json(table.About("toy", 1), results)["rows"][0]["left_out"] == "it has no files"
    assert table.kept(results) == (0, 0)


@pytest.mark.parametrize("run_on", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_cli_that_ends_before_it_reads_its_prompt_is_refused(tmp_path: Path, run_on: Any) -> None:
    """On uvloop, a write to a pipe that is closed already raises RuntimeError."""
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)

    async def case() -> None:
        with pytest.raises(RequestRefused, match="exit 3"):
            await print_mode(
                program, "words " * 200_000, None, model="m", system="s", cwd=tmp_path, env={}, children={}
            )

    run_on(case())
