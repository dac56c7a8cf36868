"""SQLite against the contract of every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance import CONTRACTS, WRITER_CONTRACTS, Contract, WriterContract


class HandClock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
async def test_contract(contract: Contract, tmp_path: Path) -> None:
    await contract(lambda: SqliteStore(tmp_path / "chains.sqlite3"))


@pytest.mark.parametrize("contract", WRITER_CONTRACTS, ids=lambda contract: contract.__name__)
async def test_writer_contract(contract: WriterContract, tmp_path: Path) -> None:
    clock = HandClock()
    await contract(lambda: SqliteStore(tmp_path / "chains.sqlite3", clock=clock), clock)
