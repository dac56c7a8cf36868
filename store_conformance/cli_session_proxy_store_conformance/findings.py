"""What was found out about something: kept by name, and found out once by all that share the store."""

from __future__ import annotations

import asyncio

from cli_session_proxy.stores.base import Store

from .samples import AWKWARD, StoreFactory, opened


async def _named(store: Store, subject: str | None = None) -> dict[tuple[str, str], object]:
    return {(one.subject, one.name): one.found.get("is") for one in await store.findings(subject)}


async def a_finding_is_kept_until_it_is_found_otherwise(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as beside:
        assert await store.findings() == []
        await store.keep_findings("one", {"a": {"is": 1}, "b": {"is": AWKWARD}})
        await beside.keep_findings("two", {"a": {"is": 2}})
        await beside.keep_findings("one", {"a": {"is": 3}})
        assert await _named(store) == {("one", "a"): 3, ("one", "b"): AWKWARD, ("two", "a"): 2}
        assert await _named(beside, "one") == {("one", "a"): 3, ("one", "b"): AWKWARD}
        assert await _named(beside, "three") == {}
        assert all(one.at > 1e9 for one in await store.findings())


async def of_many_that_want_to_find_it_out_one_does(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as beside:
        asked = [one.claim_finding("one", "a", 60.0) for one in (store, beside) * 5]
        assert sum(await asyncio.gather(*asked)) == 1
        assert await beside.claim_finding("one", "b", 60.0)
        assert await store.findings() == []  # nothing was found yet
        await store.keep_findings("one", {"a": {"is": 1}})
        assert not await beside.claim_finding("one", "a", 60.0)
        assert await _named(beside) == {("one", "a"): 1}
