"""One behaviour in many combinations: some run each time, the rest in `make full`."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def rest_in_full(*cases: object, quick: int = 1) -> list[object | ParameterSet]:
    """The first `quick` of these run each time. A case is a value, or a tuple of them."""
    rest = (case if isinstance(case, tuple) else (case,) for case in cases[quick:])
    return [*cases[:quick], *(pytest.param(*case, marks=pytest.mark.full) for case in rest)]
