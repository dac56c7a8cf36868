"""A new store is one class: here one on dictionaries, with what a plain chat turn needs and nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import JSON, Agent, Delivery, Session, Status, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import LeaseLost
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import (
    BEGIN_FIELDS,
    ENDED,
    AgentState,
    Finding,
    Granted,
    HeldLease,
    KeptTurn,
    Lease,
    LeaseHeld,
    Proxy,
    Store,
)

from ..memory_backend import MemoryBackend
from ..talking import ask, text


class DictStore:
    """What it lacks is an `AttributeError`: a turn that needs more of the contract fails this test."""

    spans_hosts = False

    def __init__(self) -> None:
        self.agents: dict[int, Agent] = {}
        self.kept: dict[str, Turn] = {}
        self.sessions: dict[str, Session] = {}
        self.leases: dict[int, Lease] = {}
        self.proxies: dict[str, float] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    # agents

    async def agent(self, owner: str, agent_id: str) -> Agent | None:
        return next((one for one in self.agents.values() if (one.owner, one.agent_id) == (owner, agent_id)), None)

    async def agent_by_key(self, key: int) -> Agent | None:
        return self.agents.get(key)

    async def ensure_agent(self, owner: str, agent_id: str, dir: str, *, named: bool, now: float) -> Agent:
        key = 1 + len(self.agents)
        return await self.agent(owner, agent_id) or self.agents.setdefault(
            key, Agent(key, owner, agent_id, dir, named, None, now)
        )

    # the life of a turn

    async def arrival(self, owner: str, fingerprint: str, agent_id: str | None) -> tuple[Turn | None, Agent | None]:
        alike = [turn for turn in self.kept.values() if turn.fingerprint == fingerprint]
        return (alike[-1] if alike else None), await self.agent(owner, agent_id or "")

    async def agent_state(self, agent_key: int, parent_id: str | None, *, at_head: bool) -> AgentState | None:
        agent = self.agents[agent_key]
        parent = self.kept.get((agent.head if at_head else parent_id) or "")
        return AgentState(agent, parent, self.sessions.get(parent.session_id or "") if parent else None)

    async def accept(self, turn: Turn, **_beside: Any) -> tuple[Turn, AgentState | None]:
        return self._keep(replace(turn, seq=1 + len(self.kept))), None

    async def begin(
        self, lease: Lease, turn: Turn, attempt: JSON, *, system: str | None = None, **_beside: Any
    ) -> None:
        self._check(lease)
        known = self.kept[turn.id]
        told: dict[str, Any] = {name: getattr(turn, name) for name in BEGIN_FIELDS}
        told |= {"attempts": (*known.attempts, attempt), "system": system or known.system}
        self._keep(replace(known, status="running", **told))

    async def note(self, lease: Lease, turn_id: str, evidence: Evidence) -> None:
        self._check(lease)
        self._keep(replace(self.kept[turn_id], evidence=evidence))

    async def commit(self, lease: Lease, turn: Turn, kept: KeptTurn | None, **_beside: Any) -> Turn:
        self._check(lease)
        ended: dict[str, Any] = {name: getattr(turn, name) for name in ENDED}
        turn = replace(self.kept[turn.id], **ended)
        if kept is None:
            return self._keep(turn)
        self.sessions[kept.session.id] = kept.session
        self.agents[turn.agent_key] = replace(self.agents[turn.agent_key], head=turn.id)
        return self._keep(replace(turn, session_id=kept.session.id))

    async def fail(
        self,
        turn_id: str,
        status: Status,
        error: JSON,
        attempts: Sequence[JSON],
        timings: JSON,
        finished_at: float,
        *,
        lease: Lease | None = None,
        instance: str | None = None,
    ) -> Turn:
        if lease is not None:
            self._check(lease)
        turn = replace(self.kept[turn_id], status=status, error=error, attempts=tuple(attempts))
        return self._keep(replace(turn, timings=timings, finished_at=finished_at))

    async def turn(self, turn_id: str) -> Turn | None:
        return self.kept.get(turn_id)

    async def unfinished(self) -> AsyncIterator[Turn]:
        for turn in [one for one in self.kept.values() if one.status in ("queued", "running")]:
            yield turn

    async def unfinished_of(self, agent_key: int, *, excluding: str | None = None) -> list[Turn]:
        return [turn async for turn in self.unfinished() if turn.agent_key == agent_key and turn.instance != excluding]

    async def set_delivery(
        self, turn_id: str, delivery: Delivery, *, by: str | None = None, soon: bool = False
    ) -> None:
        self._keep(replace(self.kept[turn_id], delivery=delivery))

    async def hand_on(self, turn_id: str, by: str, to: str) -> None:
        turn = self.kept[turn_id]
        if turn.delivery == "pending" and turn.instance == by:
            self._keep(replace(turn, instance=to))

    async def doubt(
        self, agent_key: int, instances: Collection[str], turn_id: str | None, fingerprint: str | None
    ) -> None:
        own = [turn for turn in self.kept.values() if turn.agent_key == agent_key]
        alike = [turn for turn in own if (turn.id == turn_id if turn_id else turn.fingerprint == fingerprint)]
        for turn in alike[-1:]:
            if turn.delivery == "pending" and turn.instance in instances:
                self._keep(replace(turn, delivery="uncertain"))

    async def followers(self, turn_id: str) -> list[str]:
        return []

    async def pending_deliveries(self, agent_key: int | None = None) -> list[Turn]:
        return [turn for turn in self.kept.values() if turn.delivery == "pending" and turn.status == "completed"]

    # what was found out

    async def findings(self, subject: str | None = None) -> list[Finding]:
        return []

    # leases

    async def renew(self, proxy: Proxy) -> list[HeldLease]:
        self.proxies[proxy.id] = time.monotonic() + proxy.lease
        return [HeldLease(lease, None) for lease in self.leases.values() if lease.holder == proxy.id]

    async def acquire(
        self,
        agent_key: int,
        proxy: Proxy,
        *,
        dead: Collection[str] = (),
        awake: Callable[[], bool] = lambda: True,
        asks: bool = True,
    ) -> Granted | LeaseHeld:
        await self.renew(proxy)
        now = self.leases.get(agent_key, Lease(agent_key, proxy.id, 0))
        if now.holder != proxy.id and now.holder not in dead and (await self.responds(now.holder) or not awake()):
            return LeaseHeld(now.holder)
        self.leases[agent_key] = Lease(agent_key, proxy.id, now.epoch + 1)
        return Granted(self.leases[agent_key], None if now.holder == proxy.id else now.holder)

    async def responds(self, proxy_id: str) -> bool:
        return self.proxies.get(proxy_id, 0.0) > time.monotonic()

    async def resign(self, proxy_id: str) -> None:
        self.proxies.pop(proxy_id, None)

    def _check(self, lease: Lease) -> None:
        if self.leases.get(lease.agent_key) != lease:
            raise LeaseLost("taken over")

    def _keep(self, turn: Turn) -> Turn:
        self.kept[turn.id] = turn
        return turn


async def test_an_engine_holds_a_conversation_on_a_store_of_dictionaries(tmp_path: Path) -> None:
    store, backend = DictStore(), MemoryBackend()
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    engine = Engine(settings, store=cast(Store, store), backend=backend)
    await engine.start()
    try:
        said = [await ask(engine, word) for word in ("one", "two")]
    finally:
        await engine.stop()
    assert [text(turn) for turn in said] == ["You said: one (1)", "You said: two (2)"]
    assert [turn.parent_id for turn in store.kept.values()] == [None, said[0].id]
    assert [turn.status for turn in store.kept.values()] == ["completed"] * 2
    assert store.agents[1].head == said[1].id
    assert store.proxies == {}
