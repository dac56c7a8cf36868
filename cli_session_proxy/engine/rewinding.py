"""Moves the head back along its path. The next turn branches there; no turn is removed."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from .. import logs
from ..domain.forms import Recorded
from ..domain.models import JSON, Agent
from ..errors import InvalidRequest, NotFound, SessionBusy
from ..stores.base import Store
from ..tasks import TimeLimit, awake_clock
from .ownership import Ownership

log = logs.get(__name__)

# Seconds to wait for the lease: an idle holder hands it over in about 0.1 s, a dead one's expires in 10 s.
PATIENCE = 30.0
_TURNS_BACK = re.compile(r"-[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Rewound(Recorded):
    """The head before and now (None: before the first turn), and by how many turns it moved."""

    agent_id: str
    was: str | None
    head: str | None
    turns: int

    def as_json(self) -> JSON:
        return {"object": "chain.rewound", **super(Rewound, self).as_json()}


async def rewind(store: Store, ownership: Ownership, agent: Agent, to: str) -> Rewound:
    """`to` is a turn of the path to the head, or `-N`: N turns back.

    Raises `SessionBusy` while a turn of the agent waits or runs, `InvalidRequest` and `NotFound` for another `to`.
    """
    if await store.unfinished_of(agent.key):
        raise SessionBusy("a turn of this agent waits or runs: wait for its end, or cancel it, then rewind")
    deadline = awake_clock(asyncio.get_running_loop())() + PATIENCE
    async with (
        TimeLimit(deadline, "another proxy did not hand this agent over: try again"),
        ownership.hold(agent) as lease,
    ):
        now = await store.agent_by_key(agent.key)
        if now is None:
            raise NotFound(f"there is no agent {agent.agent_id!r} any more", param="agent_id")
        last = await store.turn(now.head) if now.head else None
        path = await store.ancestors(last.id) if last is not None else []
        end = None if last is None or last.delivery != "undelivered" else last.end_without_it
        if last is not None and end is not None and end != last.parent_id:
            # The answer never arrived, and its turn continued another one than the path's end: the path is what the
            # next turn would continue.
            path = [*await store.ancestors(end), last.id]
        if to in path:
            remaining = path.index(to) + 1
        elif not _TURNS_BACK.fullmatch(to):
            raise InvalidRequest(
                "to must be a turn of the path to the head, or -N for N turns back: see `dump`, which names both",
                param="to",
            )
        elif int(to[1:]) > len(path):
            raise InvalidRequest(f"the path to the head has only {len(path)} turns", param="to")
        else:
            remaining = len(path) - int(to[1:])
        head = path[remaining - 1] if remaining else None
        await store.rewind(lease, head)
    log.info("rewound", **agent.named_in_logs, was=now.head, head=head)
    return Rewound(agent.agent_id, now.head, head, len(path) - remaining)
