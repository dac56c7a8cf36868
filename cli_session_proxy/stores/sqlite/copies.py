"""Removes a deleted agent from the backup copies that migrations made (`<database>.v<n>.bak`).

A copy has an older schema, so its tables are inspected for their columns.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from ...errors import StoreUnavailable


def forget(database: Path, owner: str, agent_id: str) -> None:
    """Remove this agent from all copies. Raises `StoreUnavailable` for one that cannot be cleaned."""
    for copy in sorted(database.parent.glob(f"{database.name}.v*.bak")):
        try:
            with closing(
                sqlite3.connect(f"{copy.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)
            ) as conn:
                _forget(conn, owner, agent_id)
        except sqlite3.Error as exc:
            raise StoreUnavailable(
                f"nothing was deleted: the copy {copy} cannot be cleaned ({exc}); remove it if it is not needed, "
                "then try again"
            ) from exc


def _forget(conn: sqlite3.Connection, owner: str, agent_id: str) -> None:
    conn.execute("PRAGMA journal_mode=DELETE")  # no second file beside it
    conn.execute("PRAGMA secure_delete=ON")
    conn.execute("BEGIN IMMEDIATE")
    tables = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall()
    columns = {table: {row[1] for row in conn.execute(f"PRAGMA table_info({table})")} for (table,) in tables}
    key_row = conn.execute("SELECT key FROM agents WHERE owner = ? AND agent_id = ?", (owner, agent_id)).fetchone()
    if key_row is None:
        conn.execute("ROLLBACK")
        return
    own = "SELECT id FROM turns WHERE agent_key = ?"
    for table, names in columns.items():
        if "turn_id" in names and "agent_key" not in names:
            conn.execute(f"DELETE FROM {table} WHERE turn_id IN ({own})", key_row)  # noqa: S608 - names of its own tables
    for table, names in columns.items():
        if "agent_key" in names and table != "turns":
            conn.execute(f"DELETE FROM {table} WHERE agent_key = ?", key_row)  # noqa: S608 - as above
    if {"images", "image_refs"} <= columns.keys():
        conn.execute("DELETE FROM images WHERE sha256 NOT IN (SELECT sha256 FROM image_refs)")
    conn.execute("DELETE FROM turns WHERE agent_key = ?", key_row)
    conn.execute("DELETE FROM agents WHERE key = ?", key_row)
    conn.execute("COMMIT")
