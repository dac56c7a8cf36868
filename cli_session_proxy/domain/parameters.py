"""Parameters of one turn: sampling, and the longest answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .forms import Sparse

# Parameters that a backend may not support; each wire has its own names for them (`wires.fields.Names`).
Name = Literal["max_tokens", "temperature", "top_p", "top_k", "thinking", "tool_choice", "seed"]


@dataclass(frozen=True, slots=True)
class Parameters(Sparse):
    """None: not given. `max_tokens` includes thinking.

    `thinking`: True if the client asks for it in any form, False if it wants none.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: bool | None = None
    seed: int | None = None
