"""Tells an agent about earlier attempts when a new one begins."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .. import redact
from ..domain.evidence import Recalled
from ..domain.models import Agent, Block
from ..sandbox import LOCAL_OWNER
from ..settings import GitMemory, fix_id_of
from . import prompt
from .reading import Earlier, earlier


@dataclass(frozen=True, slots=True)
class Recall:
    """`block` is for the model, `evidence` is stored with the turn."""

    block: Block
    evidence: Recalled


def fix_of(memory: GitMemory, agent: Agent) -> str:
    """The fix id of an agent: the profile's, or one of its own, different for each owner."""
    if memory.fix_id is not None:
        return memory.fix_id
    name = agent.agent_id if agent.owner == LOCAL_OWNER else f"{agent.owner}/{agent.agent_id}"
    try:
        return fix_id_of(name)
    except ValueError:
        return f"agent-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


async def recall(memory: GitMemory, agent: Agent) -> Recall | None:
    """None without earlier attempts. Raises `ConfigError` if the repository cannot be read."""
    fix_id = fix_of(memory, agent)
    known = await earlier(memory.repo, fix_id, memory.attempts)
    block = block_of(fix_id, known)
    if block is None:
        return None
    return Recall(block, Recalled(fix_id, tuple(attempt.commit for attempt in known.attempts), block["text"]))


def block_of(fix_id: str, known: Earlier) -> Block | None:
    block = prompt.block(fix_id, known.attempts, partly=known.partly)
    # A commit may have a secret in it.
    return None if block is None else {**block, "text": redact.text(block["text"])}
