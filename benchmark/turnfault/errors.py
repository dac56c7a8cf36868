"""What stops a run before it begins."""

from __future__ import annotations


class TargetError(Exception):
    """A target, or what was asked of it, cannot be run. The text says what to do."""
