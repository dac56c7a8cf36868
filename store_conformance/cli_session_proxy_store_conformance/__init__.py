"""What every `Store` must do, as plain async functions: run each of `CONTRACTS` with a factory.

    @pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
    async def test_contract(contract, tmp_path):
        await contract(lambda: MyStore(tmp_path / "store"))

The writer contract needs the stores' clock as well, so that leases expire when it says:

    @pytest.mark.parametrize("contract", WRITER_CONTRACTS, ids=lambda c: c.__name__)
    async def test_writer_contract(contract, tmp_path):
        clock = MyClock()
        await contract(lambda: MyStore(tmp_path / "store", clock=clock), clock)

Every call of the factory gives another store object, not yet open, on one and the same database, which is
empty at the start of a contract. A broken rule is an `AssertionError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType
from typing import Any

from . import agents, beside, budgets, findings, leases, mirrors, paths, search, searching, turns, writers
from .samples import StoreFactory
from .writers import Clock

__all__ = ["CONTRACTS", "WRITER_CONTRACTS", "Clock", "Contract", "WriterContract"]

Contract = Callable[[StoreFactory], Awaitable[None]]
WriterContract = Callable[[StoreFactory, Clock], Awaitable[None]]


def _contracts_of(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """All that it defines: one that is written is one that is run."""
    for name, found in vars(module).items():
        if inspect.iscoroutinefunction(found) and found.__module__ == module.__name__ and not name.startswith("_"):
            yield found


CONTRACTS: tuple[Contract, ...] = tuple(
    contract
    for module in (agents, turns, budgets, paths, search, searching, leases, beside, mirrors, findings)
    for contract in _contracts_of(module)
)
WRITER_CONTRACTS: tuple[WriterContract, ...] = tuple(_contracts_of(writers))
