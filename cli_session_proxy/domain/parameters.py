"""How a client wants one turn to be sampled, and how long its answer may be. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .forms import Sparse

# What a backend may not be able to honour; each wire has its own word for it (`wires.common.Names`).
Name = Literal["max_tokens", "temperature", "top_p", "top_k", "thinking", "tool_choice", "seed"]


@dataclass(frozen=True, slots=True)
class Parameters(Sparse):
    """None: the client left it out. `max_tokens` bounds all that the model says, its thinking included.

    `thinking` is True where the client asks for it, in whatever words, and False where it wants none.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: bool | None = None
    seed: int | None = None
