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
from .stored import opened
from .terminal import fitted, progress_bar


async def verify(settings: Settings, owner: str | None, agent_id: str | None) -> list[Verified]:
    """Compare the chains of all agents, or of those with this id, with their transcripts. Raises `NotFound`."""
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
        results: list[Verified] = []
        # One step for the path to each head, and one for each session.
        total = sum(1 + sessions for _, sessions, _ in agents)
        steps = itertools.count()
        with progress_bar("verifying") as move_bar:

            def step() -> None:
                move_bar(next(steps), total)

            step()
            for agent, _, held_at in agents:
                try:
                    results.append(await verifier.verify(agent, held_at, step))
                except ContextTooLong as exc:  # this path is too long to be read; the others are read
                    fault = Difference("", agent.head or "", True, "", "chain", exc.message)
                    results.append(Verified(agent.agent_id, agent.owner, 0, 0, (), (), (fault,)))
        return results


def report_lines(results: list[Verified]) -> Iterator[str]:
    """A line per agent, and one for each difference and note."""
    if not results:
        yield "no chains yet"
    for one in results:
        state = "equal" if not one.differences else count(len(one.differences), "difference")
        busy = f", {len(one.busy)} being written" if one.busy else ""
        busy += f", {len(one.unwritten)} written at the next turn" if one.unwritten else ""
        read = f"{count(one.sessions, 'session')}, {count(one.records, 'record')} read"
        yield fitted(f"{printable(one.agent_id)}: {state} ({read}{busy})", 2)
        for difference in (*one.differences, *one.notes):
            where = "head" if difference.at_head else f"turn {difference.tip}"
            name = difference.session_id or "no session"
            yield fitted(f"  {difference.kind:10} session {name}, {where}: {printable(difference.text)}", 13)
