"""One behaviour in many combinations: some run each time, the rest in `make full`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from _pytest.mark import ParameterSet


def rest_in_full(*cases: object, quick: int = 1) -> list[object | ParameterSet]:
    """The first `quick` of these run each time. A case is a value, or a tuple of them."""
    rest = (case if isinstance(case, tuple) else (case,) for case in cases[quick:])
    return [*cases[:quick], *(pytest.param(*case, marks=pytest.mark.full) for case in rest)]


def half(*axes: Sequence[object]) -> list[ParameterSet]:
    """Every combination; each time those whose places add up to an even number, the others in `make full`.

    Each value of an axis runs each time. Of three axes, so does every pair of two values.
    """
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, place, strict=True)), marks=[pytest.mark.full] * (sum(place) % 2)
        )
        for place in places
    ]
