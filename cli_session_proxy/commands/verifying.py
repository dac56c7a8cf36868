"""`verify`: compares chains with the CLI's files."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

from ..backends.claude.sessions.verifying import Difference, Verified, Verifier
from ..domain.models import Agent
from ..errors import ContextTooLong, NotFound, printable
from ..export.words import count
from ..settings import Settings
from ..stores.auto import place_of
from .bars import bar
from .fitting import fitted
from .stored import opened


async def verify(settings: Settings, owner: str | None, agent_id: str | None) -> list[Verified]:
    """Every agent's chain against its transcripts; of one agent where it is named. Raises `NotFound`."""
    async with opened(settings) as store:
        agents: list[tuple[Agent, int, str | None]] = []  # agent, number of sessions, the other host that has its files
        if store is not None:
            async for row in store.summaries(owner):
                # Compare addresses if both have one: hosts may have equal names.
                here = row.address == settings.advertise
                if row.address is None or settings.advertise is None:
                    here = row.host in (None, socket.gethostname())
                if agent_id in (None, row.agent.agent_id):
                    agents.append((row.agent, row.sessions, None if here else row.address or row.host))
        if agent_id is not None and not agents:
            raise NotFound(f"there is no agent {agent_id!r} in {place_of(settings)}: see `chains`")
        if store is None:
            return []
        verifier = Verifier(settings, store)
        done: list[Verified] = []
        # One step for the path to each head, and one for each session.
        whole = sum(1 + sessions for _, sessions, _ in agents)
        steps = itertools.count()
        with bar("verifying") as moved:

            def step() -> None:
                moved(next(steps), whole)

            step()
            for agent, _, held_at in agents:
                try:
                    done.append(await verifier.verify(agent, held_at, step))
                except ContextTooLong as exc:  # its path is not read; the others are
                    fault = Difference("", agent.head or "", True, "", "chain", exc.message)
                    done.append(Verified(agent.agent_id, agent.owner, 0, 0, (), (), (fault,)))
        return done


def print_verified(found: list[Verified]) -> Iterator[str]:
    """A line per agent, and one for each difference and note."""
    if not found:
        yield "no chains yet"
    for one in found:
        state = "equal" if not one.differences else count(len(one.differences), "difference")
        busy = f", {len(one.busy)} being written" if one.busy else ""
        busy += f", {len(one.unwritten)} written at the next turn" if one.unwritten else ""
        read = f"{count(one.sessions, 'session')}, {count(one.records, 'record')} read"
        yield fitted(f"{printable(one.agent_id)}: {state} ({read}{busy})", 2)
        for difference in (*one.differences, *one.notes):
            where = "head" if difference.at_head else f"turn {difference.tip}"
            name = difference.session_id or "no session"
            yield fitted(f"  {difference.kind:10} session {name}, {where}: {printable(difference.text)}", 13)
