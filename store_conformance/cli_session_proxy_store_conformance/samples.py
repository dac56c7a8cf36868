"""What store contracts are made of: an open store, and the least that each of its rows needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from cli_session_proxy.domain.evidence import NOTHING, Evidence
from cli_session_proxy.domain.models import Agent, Block, FileMark, Message, Record, Session, Turn, Usage
from cli_session_proxy.stores.base import (
    Granted,
    KeptTurn,
    Lease,
    LeaseHeld,
    Proxy,
    Store,
    WholeTurn,
)

StoreFactory = Callable[[], Store]
T = TypeVar("T")

# Two kinds of trouble in one text: half a surrogate pair, and what needs more than one byte.
AWKWARD = '\ud800 né 漢字 \U0001f600 \u0000 \\ "'
IMAGE = "iVBORw0KGgo" + "Ab+/" * 40 + "=="


@asynccontextmanager
async def opened(factory: StoreFactory) -> AsyncIterator[Store]:
    store = factory()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def gathered(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]


# Holds the lease of every agent that the contracts make, unless they say otherwise.
HOLDER = Proxy("holder", "here", 3600.0)


async def an_agent(store: Store, agent_id: str = "a", owner: str = "local", *, named: bool = True) -> Agent:
    """An agent that `HOLDER` may write, under `a_lease`."""
    agent = await store.ensure_agent(owner, agent_id, f"{owner}-{agent_id}", named=named, now=1.0)
    _held[agent.key] = await granted(store, agent, HOLDER)
    return agent


async def granted(store: Store, agent: Agent, proxy: Proxy, *, dead: Collection[str] = ()) -> Lease:
    """The agent's lease, which is free, or whose holder has expired or is `dead`."""
    got = await store.acquire(agent.key, proxy, dead=dead)
    assert isinstance(got, Granted)
    assert (got.lease.agent_key, got.lease.holder) == (agent.key, proxy.id)
    return got.lease


def follows(got: Granted | LeaseHeld, former: Lease, holder: str, taken_from: str | None) -> bool:
    """It is granted to this holder, with a higher epoch than the former lease of the agent."""
    if isinstance(got, LeaseHeld) or (got.lease.agent_key, got.lease.holder) != (former.agent_key, holder):
        return False
    return got.lease.epoch > former.epoch and got.taken_from == taken_from


# Of the agents that `an_agent` made last; contracts run one after the other.
_held: dict[int, Lease] = {}


def a_lease(agent_key: int) -> Lease:
    """What `HOLDER` was granted by `an_agent`."""
    return _held[agent_key]


def a_turn(agent: Agent, id: str, parent: str | None = None, at: float = 10.0, **more: Any) -> dict[str, Any]:
    """What `Store.accept` takes. `more`: fields of the turn, or what is told beside it."""
    beside = {name: more.pop(name) for name in more.keys() - Turn.__slots__}
    values = {"model": "sonnet", "input": (Message.user(f"ask {id}"),), "created_at": at, **more}
    turn = Turn(id=id, seq=0, agent_key=agent.key, parent_id=parent, status="queued", **values)
    return {"turn": turn, **beside}


async def accepted(store: Store, new: dict[str, Any]) -> Turn:
    turn, _ = await store.accept(**new)
    return turn


def a_session(agent: Agent, id: str, tip: str | None, at: float = 11.0) -> Session:
    return Session(id, agent.key, tip, f"/t/{id}.jsonl", "2.1.0", at, FileMark(1, 2, 3, 4, "ab", "leaf"))


def a_begin(turn: Turn, session: str = "s1", **more: Any) -> dict[str, Any]:
    """What `Store.begin` takes. `more`: fields of the turn as it begins, or what is told beside it (its `system`)."""
    beside: dict[str, Any] = {"lease": more.get("lease") or a_lease(turn.agent_key), "attempt": {"n": 1}}
    beside |= {name: more.pop(name) for name in (more.keys() - Turn.__slots__) | (more.keys() & {"system"})}
    values: dict[str, Any] = {
        "session_id": session, "frame_uuid": f"frame-{turn.id}", "continuity": "warm",
        "evidence": Evidence(sandbox="/x"), "started_at": 12.0,
    }  # fmt: skip
    return {"turn": replace(turn, **{**values, **more}), **beside}


def a_commit(turn: Turn, agent: Agent, session: str = "s1", **more: Any) -> dict[str, Any]:
    """What `Store.commit` takes. `more`: fields of the turn as it ended or of what it leaves, or what is told beside
    them. Of a refused one nothing is kept."""
    records = more.pop("records", (Record(f'{{"r": "{turn.id}"}}'),))
    kept = KeptTurn(records, a_session(agent, session, turn.id), more.pop("links", ()))
    beside: dict[str, Any] = {"lease": more.get("lease") or a_lease(agent.key), "kept": kept}
    beside |= {name: more.pop(name) for name in more.keys() - Turn.__slots__}
    if more.get("status") == "refused":
        beside |= {"kept": None, "move_head": False}
    values: dict[str, Any] = {
        "status": "completed", "output": ({"type": "text", "text": f"answer {turn.id}"},),
        "stop_reason": "end_turn", "usage": Usage(1, 2, 3, 4, 5), "cost_usd": 0.25, "tools": ({"name": "Bash"},),
        "timings": {"total": 1.5}, "attempts": ({"n": 1, "ok": True},), "path_hash": f"hash-{turn.id}", "depth": 1,
        "delivery": "pending", "finished_at": 13.0, "evidence": NOTHING,
    }  # fmt: skip
    return {"turn": replace(turn, **{**values, **more}), **beside}


async def complete(store: Store, agent: Agent, id: str, parent: str | None = None, **more: Any) -> Turn:
    turn = await accepted(store, a_turn(agent, id, parent))
    await store.begin(**a_begin(turn))
    return await store.commit(**a_commit(turn, agent, **more))


def a_finished_turn(
    id: str, agent_key: int, parent_id: str | None, model: str, input: tuple[Message, ...], output: tuple[Block, ...],
    records: tuple[Record, ...], created_at: float, path_hash: str | None, depth: int, origin: str = "imported",
    **more: Any,
) -> WholeTurn:  # fmt: skip
    """One that came from elsewhere with its answer. `more`: other fields of the turn."""
    turn = Turn(
        id, 0, agent_key, parent_id, "completed", model, input, created_at, output=output, finished_at=created_at,
        delivery="delivered", path_hash=path_hash, depth=depth, origin=origin, **more,
    )  # fmt: skip
    return WholeTurn(turn, records)


def imported_turns(agent: Agent, count: int, *, renamed: str = "i") -> list[WholeTurn]:
    """Each continues the one before it. `renamed`: what their ids begin with."""
    return [
        a_finished_turn(
            f"{renamed}{n}", agent.key, f"{renamed}{n - 1}" if n else None, "sonnet", (Message.user(str(n)),),
            ({"type": "text", "text": str(n)},), (Record(f'{{"n": {n}}}', f"u{n}", synthetic=True),), 2.0, f"h{n}", n,
        )
        for n in range(count)
    ]  # fmt: skip


async def turn_of(store: Store, id: str) -> Turn:
    turn = await store.turn(id)
    assert turn is not None
    return turn


async def raised(call: Awaitable[object]) -> Exception | None:
    """What the call raised. A contract says that it fails and what stays, not by which words."""
    (result,) = await asyncio.gather(call, return_exceptions=True)
    return result if isinstance(result, Exception) else None
