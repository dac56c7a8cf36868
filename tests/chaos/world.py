"""The world of a history: real proxies as child processes over real CLIs, their files, and what is alive.

Every proxy and every CLI gets an environment that is built up here: a fake key, the scripted upstream on loopback, a
HOME and a CLAUDE_CONFIG_DIR of the history's own. Each start of a proxy has a mark that its CLIs carry in a header of
their requests and in their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.cli import main
from cli_session_proxy.sandbox import LOCAL_OWNER, directory_name
from cli_session_proxy.stores.sqlite.store import FILE

from ..conftest import CLI_ENV, ROOT
from ..forked import Forked, forked
from ..recovery.others import paused
from ..until import until
from . import asking
from .client import NoAnswer
from .history import Damage, Ending, Network
from .journal import JSON, Crashed, Entry, Orphans
from .model import MARK_HEADER, OTHER, OTHER_NAME
from .skewed import CLOCK

# Seconds for a proxy to listen, on a machine that is busy with CLIs.
START = 60.0
# Seconds for the first check of a CLI, on a machine that is busy with CLIs.
CHECKED = 600.0
# A store with nothing but what was seen of a CLI, by its path: a run of many histories checks it once.
_CHECKED: dict[Path, bytes] = {}
# Seconds within which no CLI of a dead proxy may be alive any more.
ORPHANS_GONE = 1.0
# Seconds that a proxy gets to stop after SIGTERM: its own drain and what closing takes.
STOPPED = 30.0

# The CLI asks again for a stream that is silent for half the idle timeout. An answer that a history holds back must not
# get there on a busy machine: the steps beside it took 14 s once.
SETTINGS = {
    "PORT": "0", "TURN_TIMEOUT": "60", "IDLE_TIMEOUT": "60", "SPAWN_TIMEOUT": "40", "STOP_GRACE": "2",
    "DRAIN_TIMEOUT": "5", "DISCONNECT_GRACE": "2", "MAX_TURNS": "8", "MAX_PROCESSES": "6", "MAX_SPAWNS": "2",
    "SPARES": "0", "CLI_RETRIES": "1", "SELF_CHECK": "false",
}  # fmt: skip

# A script that stays the parent of the CLI. The proxy looks for these names in a CLI's program text.
_WRAPPER = """#!/bin/sh
# "--system-prompt <" "client_composed" "only_if_model_is_current" "mcp_set_servers"
"{binary}" "$@"
"""
_LISTENING = re.compile(r"listening on (\S+)")
# What a flipped byte may hit: a letter of what was said, so that it is the conversation that is changed.
_WORDS = re.compile(rb"lorem|dolor|tempor|magna")


class Proxy:
    """One place of a proxy: the process that is there now, under a mark that is new at each start."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.url = ""
        self.stopping = False
        self.paused_at: float | None = None
        self.cut: dict[Network, float] = {}  # since when it does not reach what is there
        self.woke_at = 0.0  # when it went on after a pause, a cut or a jump of its clock
        self.log: list[str] = []
        self.log_of_start = 0  # where in it the lines of the process that is there now begin
        self.crashes: list[Crashed] = []
        self._world = world
        self._starts = 0
        self._process: Process | Forked | None = None
        self._draining: asyncio.Task[None] | None = None
        self._is_to_end = False

    @property
    def mark(self) -> str:
        return f"p{self.number}-{self._starts}"

    @property
    def away_at(self) -> float | None:
        """Since when the other proxies hear nothing of it."""
        return min((at for at in (self.paused_at, self.cut.get("store")) if at is not None), default=None)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        if self.stopping:
            await self.ended()
        if self.running:
            return
        self._starts += 1
        self.stopping = self._is_to_end = False
        self.log_of_start = len(self.log)
        self._process = await self._world.started(self)
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._draining = asyncio.create_task(self._drain(self._process, listening))
        async with asyncio.timeout(START):
            self.url = self._world.url_of(self, await listening)

    async def _drain(self, process: Process | Forked, listening: asyncio.Future[str]) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.log.append(text)
            if not listening.done() and (found := _LISTENING.search(text)):
                listening.set_result(found[1])
        if not listening.done():
            listening.set_exception(RuntimeError(f"proxy {self.number} ended at its start: {self.log[-5:]}"))
        code = await process.wait()
        if not self._is_to_end:
            self.crashes.append(Crashed(self.mark, code))
        if isinstance(process, Forked):
            process.close()

    def signal(self, number: signal.Signals) -> None:
        self._is_to_end |= number in (signal.SIGKILL, signal.SIGTERM)
        if self.running and self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        self.stopping = True
        self.signal(signal.SIGTERM)

    async def pause(self) -> None:
        assert self._process is not None
        await paused(self._process, self._world.store_file)
        self.paused_at = time.monotonic()

    def wake(self) -> None:
        self.signal(signal.SIGCONT)
        self.paused_at, self.woke_at = None, time.monotonic()

    async def ended(self) -> int | None:
        """Wait until it has ended; its exit code."""
        if self._process is None:
            return None
        async with asyncio.timeout(STOPPED):
            code = await self._process.wait()
        if self._draining is not None:
            await self._draining
        return code


@dataclass(frozen=True, slots=True)
class Place:
    """What a proxy, and the CLIs that it starts, keep on their host."""

    var: Path
    config_dir: Path
    home: Path


REWINDS = 'cli_observation{observation="rewind_conversation"} 1'


async def _has_checked(http: httpx.AsyncClient, url: str) -> bool:
    """Whatever it has seen: on a machine that is too busy a scene may fail, and what follows is not tried."""
    return "cli_observation{" in (await http.get(f"{url}/metrics")).text


class World:
    """Proxies that share one `var/`, on one host. A cluster of hosts is one as well (see `cluster`).

    `headers` go out with every request to a proxy.
    """

    headers: Mapping[str, str] = {}
    skews = False  # its clock may jump: its proxies read it from a file
    checks = False  # its proxies check the CLI, and use from the first turn on what was seen of it
    falls_back = False  # another model answers where Claude is at its limit
    expires = False  # chains that nobody used for a day are removed
    commits = False  # agents have a repository for their attempts
    front = ""  # the load balancer's address

    def __init__(self, folder: Path, binary: Path, upstream: str, proxies: int, *, wrapper: bool) -> None:
        self.folder = folder
        self.noticed: Counter[str] = Counter()  # what proxies counted and logged of the breakages, for the report
        self._upstream = upstream
        folder.mkdir(parents=True, exist_ok=True)
        self._binary = self._real = binary
        self._applications = 0
        if wrapper:
            self._binary = folder / "claude"
            self._binary.write_text(_WRAPPER.format(binary=binary))
            self._binary.chmod(0o755)
        self.proxies = [Proxy(self, number) for number in range(proxies)]

    def begun(self) -> None:
        """Called before any proxy is started."""
        store = self.store_file if self.checks and self._real in _CHECKED else None
        if store is not None and not store.exists():
            store.parent.mkdir(mode=0o700)
            store.write_bytes(_CHECKED[self._real])

    async def joined(self) -> None:
        """Called when every proxy has started for the first time."""
        if self.checks:
            async with httpx.AsyncClient(trust_env=False, headers=self.headers) as http:
                for proxy in self.proxies:
                    await until(partial(_has_checked, http, proxy.url), timeout=CHECKED)
                whole = REWINDS in (await http.get(f"{self.proxies[0].url}/metrics")).text
            if self.store_file is not None and whole and self._real not in _CHECKED:
                with contextlib.closing(sqlite3.connect(self.store_file)) as store:
                    [has_agents] = store.execute("SELECT EXISTS (SELECT * FROM agents)").fetchone()
                    if not has_agents:  # the chains of the release before are for their own history
                        _CHECKED[self._real] = store.serialize()

    async def ready(self) -> list[Entry]:
        """Wait until every proxy takes turns again by itself; who does not."""
        return []

    async def faults(self) -> list[Entry]:
        """What this world itself has seen go wrong, asked for in the end, while every proxy runs."""
        return []

    def place(self, number: int) -> Place:
        return Place(self.folder / "var", self.folder / "claude-config", self.folder / "home")

    @property
    def store_file(self) -> Path | None:
        """None where the store is no file."""
        return self.place(0).var / FILE

    async def started(self, proxy: Proxy) -> Process | Forked:
        if self.skews:
            if not self._clock(proxy).exists():
                self.skew(proxy, 0.0)
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.chaos.skewed", cwd=self.folder, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
                env=self.environment(proxy) | {CLOCK: str(self._clock(proxy))}, start_new_session=True,
            )  # fmt: skip
        return await forked(main, "serve", env=self.environment(proxy), cwd=self.folder, stderr=True)

    def url_of(self, proxy: Proxy, listens: str) -> str:
        """Where clients reach a proxy that says that it listens there."""
        return listens

    def environment(self, proxy: Proxy, mark: str | None = None) -> dict[str, str]:
        place = self.place(proxy.number)
        place.home.mkdir(parents=True, exist_ok=True)
        cli = CLI_ENV | {
            "ANTHROPIC_BASE_URL": self._upstream,
            "ANTHROPIC_CUSTOM_HEADERS": self._header(mark or proxy.mark),
            "HOME": str(place.home),
            "BUN_JSC_useGC": "1",  # some live for hours
        }
        own = {
            "VAR": str(place.var), "CLAUDE_BIN": str(self._binary), "CLAUDE_CONFIG_DIR": str(place.config_dir),
            "CLAUDE_ENV": json.dumps(cli), **SETTINGS,
        }  # fmt: skip
        if self.checks:
            own |= {"SELF_CHECK": "true", "SHARE_PROCESSES": "always"}
        if self.falls_back:
            other = {"litellm": f"anthropic/{OTHER_NAME}", "api_base": self._upstream, "api_key_env": "OTHER_KEY",
                     "tools": True, "images": True,
                     "params": {"extra_headers": {MARK_HEADER: mark or proxy.mark}}}  # fmt: skip
            own |= {"FALLBACKS": json.dumps([OTHER]), "MODELS": json.dumps({OTHER: other})}
        if self.expires:
            own["RETENTION_DAYS"] = "1"
        if self.commits:
            memory = {"repo": str(self.folder / "repository")}
            own |= {"PROFILE": "fixer", "PROFILES": json.dumps({"fixer": {"git_memory": memory}})}
        surroundings = {"PATH": os.environ["PATH"], "HOME": str(place.home), "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        surroundings |= {"OTHER_KEY": "fake", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return surroundings | {f"CLI_SESSION_PROXY_{name}": value for name, value in own.items()}

    def _header(self, mark: str) -> str:
        return f"{MARK_HEADER}: {mark}"

    async def gone(self, mark: str) -> Orphans | None:
        """The CLIs that are alive some time after their proxy's end: the promise is that there are none."""
        await asyncio.sleep(ORPHANS_GONE)
        left = await asyncio.to_thread(lambda: tuple(self.clis(mark)))
        return Orphans(mark, left) if left else None

    def clis(self, mark: str | None = None) -> Iterator[int]:
        """The living processes of the history's CLIs, of one proxy's start or of all."""
        wanted = f"\0ANTHROPIC_CUSTOM_HEADERS={self._header(mark or '')}".encode() + (b"\0" if mark else b"")
        here = f"\0HOME={self.folder}/".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended while we looked, or is another user's
                environ = b"\0" + (entry / "environ").read_bytes()
                if wanted in environ and here in environ:
                    yield int(entry.name)

    def kill_clis(self, mark: str | None = None) -> None:
        for pid in list(self.clis(mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def ask(self, asked: JSON) -> JSON:
        """By an application with an engine of its own. One that is left is killed."""
        self._applications += 1
        mark = f"{asked['by']}-{self._applications}"
        env = self.environment(self.proxies[0], mark=mark)
        process = await forked(asking.main, env=env, cwd=self.folder)
        asked = asked | {"config_dir": str(self.folder / mark)}  # the SDK's CLI knows no session but by the chain
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            for line in (await process.stdout.read()).splitlines():
                if line.startswith(b"{"):
                    told: JSON = json.loads(line)
                    return told
            raise NoAnswer(await process.wait())
        finally:
            process.kill()
            await process.wait()
            process.close()
            self.kill_clis(mark)  # the SDK's own would live on

    async def carried(self, proxy: Proxy, agent_id: str) -> None:
        """Export an agent, delete it, and import it again, by the program's own commands beside the running proxies."""
        file = self.folder / f"carried-{proxy.number}.jsonl"
        file.unlink(missing_ok=True)
        for words in (["export", agent_id, "-o", str(file)], ["delete", agent_id, "--yes"], ["import", str(file)]):
            process = await forked(main, *words, env=self.environment(proxy), cwd=self.folder, stderr=True)
            assert process.stdout is not None
            said = await process.stdout.read()
            code = await process.wait()
            process.close()
            if code != 0:
                raise RuntimeError(f"{words}: exit code {code}: {said.decode(errors='replace')[-500:]}")

    def age(self, agent_id: str, seconds: float) -> None:
        """An agent was last used so much longer ago."""
        assert self.store_file is not None
        with contextlib.closing(sqlite3.connect(self.store_file, timeout=30)) as store, store:
            older = "UPDATE agents SET last_at = last_at - ? WHERE owner = ? AND agent_id = ?"
            assert store.execute(older, (seconds, LOCAL_OWNER, agent_id)).rowcount == 1

    def _clock(self, proxy: Proxy) -> Path:
        return self.folder / "clock"

    def skew(self, proxy: Proxy, seconds: float) -> None:
        """The clock of its host is wrong by so much."""
        new = self._clock(proxy).with_suffix(".new")
        new.write_text(f"{seconds:+.1f}\n")
        new.rename(self._clock(proxy))

    # --- what only hosts have

    def cut(self, proxy: Proxy, network: Network) -> None:
        """Packets of this network are lost."""

    def mend(self, proxy: Proxy, network: Network) -> None: ...

    async def database(self, how: Ending, seconds: float) -> None: ...

    async def registry(self, seconds: float) -> None: ...

    # --- files

    def keep(self, where: Path) -> None:
        """Copy what the CLIs have written, and what was salvaged of it."""
        for place in {self.place(proxy.number) for proxy in self.proxies}:
            here = where / place.var.parent.name
            for name, folder in (("projects", place.config_dir / "projects"), ("salvage", place.var / "salvage")):
                if folder.exists():
                    shutil.copytree(folder, here / name, dirs_exist_ok=True)

    def transcript(self, agent_id: str) -> Path | None:
        """The transcript of an agent that was written last."""
        files: set[Path] = set()
        for place in {self.place(proxy.number) for proxy in self.proxies}:
            sandbox = place.var / "sandbox" / "agents" / directory_name(LOCAL_OWNER, agent_id)
            files |= set(transcript.project_dir(place.config_dir, sandbox).glob("*.jsonl"))
        return max(files, key=lambda path: path.stat().st_mtime, default=None)

    def spoil(self, path: Path, damage: Damage, other: Path | None, dice: random.Random) -> str:
        """Damage a transcript; what was done."""
        data = path.read_bytes()
        match damage:
            case "delete":
                path.unlink()
            case "empty":
                path.write_bytes(b"")
            case "truncate":
                path.write_bytes(data[: len(data) // 2])
            case "cut last line":
                path.write_bytes(data[: max(0, len(data) - 20)])
            case "flip":
                found = list(_WORDS.finditer(data))
                if not found:
                    return "nothing to flip"
                at = dice.choice(found).start()
                with path.open("r+b") as file:  # the same length, in place
                    file.seek(at)
                    file.write(b"x")
            case "swap":
                if other is None or other == path:
                    return "nobody to swap with"
                theirs = other.read_bytes()
                other.write_bytes(data)
                path.write_bytes(theirs)
        return f"{damage}: {path.name}"
