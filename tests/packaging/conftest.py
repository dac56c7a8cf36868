"""The image is built on demand (`make image`): it takes a container engine, minutes, and the base image."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m, what is marked `image` is deselected: left out on purpose, not skipped."""
    if config.option.markexpr:
        return
    image = [item for item in items if item.get_closest_marker("image")]
    if image:
        config.hook.pytest_deselected(items=image)
        items[:] = [item for item in items if item not in set(image)]
