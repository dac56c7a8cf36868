"""A subscription's windows as the CLI tells them: read whatever it says, told in the provider's own headers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.domain.plan import Plan, PlanWindow

# As CLI 2.1.330 says it.
TOLD: dict[str, Any] = {
    "status": "allowed_warning", "resetsAt": 2000, "rateLimitType": "five_hour", "utilization": 0.91,
    "unifiedWindows": {
        "five_hour": {"utilization": 0.91, "resetsAt": 2000, "status": "allowed_warning", "surpassedThreshold": 0.9},
        "seven_day": {"utilization": 0.3, "resetsAt": 9000},
    },
    "isUsingOverage": False,
}  # fmt: skip
FIVE = PlanWindow("five_hour", 0.91, 2000.0, "allowed_warning")
WEEK = PlanWindow("seven_day", 0.3, 9000.0)


def test_both_windows_are_read() -> None:
    assert Plan.read(TOLD, 1000.0) == Plan("allowed_warning", 1000.0, (FIVE, WEEK), "five_hour", 2000.0)


def test_an_older_cli_tells_the_window_that_limits() -> None:
    told = {"status": "rejected", "resetsAt": 2000, "rateLimitType": "seven_day_opus", "isUsingOverage": False}
    window = PlanWindow("seven_day_opus", None, 2000.0, "rejected")
    assert Plan.read(told, 1.0) == Plan("rejected", 1.0, (window,), "seven_day_opus", 2000.0)


def test_it_is_told_in_the_providers_headers() -> None:
    plan = Plan.read(TOLD, 1000.0)
    assert plan is not None
    name = "anthropic-ratelimit-unified"
    assert dict(plan.headers()) == {
        f"{name}-status": "allowed_warning", f"{name}-reset": "2000", f"{name}-representative-claim": "five_hour",
        f"{name}-5h-status": "allowed_warning", f"{name}-5h-utilization": "0.91", f"{name}-5h-reset": "2000",
        f"{name}-7d-utilization": "0.3", f"{name}-7d-reset": "9000",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("now", "left"),
    [(1999.0, ("allowed_warning", (FIVE, WEEK))), (2000.0, ("allowed", (WEEK,))), (9e3, ("allowed", ()))],
)
def test_a_window_that_was_reset_is_told_no_more(now: float, left: tuple[str, tuple[PlanWindow, ...]]) -> None:
    plan = Plan.read(TOLD, 1000.0)
    assert plan is not None
    assert (plan.current(now).status, plan.current(now).windows) == left


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=9),
    lambda inner: st.dictionaries(st.text(max_size=9), inner, max_size=4) | st.lists(inner, max_size=3),
)
names = ("resetsAt", "rateLimitType", "utilization", "unifiedWindows")


@given(st.fixed_dictionaries({"status": st.just("allowed") | json_values}, optional=dict.fromkeys(names, json_values)))
def test_whatever_it_says_gives_headers_or_nothing(told: dict[str, Any]) -> None:
    plan = Plan.read(told, 1.0)
    if plan is None:
        return
    assert Plan.kept(plan.as_json()) == plan
    for name, value in plan.current(2.0).headers():
        assert (name + value).isascii()
        assert (name + value).isprintable()


windows = st.fixed_dictionaries(
    {}, optional={"utilization": json_values, "resetsAt": json_values, "status": json_values}
)


@given(
    st.dictionaries(st.sampled_from(["five_hour", "seven_day", "x\r\ny", "a" * 99]) | st.text(), windows | json_values)
)
def test_whatever_windows_it_names(told: dict[str, Any]) -> None:
    plan = Plan.read({"status": "allowed", "unifiedWindows": told}, 1.0)
    assert plan is not None
    assert all(one.name.isidentifier() for one in plan.windows)
    assert all((name + value).isascii() and (name + value).isprintable() for name, value in plan.headers())
