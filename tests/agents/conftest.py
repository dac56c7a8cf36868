"""The long histories on demand (`make agents`)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m, what is marked `agents` is deselected: left out on purpose, not skipped."""
    if config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("agents")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
