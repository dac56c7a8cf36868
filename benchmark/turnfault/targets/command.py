"""A command for each turn: the words on its stdin, the answer on its stdout. The bare CLI is one."""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..provider.upstream import Upstream
from ..talk import RequestRefused, Talk
from .base import TURN, Surface, environment

Children = dict[int, asyncio.subprocess.Process]


@dataclass
class PerTurn:
    """What lives for one turn only. `children`: the processes of the turns that run."""

    upstream: Upstream
    folder: Path
    model: str = "sonnet"
    children: Children = field(default_factory=dict, repr=False)

    async def up(self) -> None:
        """Nothing of it lives between turns."""

    async def down(self, *, kill: bool = False) -> None:  # noqa: ARG002 - it has no softer way
        self.kill_clis()

    def kill_clis(self) -> bool:
        running = [one for one in self.children.values() if one.returncode is None]
        for one in running:
            one.kill()
        return bool(running)

    def cwd(self, agent: str) -> Path:
        place = self.folder / "cwd" / quote(agent, safe="")
        place.mkdir(parents=True, exist_ok=True)
        return place


@dataclass
class CommandTarget(PerTurn):
    """`command` in a shell's words; `{agent}` in it is the conversation's name, `{model}` the model. It runs in a
    folder of the conversation's own, where it may keep what it likes."""

    command: str = ""
    config: Path | None = None

    @property
    def surfaces(self) -> frozenset[Surface]:
        return frozenset(("id", "process", "files") if self.config else ("id", "process"))

    def talk(self, agent: str, *, by_id: bool) -> CommandTalk:  # noqa: ARG002 - it has no other way
        return CommandTalk(self, agent)


class CommandTalk(Talk):
    def __init__(self, target: CommandTarget, agent: str) -> None:
        super().__init__(target.upstream, target.model)
        self.target = target
        self.agent = agent

    async def _say(self, said: str) -> str:
        count = len(self.upstream.requests)
        target, given = self.target, {"{agent}": quote(self.agent, safe=""), "{model}": self.model}
        argv = shlex.split(target.command)
        for name, value in given.items():
            argv = [word.replace(name, value) for word in argv]
        env = environment(target.folder / "home", self.upstream, target.config or target.folder / "config")
        code, out = await one_turn(
            argv, said, cwd=target.cwd(self.agent), env=env, children=target.children, leave_after=self.leave_after
        )
        answer = out.decode("utf-8", "replace").strip()
        if code:
            raise RequestRefused(f"exit {code}")
        if not answer:
            raise RequestRefused("an empty answer")
        self.noted(said, count)
        return answer


@dataclass
class Cli(PerTurn):
    """The bare CLI as many a script drives it: one `claude -p` a turn, `--resume` of the last id that came back."""

    claude: Path = Path("claude")

    @property
    def config(self) -> Path:
        return self.folder / "config"

    @property
    def surfaces(self) -> frozenset[Surface]:
        return frozenset({"id", "files", "process"})

    def talk(self, agent: str, *, by_id: bool) -> CliTalk:  # noqa: ARG002 - it has no other way
        return CliTalk(self, agent)


class CliTalk(Talk):
    def __init__(self, cli: Cli, agent: str) -> None:
        super().__init__(cli.upstream, cli.model)
        self.cli = cli
        self.agent = agent
        self.session_id: str | None = None

    async def _say(self, said: str) -> str:
        count = len(self.upstream.requests)
        env = environment(self.cli.folder / "home", self.upstream, self.cli.config)
        result = await print_mode(
            self.cli.claude, said, self.session_id, model=self.model, system="You are a helpful assistant.",
            cwd=self.cli.cwd(self.agent), env=env, children=self.cli.children, leave_after=self.leave_after,
        )  # fmt: skip
        self.session_id = result["session_id"]
        self.noted(said, count)
        return str(result["result"])


async def print_mode(
    claude: Path,
    said: str,
    session_id: str | None,
    *,
    model: str,
    system: str,
    cwd: Path,
    env: Mapping[str, str],
    children: Children,
    leave_after: asyncio.Event | None = None,
) -> dict[str, Any]:
    """One `claude -p`, as a script runs it; its result as JSON. Raises `RequestRefused`."""
    argv = [str(claude), "-p", "--output-format", "json", "--model", model, "--system-prompt", system]
    argv += [f"--resume={session_id}"] if session_id else []
    code, out = await one_turn(argv, said, cwd=cwd, env=env, children=children, leave_after=leave_after)
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError as exc:
        raise RequestRefused(f"exit {code}") from exc
    if result.get("is_error") or code:
        raise RequestRefused("error")
    return result


async def one_turn(
    argv: Sequence[str],
    said: str,
    *,
    cwd: Path,
    env: Mapping[str, str],
    children: Children,
    leave_after: asyncio.Event | None = None,
) -> tuple[int, bytes]:
    """(exit code, stdout) of a program that is given these words. `children` holds its process while it lives. Who
    drives it goes away, and kills it, when `leave_after` is set. Raises `RequestRefused`."""
    pipe = asyncio.subprocess.PIPE
    try:
        with tempfile.TemporaryFile() as prompt:  # not a pipe: uvloop raises where the CLI has ended before it read it
            prompt.write(said.encode("utf-8", "surrogatepass"))
            prompt.seek(0)
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=prompt, stdout=pipe, stderr=pipe, cwd=cwd, env=env, limit=64 * 1024 * 1024
            )
    except OSError as exc:
        raise RequestRefused("cannot start") from exc
    children[child.pid] = child
    asking = asyncio.ensure_future(child.communicate())
    waited: list[asyncio.Future[Any]] = [asking]
    if leave_after is not None:
        waited.append(asyncio.ensure_future(leave_after.wait()))
    try:
        await asyncio.wait(waited, timeout=TURN, return_when=asyncio.FIRST_COMPLETED)
        in_time = asking.done()
    finally:
        for leaving in waited[1:]:
            leaving.cancel()
        if child.returncode is None:
            child.kill()
        out, _ = await asking
        del children[child.pid]
    if not in_time:
        left = leave_after is not None and leave_after.is_set()
        raise RequestRefused("the client left" if left else "no answer in time")
    assert child.returncode is not None
    return child.returncode, out
