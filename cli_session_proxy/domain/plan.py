"""The usage windows of a subscription (five hours, a week), as reported by the provider to the CLI. Pure.

CLI 2.1.330 prints them in `rate_limit_event` frames: since 2.1.259 all windows, before that only the limiting one. A
CLI that is billed by use has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .forms import Recorded
from .limits import number

# By the name of a window in the CLI's reports: its name in the provider's headers.
HEADER_NAMES: Mapping[str, str] = {"five_hour": "5h", "seven_day": "7d"}
STATUSES = frozenset({"allowed", "allowed_warning", "rejected"})
HEADER = "anthropic-ratelimit-unified"
# The provider may add windows: how long a name may be, and how many windows of a report are kept.
LONGEST_NAME = 40
MOST_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class PlanWindow(Recorded):
    """`used`: the used share, above 1 if the plan allows more; None if only the reset was reported.

    `resets_at`: UTC seconds; `status`: one of `STATUSES`, or None.
    """

    name: str
    used: float | None
    resets_at: float | None
    status: str | None = None


@dataclass(frozen=True, slots=True)
class Plan(Recorded):
    """A report of the time `at` (UTC seconds). `limits`: the name of the window that limits now; `status` and
    `resets_at` are of that window."""

    status: str
    at: float
    windows: tuple[PlanWindow, ...] = ()
    limits: str | None = None
    resets_at: float | None = None

    @staticmethod
    def read(report: Mapping[str, Any], at: float) -> Plan | None:
        """From the `rate_limit_info` of a frame; None for an unknown form."""
        status, limits = _status(report.get("status")), _name(report.get("rateLimitType"))
        if status is None:
            return None
        reset = number(report.get("resetsAt"))
        reported = report.get("unifiedWindows")
        windows: dict[str, PlanWindow] = {}
        for name, window in list(reported.items())[:MOST_WINDOWS] if isinstance(reported, dict) else ():
            if _name(name) and isinstance(window, dict):
                used, resets_at = number(window.get("utilization")), number(window.get("resetsAt"))
                windows[name] = PlanWindow(name, used, resets_at, _status(window.get("status")))
        if limits is not None and limits not in windows:  # e.g. an older CLI: the report itself describes it
            windows[limits] = PlanWindow(limits, number(report.get("utilization")), reset, status)
        return Plan(status, at, tuple(windows.values()), limits, reset)

    @staticmethod
    def kept(found: Mapping[str, Any]) -> Plan | None:
        """The inverse of `as_json`; None for another form. Each value is checked: a row of the store may be damaged or
        forged, and every host sends these values in headers."""
        status, at, windows = _status(found.get("status")), number(found.get("at")), found.get("windows")
        if status is None or at is None:
            return None
        read = tuple(
            PlanWindow(name, number(one.get("used")), number(one.get("resets_at")), _status(one.get("status")))
            for one in (windows if isinstance(windows, list) else ())[:MOST_WINDOWS]
            if isinstance(one, dict) and (name := _name(one.get("name")))
        )
        return Plan(status, at, read, _name(found.get("limits")), number(found.get("resets_at")))

    def current(self, now: float) -> Plan:
        """The plan without windows that were reset since the report: their use is unknown until the next report."""
        is_reset = self.resets_at is not None and self.resets_at <= now
        windows = tuple(window for window in self.windows if window.resets_at is None or window.resets_at > now)
        return Plan("allowed", self.at, windows) if is_reset else replace(self, windows=windows)

    def headers(self) -> Iterator[tuple[str, str]]:
        """The headers of the provider's own answers."""
        yield f"{HEADER}-status", self.status
        if self.resets_at is not None:
            yield f"{HEADER}-reset", f"{self.resets_at:.0f}"
        if self.limits is not None:
            yield f"{HEADER}-representative-claim", self.limits
        for window in self.windows:
            short = HEADER_NAMES.get(window.name)
            if short is None:  # the provider has no header for it
                continue
            if window.status is not None:
                yield f"{HEADER}-{short}-status", window.status
            if window.used is not None:
                yield f"{HEADER}-{short}-utilization", f"{window.used:.6g}"
            if window.resets_at is not None:
                yield f"{HEADER}-{short}-reset", f"{window.resets_at:.0f}"


# Values from the CLI or the store: None if they do not have the form that is expected.


def _status(value: object) -> str | None:
    return value if isinstance(value, str) and value in STATUSES else None


def _name(value: object) -> str | None:
    fits = isinstance(value, str) and value.isidentifier() and value.isascii() and len(value) <= LONGEST_NAME
    return str(value) if fits else None
