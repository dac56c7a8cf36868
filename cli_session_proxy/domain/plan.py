"""The usage windows of a subscription (five hours, a week), as reported by the provider to the CLI. Pure.

CLI 2.1.330 prints them in `rate_limit_event` frames: since 2.1.259 all windows, before that only the limiting one. A
CLI that is billed by use has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .forms import Recorded

# The provider's names of the windows, and the names in its headers.
IN_HEADERS: Mapping[str, str] = {"five_hour": "5h", "seven_day": "7d"}
STATUSES = frozenset({"allowed", "allowed_warning", "rejected"})
HEADER = "anthropic-ratelimit-unified"
# Valid names of windows: the provider may add some.
LONGEST_NAME = 40
MOST = 8


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
    """A report of `at` (UTC seconds). `limits`: the window that limits now, with its `status`."""

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
        reset = _number(report.get("resetsAt"))
        given = report.get("unifiedWindows")
        found: dict[str, PlanWindow] = {}
        for name, one in list(given.items())[:MOST] if isinstance(given, dict) else ():
            if _name(name) and isinstance(one, dict):
                shares = _number(one.get("utilization")), _number(one.get("resetsAt"))
                found[name] = PlanWindow(name, *shares, _status(one.get("status")))
        if limits is not None and limits not in found:
            found[limits] = PlanWindow(limits, _number(report.get("utilization")), reset, status)
        return Plan(status, at, tuple(found.values()), limits, reset)

    def current(self, now: float) -> Plan:
        """Without windows that were reset since: their use is unknown until the next report."""
        over = self.resets_at is not None and self.resets_at <= now
        windows = tuple(one for one in self.windows if one.resets_at is None or one.resets_at > now)
        return Plan("allowed", self.at, windows) if over else replace(self, windows=windows)

    def headers(self) -> Iterator[tuple[str, str]]:
        """The headers of the provider's own answers."""
        yield f"{HEADER}-status", self.status
        if self.resets_at is not None:
            yield f"{HEADER}-reset", f"{self.resets_at:.0f}"
        if self.limits is not None:
            yield f"{HEADER}-representative-claim", self.limits
        for one in self.windows:
            short = IN_HEADERS.get(one.name)
            if short is None:
                continue
            if one.status is not None:
                yield f"{HEADER}-{short}-status", one.status
            if one.used is not None:
                yield f"{HEADER}-{short}-utilization", f"{one.used:.6g}"
            if one.resets_at is not None:
                yield f"{HEADER}-{short}-reset", f"{one.resets_at:.0f}"


def _number(value: object) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1e11
    return float(value) if fits else None  # type: ignore[arg-type]  # it fits


def _status(value: object) -> str | None:
    return value if isinstance(value, str) and value in STATUSES else None


def _name(value: object) -> str | None:
    fits = isinstance(value, str) and value.isidentifier() and value.isascii() and len(value) <= LONGEST_NAME
    return str(value) if fits else None
