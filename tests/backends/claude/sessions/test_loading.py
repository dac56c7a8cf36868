"""What a CLI loads is the path that was verified, or it is asked nothing and its answer is not kept."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.sessions.exchanges import is_prompt
from cli_session_proxy.domain.models import Message, Turn
from cli_session_proxy.errors import SessionBusy
from cli_session_proxy.settings import Profile, Settings
from turnfault.provider.upstream import Upstream

from ....clis import old_cli_in_full
from ....conftest import MakeSettings
from ....matrix import rest_in_full
from ....talking import ask, by_hand, heard, request, running, text
from .meddling import MeddledCli, Op, other_words, shorter

SAID = ["fact-1 of a", "fact-2 of a", "fact-3 of a"]
OTHERS = ["fact-1 of b", "fact-2 of b"]


def transcript_of(settings: Settings, turn: Turn) -> Path:
    assert settings.claude_config_dir is not None
    [path] = settings.claude_config_dir.glob(f"projects/*/{turn.session_id}.jsonl")
    return path


async def tell(settings: Settings, *, at_once: bool = False) -> tuple[Path, Path]:
    """Agents `a` and `b` with some turns each, and no process any more; their transcripts.

    `at_once`: all but the last turn of each came in a history. A CLI of one process a turn takes seconds for each.
    """
    last: dict[str, Turn] = {}
    async with running(settings) as engine:
        for agent, words in (("b", OTHERS), ("a", SAID)):
            history: list[Message] = []
            for at, said in enumerate(words, 1):
                history.append(Message.user(said))
                if not at_once or said == words[-1]:
                    last[agent] = await ask(engine, *(history if at_once else [said]), agent=agent)
                history.append(Message.assistant(f"You said: {said} ({at})"))
    return transcript_of(settings, last["a"]), transcript_of(settings, last["b"])


class Told:
    """What `a` and `b` were told once with a CLI is copied back for each test, to the same place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = folder / "place"
        self._kept: dict[Path, tuple[Path, tuple[Path, Path]]] = {}  # CLI -> what was there, and the transcripts in it

    async def settings(
        self, make: MakeSettings, claude: Path, through: Path | None = None, **more: Any
    ) -> tuple[Settings, Path, Path]:
        """With the transcripts of both. `through`: the program that stands in front of the CLI."""
        at = {"var": self._place / "var", "claude_config_dir": self._place / "claude-config"}
        rmtree(self._place, ignore_errors=True)
        if claude not in self._kept:
            transcripts = await tell(make(claude_bin=claude, **at), at_once="bundled" not in str(claude))
            kept = self._folder / f"kept-{len(self._kept)}"
            copytree(self._place, kept, symlinks=True)
            self._kept[claude] = kept, transcripts
        else:
            kept, transcripts = self._kept[claude]
            copytree(kept, self._place, symlinks=True)
        return make(claude_bin=through or claude, **at, **more), *transcripts


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("told"))


async def asked(settings: Settings, said: str, **more: Any) -> Turn:
    async with running(settings) as engine:
        return await ask(engine, said, **more)


def swapped(mine: Path, other: Path) -> Op:
    return ("swap", str(mine), str(other))


def kill_warm(settings: Settings) -> None:
    for note in (settings.var / "run").glob("*/[0-9]*"):
        with suppress(ProcessLookupError):  # 1.0.120 ends after each turn
            os.killpg(int(note.name), signal.SIGKILL)


DAMAGES: dict[str, Callable[[Path, Path], Op]] = {
    "another agent's": swapped,
    "other words of the same length": lambda mine, _: other_words(mine, "fact-2 of a", "fact-X of a"),
    "emptied": lambda mine, _: ("write", str(mine), ""),
    "cut short": lambda mine, _: shorter(mine, 2),
    "deleted": lambda mine, _: ("delete", str(mine)),
}


@old_cli_in_full
async def test_a_resume_that_nobody_disturbs_needs_one_process(
    claude: Path, told: Told, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings, *_ = await told.settings(make_settings, claude)
    turns = [await asked(settings, "and now")]
    mine = transcript_of(settings, turns[-1])
    mine.write_bytes(mine.read_bytes())
    turns.append(await asked(settings, "again"))
    transcript_of(settings, turns[-1]).unlink()
    turns.append(await asked(settings, "and again"))
    assert [turn.continuity for turn in turns] == ["resumed", "resumed", "rebuilt"]
    assert [turn.evidence.reloaded for turn in turns] == [()] * 3
    assert heard(upstream) == [*SAID, "and now", "again", "and again"]


@old_cli_in_full
@pytest.mark.parametrize(
    "how", rest_in_full("another agent's", "deleted", "other words of the same length", "emptied", "cut short")
)
async def test_a_transcript_damaged_after_it_was_verified_is_not_gone_on_from(
    how: str, claude: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude)
    settings, mine, other = await told.settings(make_settings, claude, cli.path)
    before = len(upstream.requests)
    cli.order("start", DAMAGES[how](mine, other))
    turn = await asked(settings, "and now")
    assert cli.done
    assert [seen.user_texts() for seen in upstream.requests[before:]] == [[*SAID, "and now"]]
    assert text(turn) == "You said: and now (4)"
    await asked(settings, "again")
    assert heard(upstream) == [*SAID, "and now", "again"]
    await asked(settings, "and you", agent="b")
    assert heard(upstream) == [*OTHERS, "and you"]


FORGED: dict[str, Callable[[str], str]] = {
    "of_a_sub_agent": lambda line: line.replace('"isSidechain":false', '"isSidechain":true'),
    "written_differently": lambda line: line.replace('"isSidechain":false', '"isSidechain":true').replace(
        '"uuid":', '"\\u0075uid" :'
    ),
    "rewinds_without_saying_so": lambda line: json.dumps(
        {"type": "last-prompt", "leafUuid": json.loads(line)["uuid"], "explicit": True}
    ),
    "without_a_parent": lambda line: line.replace('"parentUuid":null,', ""),
}


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.sample(4)
async def test_a_line_on_no_path_changes_nothing_of_what_is_loaded(
    how: str, claude: Path, told: Told, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """The CLI loaded a record in place of the real one with its uuid: the model heard other words, and nothing of what
    was before. With a note of a leaf it heard nothing of what was after."""
    settings, mine, _ = await told.settings(make_settings, claude)
    prompt = [entry for entry in transcript.parse(mine.read_bytes()).path if is_prompt(entry)][1]
    forged = prompt.data | {"parentUuid": None, "message": {"role": "user", "content": "forged"}}
    line = json.dumps(forged, separators=(",", ":"))
    assert FORGED[how](line) != line
    with mine.open("a") as file:
        file.write(FORGED[how](line) + "\n")
    for said in (["and now"], ["and now", "again"]):
        await asked(settings, said[-1])
        assert heard(upstream) == [*SAID, *said]


@old_cli_in_full
async def test_a_swap_that_is_taken_back_in_time_is_noticed(
    claude: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude)
    settings, mine, other = await told.settings(make_settings, claude, cli.path)
    before = len(upstream.requests)
    cli.order("start", swapped(mine, other))
    cli.order("loaded", swapped(mine, other))
    turn = await asked(settings, "and now")
    assert cli.done
    assert [seen.user_texts() for seen in upstream.requests[before:]] == [[*SAID, "and now"]]
    assert turn.continuity == "resumed"


@old_cli_in_full
@pytest.mark.parametrize("start", ["warm", "cold"])
@pytest.mark.sample(1)
async def test_damage_of_the_same_length_during_a_turn_is_mended_at_the_next_start(
    start: str, claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude)
    settings = make_settings(claude_bin=cli.path)
    damage = ("replace", str(tmp_path / "claude-config" / "projects"), "fact-2 of a", "fact-X of a")
    async with running(settings) as engine:
        for said in SAID:
            await ask(engine, said)
        if start == "warm":
            cli.order("result", damage)
            await ask(engine, "and now")
            kill_warm(settings)  # so that it adds no last notes, which would make the file another one
    if start == "cold":
        cli.order("result", damage)
        await asked(settings, "and now")
    assert cli.done
    await asked(settings, "again")
    assert heard(upstream) == [*SAID, "and now", "again"]


async def test_an_exchange_that_somebody_appends_while_it_is_loaded_is_adopted(
    claude_2: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude_2)
    settings, mine, _ = await told.settings(make_settings, claude_2, cli.path)
    whole = mine.read_text(encoding="utf-8")
    await by_hand(settings, mine.stem, "by hand")
    cli.order("start", ("write", str(mine), mine.read_text(encoding="utf-8")))
    mine.write_text(whole, encoding="utf-8")
    await asked(settings, "and now")
    assert cli.done
    assert heard(upstream) == [*SAID, "by hand", "and now"]


@old_cli_in_full
@pytest.mark.full
async def test_a_transcript_that_is_changed_at_every_load_is_an_error_in_words_and_costs_nothing(
    claude: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude)
    settings, mine, _ = await told.settings(make_settings, claude, cli.path)
    before = len(upstream.requests)
    cli.order("start", ("write", str(mine), ""), always=True)
    with pytest.raises(SessionBusy, match="was loading it"):
        await asked(settings, "and now")
    assert len(upstream.requests) == before
    cli.stop()
    await asked(settings, "again")
    assert heard(upstream) == [*SAID, "again"]


@pytest.mark.full
async def test_times_that_are_new_at_every_load_are_the_clis_own_doing(
    claude_2: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude_2)
    settings, mine, _ = await told.settings(make_settings, claude_2, cli.path)
    cli.order("loaded", ("touch", str(mine), "500000"), always=True)
    turn = await asked(settings, "and now")
    assert turn.evidence.reloaded == ("touched", "touched")
    assert heard(upstream) == [*SAID, "and now"]


# --- CLIs that do not tell when they have loaded

OLD = "1.0.60"


@pytest.mark.parametrize(
    "how", rest_in_full("another agent's", "other words of the same length", "emptied", "cut short")
)
async def test_a_cli_that_does_not_tell_is_looked_after_before_a_word_of_it_goes_out(
    how: str, claude_1: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude_1, version=OLD)
    settings, mine, other = await told.settings(make_settings, claude_1, cli.path)
    cli.order("start", DAMAGES[how](mine, other))
    async with running(settings) as engine:
        answer = await engine.submit(request("and now"))
        events = [event async for event in answer.events()]
        answer.acknowledge()
        turn = await answer.turn()
    assert cli.done
    assert "and now (4)" in str(events)
    assert "and now (3)" not in str(events)
    assert "and now (1)" not in str(events)
    assert text(turn) == "You said: and now (4)"
    assert [attempt["status"] for attempt in turn.attempts] == ["failed", "completed"]
    await asked(settings, "again")
    assert heard(upstream) == [*SAID, "and now", "again"]


async def test_a_turn_that_may_have_run_tools_is_not_repeated(
    claude_1: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MeddledCli(tmp_path / "cli", claude_1, version=OLD)
    coder: dict[str, Any] = {"profiles": {"coder": Profile(tools=("Read",))}, "profile": "coder"}
    settings, mine, other = await told.settings(make_settings, claude_1, cli.path, **coder)
    cli.order("start", swapped(mine, other))
    with pytest.raises(SessionBusy, match="nothing of its answer was kept"):
        await asked(settings, "and now")
    await asked(settings, "again")
    assert heard(upstream) == [*SAID, "again"]


# --- what it loaded shows in what it wrote


@old_cli_in_full
@pytest.mark.full
async def test_an_answer_out_of_another_conversation_is_not_kept(
    claude: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """Somebody covers up a swap: the file is there again with the times that a CLI gives it when it resumes."""
    cli = MeddledCli(tmp_path / "cli", claude)
    settings, mine, other = await told.settings(make_settings, claude, cli.path)
    cli.order("start", swapped(mine, other))
    cli.order("loaded", swapped(mine, other), ("touch", str(mine), "0"))
    with pytest.raises(SessionBusy, match="nothing of its answer was kept"):
        await asked(settings, "and now")
    assert cli.done
    await asked(settings, "again")
    assert heard(upstream) == [*SAID, "again"]
    await asked(settings, "and you", agent="b")
    assert heard(upstream) == [*OTHERS, "and you"]


@pytest.mark.full
async def test_an_answer_of_a_cli_that_loaded_fewer_turns_is_not_kept(
    claude_1: Path, told: Told, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """As from a file of its own of this session, with the last turn only. 1.0.120 writes a copy of what it loaded."""
    cli = MeddledCli(tmp_path / "cli", claude_1)
    settings, mine, _ = await told.settings(make_settings, claude_1, cli.path)
    whole = mine.read_text()
    entries = transcript.parse(whole.encode()).path
    at = max(at for at, entry in enumerate(entries) if is_prompt(entry))
    fewer = [entries[at].with_parent(None), *entries[at + 1 :]]
    cli.order("start", ("write", str(mine), "".join(f"{entry.line}\n" for entry in fewer)))
    cli.order("loaded", ("write", str(mine), whole), ("touch", str(mine), "0"))
    with pytest.raises(SessionBusy, match="nothing of its answer was kept"):
        await asked(settings, "and now")
    assert cli.done
    await asked(settings, "again")
    assert heard(upstream) == [*SAID, "again"]
