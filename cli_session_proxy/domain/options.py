"""Options of a turn: parameters of the model, and a window, which is how much of the path the model is shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .forms import Sparse

# Parameters that a backend may not support; each wire has its own names for them (`wires.fields.Names`).
ParameterName = Literal["max_tokens", "temperature", "top_p", "top_k", "thinking", "tool_choice", "seed"]


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


# --- a sliding window, cut at turn boundaries

# Older turns are left out of the request, but stay in the chain. Which turn a request begins with depends only on the
# path, so every proxy computes the same, also after a restart. A full window is cut to half its size and grows again.
# So the beginning of the request, and with it the provider's prompt cache, is stable for half a window of turns.

_FORM = re.compile(r"\s*(\d{1,9})\s*(?:(k|m)\s*)?(turns?|tokens?)\s*", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}
# The smallest windows: fewer turns have no earlier turn, fewer tokens not even one turn.
LEAST = {"turns": 2, "tokens": 1_000}


@dataclass(frozen=True, slots=True)
class Window:
    """`size` turns or tokens, the new turn included. Tokens are estimated (`TurnSize.tokens`)."""

    size: int
    unit: Literal["turns", "tokens"]

    @staticmethod
    def parse(text: str) -> Window:
        """Parse `40 turns` or `100k tokens`. Raises `ValueError` with the format."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:40]!r} is no window: write it like `40 turns` or `100k tokens`")
        unit: Literal["turns", "tokens"] = "turns" if match[3].lower().startswith("turn") else "tokens"
        size = int(match[1]) * _FACTORS[(match[2] or "").lower()]
        if size < LEAST[unit]:
            raise ValueError(f"a window holds at least {LEAST[unit]} {unit}")
        return Window(size, unit)

    def __str__(self) -> str:
        return f"{self.size} {self.unit}"

    as_json, from_json = __str__, parse


@dataclass(frozen=True, slots=True)
class TurnSize:
    """One turn of a path. `opens`: a request may begin with it, because it has no results of earlier calls."""

    tokens: int
    opens: bool


def left_out(window: Window | None, path: Sequence[TurnSize]) -> int:
    """How many turns at the start of the path are left out. The last of `path` is the new turn, which is always shown.

    A request never begins with results of calls that it does not have. If the window has only a part of a sequence of
    calls, the request begins where that sequence begins.
    """
    if window is None or not path:
        return 0
    step = max(1, window.size // 2)  # the excess is rounded up to multiples of it
    if window.unit == "turns":
        excess = len(path) - window.size
        first = 0 if excess <= 0 else -(-excess // step) * step
    else:
        total = sum(turn.tokens for turn in path)
        if total <= window.size:
            return 0
        excess = -(-(total - window.size) // step) * step
        first = tokens_left_out = 0
        while first < len(path) - 1 and tokens_left_out < excess:
            tokens_left_out += path[first].tokens
            first += 1
    first = min(first, len(path) - 1)
    following = next((at for at in range(first, len(path)) if path[at].opens), None)
    if following is not None:
        return following
    return next((at for at in range(first, 0, -1) if path[at].opens), 0)
