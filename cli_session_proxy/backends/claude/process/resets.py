"""When a usage limit ends, from the CLI's words. Pure.

Seen: `Claude AI usage limit reached|1760000000` (1.0.x), `5-hour limit reached ∙ resets 3:51am` (1.0.120),
`You've hit your 5-hour limit · resets 3:51am (UTC)` (2.1.329); a weekly limit names the day: `resets Nov 25, 3am`.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_EPOCH = re.compile(r"limit reached\|(\d{10,13})\b")
_RESETS = re.compile(
    r"resets\s+(?:(?P<month>[A-Z][a-z]{2})[a-z]*\s+(?P<day>\d{1,2})(?:,|\s+at)?\s+)?"
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d{2}))?\s*(?P<half>[ap]m)(?:\s*\((?P<zone>[\w/+-]+)\))?",
    re.IGNORECASE,
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MILLISECONDS = 10**11  # an epoch above this cannot be in seconds


def seconds_until(text: str, now: float) -> float | None:
    """Seconds from `now` (epoch) to the reset that the text names, at least 1; None when it names none.

    A clock time without a zone is the CLI's local time, which is ours: TZ is passed on to it.
    """
    epoch = _EPOCH.search(text)
    if epoch is not None:
        value = int(epoch[1])
        return max(1.0, (value / 1000 if value > _MILLISECONDS else value) - now)
    match = _RESETS.search(text)
    if match is None:
        return None
    here = datetime.fromtimestamp(now, _zone(match["zone"])).astimezone(_zone(match["zone"]))
    try:
        at = here.replace(
            hour=int(match["hour"]) % 12 + (12 if match["half"].lower() == "pm" else 0),
            minute=int(match["minute"] or 0), second=0, microsecond=0,
        )  # fmt: skip
        if match["month"]:
            at = at.replace(month=_MONTHS.index(match["month"].lower()) + 1, day=int(match["day"]))
            at = at if at > here else at.replace(year=at.year + 1)
        elif at <= here:
            at += timedelta(days=1)
    except ValueError:  # "resets 31:99pm": words that only look like a time
        return None
    return max(1.0, at.timestamp() - now)


def _zone(name: str | None) -> tzinfo | None:
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError):
        return None
