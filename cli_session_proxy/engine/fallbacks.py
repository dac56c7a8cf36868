"""When a model cannot answer: which model is asked instead and until when, or how long the turn waits. Pure.

The decision is stored with the turn (`domain.models.Fallback`), and the next turn reads it from its parent. So it holds
for this path at every proxy and after every restart; there is no second place that could disagree.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..domain.models import Fallback, LimitWait
from ..errors import (
    ClaudeNotLoggedIn,
    ClaudeUnavailable,
    Interrupted,
    LeaseLost,
    Overloaded,
    ProxyError,
    QueueFull,
    RateLimited,
    SandboxError,
    SessionBusy,
    StoreUnavailable,
    TurnCancelled,
    TurnTimeout,
    UpstreamError,
)

# Seconds until a model is tried again whose error did not say when.
PAUSE = 60.0
# A model is tried again after a week at the latest, the longest limit known.
LONGEST = 7 * 24 * 3600.0

# Seconds added to the time that the provider gave: clocks differ.
MARGIN = 1.0
# Seconds between two tries of a waiting turn: at first, doubled each time, at most.
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 300.0

# Errors of the proxy itself, or a turn out of time: another model would not help.
NOT_OF_A_MODEL = (
    Interrupted, LeaseLost, QueueFull, SandboxError, SessionBusy, StoreUnavailable, TurnCancelled, TurnTimeout,
)  # fmt: skip


def may_help(error: ProxyError) -> bool:
    """Whether another model may succeed after this error: the fault is the model's, not the request's."""
    if isinstance(error, RateLimited | ClaudeNotLoggedIn | ClaudeUnavailable | Overloaded):
        return True
    if not isinstance(error, UpstreamError):
        return False
    status = error.detail.get("status")  # the provider's HTTP status
    return "exit_code" in error.detail or (isinstance(status, int) and status >= 500)


def wait_for(error: ProxyError, before: LimitWait | None, now: float, longest: float) -> LimitWait | None:
    """How long a turn waits for the limit that it met, in all at most `longest` seconds. `before`: its last wait.

    None: the end of the limit is unknown or too far.
    """
    if not isinstance(error, RateLimited) or error.retry_after is None:
        return None
    since, asked = (now, 0) if before is None else (before.since, before.asked)
    # A provider that says "now" again and again is asked less and less often.
    until = now + max(error.retry_after + MARGIN, min(LONGEST_PAUSE, SHORTEST_PAUSE * 2**asked))
    return None if until - since > longest else LimitWait(until, since, error.message, asked + 1)


def new(asked: str, model: str, error: ProxyError, now: float) -> Fallback:
    """A new fallback: `model` answers instead, because of `error`."""
    wait = PAUSE if error.retry_after is None else min(error.retry_after, LONGEST)
    return Fallback(asked, model, error.code, now + wait)


def inherited(before: Fallback, asked: str, names: Collection[str], now: float) -> Fallback | None:
    """The parent's fallback, if it still holds for a turn that asks for `asked` and may go to `names`.

    None: its time is over, or the settings no longer allow it. The turn asks the model itself.
    """
    if before.until <= now:
        return None
    if before.asked != asked:
        return replace(before, here=False)
    return replace(before, here=True) if before.model in names else None
