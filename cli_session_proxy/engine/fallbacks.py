"""When a model cannot answer, and another one does in its place: until when, and who is asked next. Pure.

The decision is kept with the turn (`domain.models.Fallback`) and read from the turn that the next one continues. So it
holds for this path, at every proxy and after every restart, and there is nothing else that could disagree with it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..domain.models import Fallback
from ..errors import (
    ClaudeNotLoggedIn,
    ClaudeUnavailable,
    Interrupted,
    LeaseLost,
    Overloaded,
    ProxyError,
    RateLimited,
    SandboxError,
    SessionBusy,
    StoreUnavailable,
    TurnCancelled,
    TurnTimeout,
    UpstreamError,
)

# Seconds until a model is asked again that did not say when it can answer.
PAUSE = 60.0
# A limit that is said to last longer is looked at again all the same: a week, the longest that is known.
LONGEST = 7 * 24 * 3600.0

# What is the proxy's own, or the turn's time: nobody else's answer changes it.
OWN = (Interrupted, LeaseLost, SandboxError, SessionBusy, StoreUnavailable, TurnCancelled, TurnTimeout)


def helps(error: ProxyError) -> bool:
    """Whether another model may answer where this one ended so: the fault lies with it, not with the request."""
    if isinstance(error, RateLimited | ClaudeNotLoggedIn | ClaudeUnavailable | Overloaded):
        return True
    if not isinstance(error, UpstreamError):
        return False
    status = error.detail.get("status")  # the provider's; without one, with the code of a process that ended
    return "exit_code" in error.detail or (isinstance(status, int) and status >= 500)


def begun(asked: str, model: str, error: ProxyError, now: float) -> Fallback:
    """`model` answers from here on. `error` is why the one that was asked for did not."""
    wait = PAUSE if error.retry_after is None else min(error.retry_after, LONGEST)
    return Fallback(asked, model, error.code, now + wait)


def going_on(before: Fallback, asked: str, names: Collection[str], now: float) -> Fallback | None:
    """What of the parent's fallback holds for a turn that asks for `asked`, and may go to `names`.

    None: it is over, so that this turn asks the model itself again, or it was taken out of the settings.
    """
    if before.until <= now:
        return None
    if before.asked != asked:
        return replace(before, here=False)
    return replace(before, here=True) if before.model in names else None
