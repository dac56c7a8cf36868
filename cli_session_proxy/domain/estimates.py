"""What something takes, from how long it took: for clients that are told when to come again."""

from __future__ import annotations

# How much the newest weighs in the running mean.
SMOOTHING = 0.2


class Average:
    """A running mean in seconds. Until the first measurement it is the guess."""

    __slots__ = ("_known", "value")

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._known = False

    def add(self, seconds: float) -> None:
        self.value += (SMOOTHING if self._known else 1.0) * (seconds - self.value)
        self._known = True
