"""The judge of the matrix is the benchmark's; what it says of thoughts and of summaries besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnfault.provider.seen import Seen
from turnfault.score import Fact, Score, messages_of, score

__all__ = ["Fact", "Score", "Thinking", "messages_of", "score", "summed_up"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """After `what`, `kept` thoughts of `of` were shown to the model again, and accepted. `prefix`: see `Score`."""

    what: str
    kept: int
    of: int
    prefix: float | None = None

    @property
    def share(self) -> float:
        return self.kept / self.of


def summed_up(seen: Seen, facts: Sequence[Fact], probe: Fact) -> Score:
    """The model knows a summary of what was acknowledged: every key is in the request that carries `probe`."""
    told = seen.raw.decode()
    found = sum(fact.key in told for fact in facts)
    return Score(len(facts), found, lost=len(facts) - found + (probe.key not in told))
