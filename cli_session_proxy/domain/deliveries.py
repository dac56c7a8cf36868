"""Whether a proxy's note about an answer counts. Every store goes by this one rule."""

from __future__ import annotations

from collections.abc import Callable

from .models import FINISHED, Delivery, Status


def counts(note: Delivery, *, now: Delivery, status: Status, is_own: bool, is_continued: Callable[[], bool]) -> bool:
    """Whether this note changes the delivery of a turn that is `now` in that state. `is_own`: it comes from the proxy
    that runs the turn or delivers its answer. `is_continued`: another turn runs or ran on from the answer.

    - `delivered` counts whoever says it, and is final. Any other note counts only from the answer's own proxy.
    - `undelivered` puts an answer off the path. So it does not count while another client may have the answer
    (`uncertain`), nor once a turn continues it.
    - `uncertain` counts only while the answer is pending: an undelivered one may be off the path already.
    - `pending` (a client is back) counts only before the end of the turn: an answer has to be claimed.
    """
    if now == "delivered" or not (note == "delivered" or is_own):
        return False
    if note == "undelivered":
        return now == "pending" and not is_continued()
    if note == "uncertain":
        return now == "pending"
    return note == "delivered" or (now == "undelivered" and status not in FINISHED)
