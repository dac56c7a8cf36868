"""What every `Store` must do, as plain async functions: run each of `CONTRACTS` with a factory.

    @pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
    async def test_contract(contract, tmp_path):
        await contract(lambda: MyStore(tmp_path / "store"))

Every call of the factory gives another store object, not yet open, on one and the same database, which is
empty at the start of a contract. A broken rule is an `AssertionError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType

from ..store_samples import StoreFactory
from . import agents, leases, paths, search, turns

__all__ = ["CONTRACTS", "Contract"]

Contract = Callable[[StoreFactory], Awaitable[None]]


def _contracts_of(module: ModuleType) -> Iterator[Contract]:
    """All that it defines: one that is written is one that is run."""
    for name, found in vars(module).items():
        if inspect.iscoroutinefunction(found) and found.__module__ == module.__name__ and not name.startswith("_"):
            yield found


CONTRACTS: tuple[Contract, ...] = tuple(
    contract for module in (agents, turns, paths, search, leases) for contract in _contracts_of(module)
)
