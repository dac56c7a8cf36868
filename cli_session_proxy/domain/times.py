"""Writes times for people, in the time zone of the setting `timezone`. Programs get UTC seconds."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Literal

Zone = Literal["local", "utc"]

# The latest time that input may have (UTC seconds, in the year 5138): `datetime` can write it and later ones in any
# zone.
LAST_TIME = 1e11

# None: the machine's own zone, with summer time.
_zone: tzinfo | None = None


def show_in(zone: Zone) -> None:
    """Set the time zone for the whole process, which has one terminal and one reader."""
    global _zone  # noqa: PLW0603
    _zone = UTC if zone == "utc" else None


def in_utc() -> bool:
    return _zone is UTC


def written(at: float, unit: Literal["minutes", "seconds"] = "seconds") -> str:
    """`2026-11-22 16:33:35 CET`. `at`: UTC seconds."""
    local = _in_zone(at)
    # isoformat: strftime takes ten times as long, and a page has one time per turn.
    return f"{local.replace(tzinfo=None).isoformat(' ', unit)} {local.tzname()}"


def utc(at: float) -> str:
    """`2026-11-22T15:33:35Z`, for formats that have no seconds since 1970."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def day(at: float) -> str:
    return _in_zone(at).date().isoformat()


def days(now: float, number: int) -> list[date]:
    """Today and the days before it, the oldest first."""
    today = _in_zone(now).date()
    return [today - timedelta(days=ago) for ago in reversed(range(number))]


def begins(one: date) -> float:
    """UTC seconds of the first moment of a day."""
    return datetime.combine(one, time(), _zone).timestamp()


def parse(text: str) -> float:
    """UTC seconds of a date or time, in its own zone or the configured one. Raises `ValueError`."""
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=_zone)).timestamp()


def name() -> str:
    """The zone's present name, for tables by day: `UTC`, `CET`."""
    return datetime.now(UTC).astimezone(_zone).tzname() or "UTC"


def _in_zone(at: float) -> datetime:
    """A time in the configured zone. Clipped to what `datetime` can hold, because a stored row may hold anything."""
    return datetime.fromtimestamp(min(max(0.0, at), LAST_TIME), UTC).astimezone(_zone)
