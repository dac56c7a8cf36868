"""Classifies the records after the path in a transcript: who wrote them, and can they be adopted?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from ....domain.client_tools import calls_of
from ....domain.models import Agent, Session, Turn
from ....stores.base import Store
from ..transcript import Entry, FileVerdict, unbroken
from . import paths
from .exchanges import exchanges, has_invented_result, is_prompt

# `ours`: of an attempt that was not stored. `made_up`: results that a CLI invented for our calls, and the model's
# answers. Both are dropped; a person's (`theirs…`) are backed up.
Origin = Literal["notes", "broken_line", "ours", "made_up", "theirs", "theirs_behind_ours"]


async def origin(store: Store, agent: Agent, verdict: FileVerdict) -> Origin | None:
    """A code for the records after the path; None if there are none."""
    if verdict.found != "tail":
        return None
    prompts = await asyncio.to_thread(_prompts, verdict.tail)
    if not prompts and has_invented_result(verdict.tail):
        return "made_up"
    if not prompts:
        return "notes" if verdict.tail else "broken_line"
    if prompts <= await store.own_frames(agent.key, [*prompts]):
        return "ours"
    *_, last = await asyncio.to_thread(list, exchanges(verdict.tail))
    return "theirs_behind_ours" if last.complete and not verdict.broken else "theirs"


async def adoptable(store: Store, agent: Agent, parent: Turn, verdict: FileVerdict) -> tuple[Entry, ...]:
    """A person's complete exchanges at the beginning of the tail.

    Stops at the first exchange that is ours, incomplete, not connected to the path, or based on invented tool results,
    or that has a record of the path again. None after our own open calls, which still wait for results.
    """
    if not verdict.tail or calls_of(parent.output):
        return ()
    found: list[Entry] = []
    leaf = verdict.leaf
    known = {record.uuid for record in await paths.shown(store, parent.id)}
    for exchange in exchanges(verdict.tail):
        path = exchange.path
        uuids = {entry.uuid for entry in path}
        sound = exchange.complete and not has_invented_result(exchange.entries) and unbroken(path, leaf)
        # A record that is its own ancestor: the CLI 1.0.120 follows its parents without end.
        repeated = len(uuids) < len(path) or not known.isdisjoint(uuids)
        if not sound or repeated or await has_own_frame(store, agent, exchange.entries):
            break
        known |= uuids
        found += exchange.entries
        leaf = path[-1].uuid
    return tuple(found)


async def lacks_other_models(store: Store, agent: Agent, parent: Turn, session: Session, verdict: FileVerdict) -> bool:
    """Whether the transcript only lacks turns of other models.

    Then its file ends with the CLI's last turn, or with a failed attempt that another model took over; or there is no
    file, because the CLI has never answered in this session.
    """
    if parent.backend in paths.OWN:  # the CLI answered the last turn itself, so its file should have it
        return False
    latest_of_cli = await paths.own_above(store, parent)
    if verdict.found == "missing":  # its file was deleted if the CLI has answered in this session
        return latest_of_cli is None or latest_of_cli.session_id != session.id
    if verdict.found != "different" or verdict.broken:
        return False
    states = [pair.state for pair in verdict.pairs]
    if "changed" in states:
        return False
    # The file may only end too early: equal records come first, without a gap.
    number_equal = states.count("equal")
    if "equal" in states[number_equal:]:
        return False
    # What stands in the file beyond the path has to be attempts of ours.
    prompts = await asyncio.to_thread(_prompts, verdict.unknown)
    return prompts.issubset(await store.own_frames(agent.key, [*prompts]))


async def has_others(store: Store, agent: Agent, verdict: FileVerdict) -> bool:
    """Whether the transcript has a prompt that this proxy did not send."""
    prompts = await asyncio.to_thread(_prompts, verdict.unknown or verdict.tail)
    return not prompts <= await store.own_frames(agent.key, [*prompts])


async def has_own_frame(store: Store, agent: Agent, entries: Sequence[Entry]) -> bool:
    """Whether one of these entries is a frame that we sent."""
    uuids = [entry.piece_of or entry.uuid for entry in entries if entry.kind == "user"]
    return bool(await store.own_frames(agent.key, [uuid for uuid in uuids if uuid is not None]))


def _prompts(entries: Sequence[Entry]) -> set[str]:
    """The uuids of the prompts among these entries. Call it on a thread: there may be very many entries."""
    uuids = (entry.piece_of or entry.uuid for entry in entries if is_prompt(entry))
    return {uuid for uuid in uuids if uuid is not None}
