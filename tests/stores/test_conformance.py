"""SQLite against the contract of every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.stores.sql.store import SqlStore
from cli_session_proxy.testing.store_conformance import CONTRACTS, Contract


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
async def test_contract(contract: Contract, tmp_path: Path) -> None:
    await contract(lambda: SqlStore(tmp_path / "chains.sqlite3"))
