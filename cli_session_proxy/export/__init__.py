"""An agent's chain in forms that a program or a person can read."""

from .formats import FORMATS, Format

__all__ = ["FORMATS", "Format"]
