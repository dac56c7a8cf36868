"""Chooses the store of an engine by its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..settings import Settings
from .base import MigrationProgress, Store
from .registry import Registry, StoreRegistry
from .sql.store import logged
from .sqlite.store import FILE, SqliteStore

if TYPE_CHECKING:
    from .postgresql.store import PostgresqlStore
    from .sql.moving import Move, ReportProgress, Side


def store_for(settings: Settings, progress: MigrationProgress = logged) -> Store:
    """The store of these settings, not opened yet. Its directory must exist. `progress` is shown in a migration.

    Raises `ConfigError` for a wrong URL or a missing driver.
    """
    if settings.store is None:
        return SqliteStore(settings.var / FILE, progress=progress)
    return _postgresql(settings.store.get_secret_value(), progress)


def registry_for(settings: Settings, store: Store, secret: str) -> Registry:
    """Raises `ConfigError` for a wrong URL or a missing Redis client."""
    rows = StoreRegistry(store)
    if settings.registry is None:
        return rows
    try:
        # Imported here, as the driver below is.
        from .redis import RedisRegistry  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(
            f"a registry in Redis needs its client ({exc}): pip install 'cli-session-proxy[redis]'"
        ) from exc
    return RedisRegistry(settings.registry.get_secret_value(), secret, rows)


def is_new(settings: Settings) -> bool:
    """Whether there is no store yet. A command that only reads must not create one."""
    return settings.store is None and not (settings.var / FILE).exists()


def place_of(settings: Settings) -> str:
    """The store's name for messages, without a password."""
    return str(settings.var) if settings.store is None else _postgresql(settings.store.get_secret_value()).database.name


def move_of(source: Settings, target: Settings, report: ReportProgress = lambda _done, _total: None) -> Move:
    """A move from the store of these settings to that of the others."""
    from .sql.moving import Move  # noqa: PLC0415 - other commands move nothing

    return Move(_side_of(source), _side_of(target), report)


def _side_of(settings: Settings) -> Side:
    store = store_for(settings)
    if isinstance(store, SqliteStore):
        from .sqlite.moving import SqliteSide  # noqa: PLC0415 - as above

        return SqliteSide(store)
    # Imported here: see `_postgresql`.
    from .postgresql.moving import PostgresqlSide  # noqa: PLC0415

    assert settings.store is not None
    return PostgresqlSide(_postgresql(settings.store.get_secret_value()))


def _postgresql(url: str, progress: MigrationProgress = logged) -> PostgresqlStore:
    try:
        # Imported here: a store on SQLite needs neither the driver nor its 40 ms.
        from .postgresql.store import PostgresqlStore  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(
            f"a store in PostgreSQL needs its driver ({exc}): pip install 'cli-session-proxy[postgresql]'"
        ) from exc
    return PostgresqlStore(url, progress=progress)
