"""Every time that a person is shown is in one zone, which it names: the machine's own, or UTC."""

from __future__ import annotations

import datetime
import itertools

import pytest

from cli_session_proxy.domain import times

from ..zones import machine_in

WINTER = 1_795_521_600.0  # 2026-11-24 12:00 UTC
SUMMER = WINTER - 150 * 86_400


@pytest.mark.parametrize(
    ("zone", "shown", "winter", "summer"),
    [
        ("Europe/Berlin", "local", "2026-11-24 13:00 CET", "2026-06-27 14:00 CEST"),
        ("Europe/Berlin", "utc", "2026-11-24 12:00 UTC", "2026-06-27 12:00 UTC"),
        ("Asia/Kolkata", "local", "2026-11-24 17:30 IST", "2026-06-27 17:30 IST"),
        ("UTC", "local", "2026-11-24 12:00 UTC", "2026-06-27 12:00 UTC"),
    ],
)
def test_a_time_names_its_zone(zone: str, shown: times.Zone, winter: str, summer: str) -> None:
    with machine_in(zone, shown):
        assert (times.written(WINTER, "minutes"), times.written(SUMMER, "minutes")) == (winter, summer)
        assert times.written(WINTER + 5.9) == winter.replace(":00 ", ":00:05 ").replace(":30 ", ":30:05 ")
        assert times.parse(winter.rpartition(" ")[0]) == WINTER, "what is shown can be given back"
        assert times.parse("2026-11-24T12:00:00+00:00") == WINTER


def test_a_day_begins_at_midnight_where_it_is_shown_although_one_of_them_has_25_hours() -> None:
    with machine_in("Europe/Berlin"):
        now = WINTER - 29 * 86_400  # 2026-10-26, the day after the clocks went back
        days = times.days(now, 3)
        assert [str(day) for day in days] == ["2026-10-24", "2026-10-25", "2026-10-26"]
        begins = [times.begins(day) for day in days]
        assert [b - a for a, b in itertools.pairwise(begins)] == [24 * 3600, 25 * 3600]
        assert all(times.day(at) == str(day) != times.day(at - 1) for at, day in zip(begins, days, strict=True))
    with machine_in("Europe/Berlin", "utc"):
        assert times.begins(datetime.date(2026, 10, 25)) % 86_400 == 0
