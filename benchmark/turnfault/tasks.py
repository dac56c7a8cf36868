"""`turnfault tasks`: an agent in the middle of a small coding task is interrupted, and goes on. Does it finish?

The agent is a loop as programs have it: the model answers with a command, the loop runs it and says what came out. Its
model is scripted and goes by what it is shown alone. It makes a mistake first, and mends it once it sees its attempt
and the test that failed; where it is not shown that, it makes the same mistake again. Where it is not shown the task,
it asks for it. The loop runs nothing but the commands of its task.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from .bench import Options, Say, target_of
from .faults import Lab, NotHereError, transcript
from .provider.script import Fail
from .provider.upstream import Upstream
from .score import Fact
from .talk import RequestRefused
from .targets.base import Surface, Target

SCHEMA = "turnfault/tasks/1"
# Turns after which the loop gives up: an undisturbed task takes 5.
TURNS = 12
# Seconds for a test of a task.
PATIENCE = 30.0
# Acknowledged turns before the interruption: the first attempt was made, and its test has failed.
BEFORE = 3

Interruption = Literal["none", "killed", "limit", "other model", "other host"]
NEEDS: dict[Interruption, frozenset[Surface]] = {
    "none": frozenset(), "killed": frozenset({"process"}), "limit": frozenset(), "other model": frozenset(),
    "other host": frozenset({"files", "process"}),
}  # fmt: skip

COMMAND = re.compile(r"^run: (look|first attempt|second attempt|test)$", re.MULTILINE)
_DID = re.compile(r"\brun: (look|first attempt|second attempt|test)\b")
_TESTED = re.compile(r"\btest: (passed|failed)\b")
_TICKET = re.compile(r"ticket T-\d{4}")


@dataclass(frozen=True, slots=True)
class Task:
    """`before`, `wrong` and `right` are texts of `file`; `test` is a program that fails with the first two."""

    id: str
    ask: str
    file: str
    before: str
    wrong: str
    right: str
    test: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`done`: the test passes, and the last answer names the ticket that only the task named."""

    task: str
    interruption: Interruption
    done: bool = False
    turns: int = 0
    says: str = ""
    left_out: str | None = None


def tasks() -> list[Task]:
    text = resources.files(__package__).joinpath("tasks.toml").read_text(encoding="utf-8")
    return [Task(**data) for data in tomllib.loads(text)["task"]]


def model(texts: Sequence[tuple[str, str]]) -> str:
    """What the scripted model answers to this conversation, (role, text) each."""
    shown = "\n".join(text for _, text in texts)  # whoever said it: a history in one text can be read as well
    did, tests, ticket = _DID.findall(shown), _TESTED.findall(shown), _TICKET.search(shown)
    if ticket is None:
        return "What is the task?"
    if tests[-1:] == ["passed"]:
        return f"Done: {ticket[0]}."
    if "look" not in did:
        return "run: look"
    if "first attempt" not in did:
        return "run: first attempt"
    if tests:
        return "run: test" if "second attempt" in did else "run: second attempt"
    return "run: test"


class Desk:
    """The folder of a task, and the commands that it knows."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self.folder = folder
        (folder / task.file).write_text(task.before)

    async def run(self, command: str) -> str:
        file = self.folder / self.task.file
        if command == "look":
            return f"{self.task.file}:\n{file.read_text()}"
        if command == "test":
            return "test: passed" if await self.passes() else "test: failed"
        file.write_text(self.task.wrong if command == "first attempt" else self.task.right)
        return f"{self.task.file} is written"

    async def passes(self) -> bool:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-B", "-c", f"import sys; sys.path.insert(0, '.')\n{self.task.test}", cwd=self.folder,
            env={}, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(PATIENCE):
            return await child.wait() == 0


async def interrupted(lab: Lab, interruption: Interruption) -> None:
    match interruption:
        case "killed":
            await lab.restart(kill=True)
        case "limit":
            lab.upstream.next(*[Fail(429, headers={"retry-after": "0"})] * 2)
        case "other model":
            lab.talk.model = "haiku"
        case "other host":  # the next one has the target's store, and none of the CLI's files
            await transcript(lab, "wipe", restarted=True)


async def work(lab: Lab, task: Task, interruption: Interruption, folder: Path) -> Outcome:
    """One task from its first turn to its end."""
    desk, ticket = Desk(task, folder), f"ticket T-{lab.talk.dice.randint(1000, 9999)}"
    words, answer, acknowledged = f"{task.ask} ({ticket})", "", 0
    for turn in range(1, TURNS + 1):
        if acknowledged == BEFORE:
            try:
                await interrupted(lab, interruption)
            except NotHereError as exc:
                return Outcome(task.id, interruption, left_out=str(exc))
            acknowledged += 1  # once
        try:
            answer = (await lab.talk.tell(Fact(words, words), tries=3)).answer
        except RequestRefused as refused:
            return Outcome(task.id, interruption, turns=turn, says=f"no answer ({refused.why})")
        acknowledged += 1
        commands = COMMAND.findall(answer)
        if not commands:
            done = await desk.passes() and ticket in answer
            return Outcome(task.id, interruption, done, turn, answer)
        words = f"{turn}. {await desk.run(commands[0])}"
    return Outcome(task.id, interruption, turns=TURNS, says="it goes round in circles")


async def run(wanted: Options, say: Say, *, seed: int = 0, output: Path | None = None) -> list[Outcome]:
    """Every task with every interruption. Raises `TargetError`."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="turnfault-", ignore_cleanup_errors=True) as folder:
        async with Upstream(port=wanted.upstream_port, answer=model, keep=200_000) as upstream:
            target = target_of(wanted.placed(Path(folder)), upstream, Path(folder))
            await target.up()
            try:
                for interruption in get_args(Interruption):
                    for task in tasks():
                        outcome = await _one(target, upstream, task, interruption, seed)
                        outcomes.append(outcome)
                        what = "–" if outcome.left_out else "done" if outcome.done else "not done"
                        say(f"{task.id:10} {interruption:12} {what:8} {outcome.left_out or outcome.says}")
            finally:
                await target.down()
    if output is not None:
        about = {"schema": SCHEMA, "target": wanted.called, "version": wanted.version, "seed": seed}
        report = {**about, "outcomes": [asdict(one) for one in outcomes]}
        await asyncio.to_thread(_write, output / f"tasks-{seed}.json", report)
    say(table({wanted.called: outcomes}))
    return outcomes


async def _one(target: Target, upstream: Upstream, task: Task, interruption: Interruption, seed: int) -> Outcome:
    missing = NEEDS[interruption] - target.surfaces
    if missing:
        return Outcome(task.id, interruption, left_out=f"it has no {' and '.join(sorted(missing))}")
    name = f"task-{task.id}-{seed}-{secrets.token_hex(4)}"
    talk = target.talk(name, by_id="id" in target.surfaces)
    talk.dice.seed(f"{seed} {task.id} {interruption}")
    upstream.heal()
    with tempfile.TemporaryDirectory(prefix="turnfault-task-") as desk:
        return await work(Lab(name, target, upstream, talk), task, interruption, Path(desk))


def table(by_target: dict[str, list[Outcome]]) -> str:
    """Markdown: how many tasks were done, of those that could be interrupted so."""
    kinds = get_args(Interruption)
    lines = [f"| | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for target, outcomes in by_target.items():
        cells = []
        for kind in kinds:
            ran = [one for one in outcomes if one.interruption == kind and one.left_out is None]
            cells.append(f"{sum(one.done for one in ran)} of {len(ran)}" if ran else "–")
        lines.append(f"| {target} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def read(folder: Path) -> dict[str, list[Outcome]]:
    """By target, of every run below a folder."""
    found: dict[str, list[Outcome]] = {}
    for file in sorted(folder.rglob("tasks-*.json")):
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(data["target"], []).extend(Outcome(**one) for one in data["outcomes"])
    return found


def _write(file: Path, report: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
