"""The copies that migrations put aside (`<database>.v<n>.bak`): what they hold of an agent goes with the agent.

A copy has the schema of its own time, so its tables are asked for their columns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ...errors import StoreUnavailable


def forget(database: Path, owner: str, agent_id: str) -> None:
    """Remove what the copies hold of this agent. Raises `StoreUnavailable` for one that cannot be cleaned."""
    for copy in sorted(database.parent.glob(f"{database.name}.v*.bak")):
        try:
            with closing(
                sqlite3.connect(f"{copy.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)
            ) as conn:
                _forget(conn, owner, agent_id)
        except sqlite3.Error as exc:
            raise StoreUnavailable(
                f"nothing was deleted: the copy {copy} cannot be cleaned ({exc}); remove it if you do not need it, "
                "then try again"
            ) from exc


def _forget(conn: sqlite3.Connection, owner: str, agent_id: str) -> None:
    conn.execute("PRAGMA journal_mode=DELETE")  # no second file beside it
    conn.execute("PRAGMA secure_delete=ON")
    conn.execute("BEGIN IMMEDIATE")
    columns = dict(_columns(conn))
    found = conn.execute("SELECT key FROM agents WHERE owner = ? AND agent_id = ?", (owner, agent_id)).fetchone()
    if found is None:
        conn.execute("ROLLBACK")
        return
    own = "SELECT id FROM turns WHERE agent_key = ?"
    for table, names in columns.items():
        if "turn_id" in names and "agent_key" not in names:
            conn.execute(f"DELETE FROM {table} WHERE turn_id IN ({own})", found)  # noqa: S608 - names of its own tables
    for table, names in columns.items():
        if "agent_key" in names and table != "turns":
            conn.execute(f"DELETE FROM {table} WHERE agent_key = ?", found)  # noqa: S608 - as above
    if {"images", "image_refs"} <= columns.keys():
        conn.execute("DELETE FROM images WHERE sha256 NOT IN (SELECT sha256 FROM image_refs)")
    conn.execute("DELETE FROM turns WHERE agent_key = ?", found)
    conn.execute("DELETE FROM agents WHERE key = ?", found)
    conn.execute("COMMIT")


def _columns(conn: sqlite3.Connection) -> Iterator[tuple[str, set[str]]]:
    tables = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall()
    for (table,) in tables:
        yield table, {row[1] for row in conn.execute(f"PRAGMA table_info({table})")}
