"""Chooses the store of an engine by its settings."""

from __future__ import annotations

from ..settings import Settings
from .base import Store
from .sqlite.store import FILE, SqliteStore


def store_for(settings: Settings) -> Store:
    """The store of these settings, `<var>/chains.sqlite3`; not opened, and the directory is the caller's."""
    return SqliteStore(settings.var / FILE)
