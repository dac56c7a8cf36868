"""The bench over a million turns, with so few that it only shows that everything works."""

from __future__ import annotations

from bench import million

from ..postgres import Postgres


async def test_every_case_is_measured_over_every_number_of_turns(postgres: Postgres) -> None:
    urls = {200: postgres.new_url(), 600: postgres.new_url()}
    found = await million.run(urls, rounds=1, active=2)
    assert list(found) == list(million.CASES)
    assert all(set(medians) == {200, 600} and min(medians.values()) > 0 for medians in found.values())
