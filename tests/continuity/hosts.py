"""An agent whose turns go from host to host: each has a `var/` and a directory of the CLI of its own, all one store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import claude
from .score import Fact, Score
from .talk import EngineTalk


def host_settings(make: MakeSettings, url: str, tmp_path: Path, count: int, **more: Any) -> list[Settings]:
    """Of so many hosts on this store."""
    return [
        make(
            store=url, var=tmp_path / f"host-{n}" / "var", claude_config_dir=tmp_path / f"host-{n}" / "config", **more
        )
        for n in range(count)
    ]  # fmt: skip


class HostsTalk(EngineTalk):
    """Each turn goes to another host than the one before. `settings` and `engine` are those of the last one.

    `at_once`: several turns are asked for at the same time, so that nobody knows their order before the chain does.
    """

    def __init__(self, hosts: list[Settings], upstream: Upstream, *, at_once: bool = False) -> None:
        super().__init__(hosts[0], upstream)
        self.hosts = hosts
        self.at_once = at_once
        self.engines: list[Engine] = []
        self.at = 0

    async def up(self, **changes: Any) -> None:
        """A changed `var` is this host's alone; whatever else changes does so on all of them."""
        for at, host in enumerate(self.hosts):
            if "var" not in changes or at == self.at:
                self.hosts[at] = host.model_copy(update=changes)
        self.settings = self.hosts[self.at]
        self.engines = [Engine(host) for host in self.hosts]
        for engine in self.engines:
            await engine.start()
        self.engine = self.engines[self.at]

    async def down(self) -> None:
        for engine in self.engines:
            await engine.stop()

    @property
    def next_engine(self) -> Engine:
        return self.engines[(self.at + 1) % len(self.engines)]

    async def _say(self, said: str) -> str:
        self.at = (self.at + 1) % len(self.hosts)
        self.engine, self.settings = self.engines[self.at], self.hosts[self.at]
        return await super()._say(said)

    def pids(self) -> list[int]:
        tables = [claude(engine).pool.table for engine in self.engines]
        return [one.pid for table in tables for one in table.all() if one.alive and one not in table.spares]

    def busy(self) -> bool:
        return any(process.busy for engine in self.engines for process in claude(engine).pool.table.all())

    async def probe(self, fact: Fact | None = None, *, summarised: bool = False) -> Score:
        """What was asked at once of several hosts has the order in which they accepted it."""
        if self.at_once:
            agent = await self.engine.store.agent("local", self.agent)
            assert agent is not None
            kept = [turn async for turn in self.engine.store.turns(agent.key)]
            said = [str(turn.input[-1].content[-1]) for turn in kept]  # a text, or a call's result that holds one
            self.facts.sort(key=lambda one: next(at for at, words in enumerate(said) if one.text in words))
        return await super().probe(fact, summarised=summarised)
