"""The browser that looks at the drawn dumps."""

from ..ui.conftest import browser, chromium

__all__ = ["browser", "chromium"]
