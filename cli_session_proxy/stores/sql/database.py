"""The seam of the portable store: what it asks of one database. `stores.sqlite` is one answer; another is a folder
beside it.

| what | SQLite | PostgreSQL, on psycopg 3 |
|---|---|---|
| a transaction | a writer thread, groups, reader threads | a pool: READ COMMITTED writes, snapshot reads |
| locking of a row | `BEGIN IMMEDIATE` locks the file | `FOR NO KEY UPDATE`, which SQLite's dialect leaves out |
| a row that is new | `prepared.InsertNew` | the same text |
| a key that it gives | the driver tells it | RETURNING, by its dialect |
| clock of the leases | `store_clock()`: this machine's, on each connection | `store_clock()`: made with the schema |
| proof of a dead holder | the kernel lets go of its lock (`claim`) | a row that expires |
| lock of migrations | the write lock that `open` holds | an advisory lock of the transaction |
| a copy before them | `<file>.v<n>.bak` | the operator's own |
| what an error means | SQLite's result codes | SQLSTATE: classes 08, 40, 53, 57 |
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol, TypeVar

from sqlalchemy import Connection

T = TypeVar("T")

# The body of a transaction. Its `Connection` is SQLAlchemy's; `prepared.Prepared` runs statements on its driver.
Work = Callable[[Connection], T]


class Urgency(Enum):
    """When a write is done. `DURABLE`: it survives a power cut. `JOURNAL`: it survives the end of this process.
    `LATER`: the same, in a moment, but before every other write that is asked for after it (only a `quick` one goes
    ahead)."""

    DURABLE = auto()
    JOURNAL = auto()
    LATER = auto()


class Claim(Protocol):
    """A name that this process holds: nobody else does before it is released or this process has ended."""

    def release(self) -> None: ...


class Database(Protocol):
    """Runs transactions, each whole or not at all.

    Errors are a `ProxyError` in words that hold no value of a statement (those are prompts): `StoreUnavailable`, or
    `InvalidRequest` for a text that cannot be stored. What `work` raises by itself is passed on.
    """

    @property
    def name(self) -> str:
        """How messages call it. It holds no password."""

    async def open(self, prepare: Work[None]) -> None:
        """Connect, and run `prepare` (the schema) as the first write: no other program is in its own meanwhile.

        Leaves nothing open when it fails.
        """

    async def close(self) -> None:
        """Take nothing new, let what was submitted end, disconnect. Idempotent."""

    async def read(self, work: Work[T], *, quick: bool = False) -> T:
        """Run `work` on one snapshot. `quick`: a few rows that every turn reads, which may run on the event loop."""

    async def write(
        self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False, alone: bool = False
    ) -> T:
        """Run `work` as one transaction, maybe together with others, and maybe again where it was rolled back.

        `alone`: never together with others, and once; for work that is long or has effects of its own. `quick`: a few
        rows with `Urgency.JOURNAL`, which may run on the event loop.
        """

    def claim(self, name: str) -> Claim | None:
        """Hold this name among all programs on the database; None while another one holds it. On any thread."""

    def living(self) -> set[str] | None:
        """The ids of the proxies on this host that live, as the kernel proves; None where only heartbeats tell."""

    def back_up(self, version: int) -> None:
        """Put a copy aside before a migration from `version`, inside its transaction. `StoreUnavailable` where it
        cannot be made."""

    async def purge(self) -> None:
        """After a deletion: leave nothing of it in what the database has freed."""

    def forget_copies(self, owner: str, agent_id: str) -> None:
        """Remove the agent from copies that `back_up` made. `StoreUnavailable` where one resists. Blocks."""
