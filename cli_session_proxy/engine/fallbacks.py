"""When a model cannot answer: whether another one does in its place, until when, and who is asked next; or how long
the turn waits. Pure.

The decision is kept with the turn (`domain.models.Fallback`) and read from the turn that the next one continues. So it
holds for this path, at every proxy and after every restart, and there is nothing else that could disagree with it.
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

# A limit is over so long (seconds) after the time that the provider gave: clocks differ.
MARGIN = 1.0
# Between two askings of a turn that waits: at least, doubled each time, up to.
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 300.0

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


def wait_for(error: ProxyError, before: LimitWait | None, now: float, longest: float) -> LimitWait | None:
    """How long a turn waits that met a limit, in all at most `longest` seconds. `before`: it has waited already.

    None: nobody knows when the limit is over, or it lasts too long.
    """
    if not isinstance(error, RateLimited) or error.retry_after is None:
        return None
    since, asked = (now, 0) if before is None else (before.since, before.asked)
    # A provider that says "now" again and again is asked less and less often.
    until = now + max(error.retry_after + MARGIN, min(LONGEST_PAUSE, SHORTEST_PAUSE * 2**asked))
    return None if until - since > longest else LimitWait(until, since, error.message, asked + 1)


def begun(asked: str, model: str, error: ProxyError, now: float) -> Fallback:
    """A fallback that begins: `model` answers instead, because of `error`."""
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
