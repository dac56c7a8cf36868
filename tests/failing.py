"""What a failed test left open is put away behind it.

Its traceback keeps it until the next test begins. There each socket is found, and is a warning that fails that test.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Generator

import pytest

# Where pytest keeps the last failure for a debugger.
KEPT = ("last_exc", "last_type", "last_value", "last_traceback")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = item.session.testsfailed
    done = yield
    if item.session.testsfailed > before:
        for name in KEPT:
            vars(sys).pop(name, None)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
            patch.setattr(sys, "unraisablehook", lambda _: None)
            for _ in range(3):  # what is finalised may free more
                gc.collect()
    return done
