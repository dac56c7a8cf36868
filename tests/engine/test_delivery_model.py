"""Whatever proxies, clients and lines do, in whatever order: what becomes of an answer (see `interleaving`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.engine import recovery

from .interleaving import Actors, Client, World

# Runs of a scenario, each in an order of its own.
SOME, MANY = 200, 2000

# How often a client does as it is told, and sends it again.
AGAIN = 2

# Where a client asks: at a proxy, or through another one that forwards the request.
Place = int | tuple[int, int]


async def until_it_has_it(client: Client, *places: Place, **more: Any) -> None:
    """It says the same at one place after the other, until it has the answer. It stays at the last one.

    It asks another proxy once the last one has stored that it left: until then nobody else can know.
    """
    for number, place in enumerate([*places, *places[-1:] * AGAIN], 1):
        at, through = place if isinstance(place, tuple) else (place, None)
        stays = number >= len(places)
        how = {"lost": not stays} if through is not None else {}
        if await client.ask(at, "one", through=through, leaves=not stays, **how, **more) is not None:
            return
        for turn in client.world.turns():
            await client.world.engines[at].delivery_stored(turn.id)
    raise AssertionError("it is told to send it again for ever")


async def twice(client: Client) -> None:
    """It has the answer, and the proxy knows. Then it says the same again elsewhere."""
    first = await client.ask(0, "one", leaves=False)
    assert first is not None
    await client.world.engines[0].delivery_stored(first)
    await client.ask(1, "one", leaves=False)


def scenario(*clients: Sequence[Place], two: int | None = 0, silent: int | None = None, **more: Any) -> Any:
    """Each client says the same words at its places. One more goes on with other words at the proxy `two`."""

    def actors(world: World) -> Actors:
        for number, places in enumerate(clients):
            name = f"client {number}"
            yield name, until_it_has_it(world.client(name), *places, **more)
        if two is not None:
            yield "another", world.client("another").ask(two, "two", leaves=False)
        if silent is not None:
            yield "silence", world.silent(silent)

    return actors


IN_BACKGROUND = {"background": True}

SCENARIOS: dict[str, Callable[[World], Actors]] = {
    "it leaves, and comes back elsewhere": scenario([0, 1]),
    "its line is lost, and it comes back at a third proxy": scenario([(0, 1), 2]),
    "its line is lost, and it comes back where it was": scenario([(0, 1), 1], two=1),
    "its line is lost, and it comes back where the turn ran": scenario([(0, 1), 0]),
    "two wait for one turn, one of them through another proxy": scenario([(0, 1), 0], [0], idempotency_key="k"),
    "two wait for one turn, both through other proxies": scenario([(0, 1), 0], [(0, 2), 0], idempotency_key="k"),
    "two say the same at two proxies": scenario([0, 2], [1, 0]),
    "the proxy that runs it is silent": scenario([0, 1], two=1, silent=0),
    "the proxy that runs it for another one is silent": scenario([(0, 1), 2], two=2, silent=0),
    "the proxy that forwarded it is silent": scenario([(0, 1), 2], silent=1),
    "it leaves a background request, and comes back elsewhere": scenario([0, 1], call=IN_BACKGROUND),
    "the line of its background request is lost": scenario([(0, 1), 2], call=IN_BACKGROUND),
    "two wait for one background turn": scenario([(0, 1), 0], [(0, 2), 1], idempotency_key="k", call=IN_BACKGROUND),
    "it has the answer, and says the same again": lambda world: [("client 0", twice(world.client("client 0")))],
}


def check(world: World) -> None:
    turns, path = world.turns(), world.path()
    on_path = [turn.id for turn in path]
    assert world.ended, "somebody waits for ever"
    assert {turn.status for turn in turns} <= {"completed", "failed", "cancelled"}, "a turn has no end"
    continued = {turn.parent_id for turn in turns}
    if not world.silences:
        waits = [turn for turn in turns if turn.status == "completed" and turn.delivery == "pending"]
        assert {turn.id for turn in waits} <= continued, "nobody will say what became of an answer"
    clients = [client for name, client in world.clients.items() if name != "another"]
    for client in world.clients.values():
        assert set(client.has) <= set(on_path), f"an answer that {client.name} has is off the path"
        assert len(set(client.has)) == len(client.has), f"{client.name} said it again, and was given the same answer"
    # An answer that nobody has may be on the path because somebody else went on from it, or was about to get it. Who
    # says the same again then says something new.
    for turn, after in pairwise(path):
        if not any(turn.id in client.has for client in world.clients.values()):
            asked_by = {client.says for client in world.clients.values() if turn.id in client.asked_for}
            began_after = {client.says for client in clients if after.id in client.began}
            assert asked_by != began_after, "it was doubled"


@pytest.fixture(autouse=True)
def _only_steps_let_others_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that looks by the clock what others left would do that at another step in each run."""
    monkeypatch.setattr(recovery, "NEIGHBOUR_CHECK", 1e9)


def explore(name: str, folder: Path, runs: int) -> None:
    with World(folder, 3).started() as world:
        world.explore(SCENARIOS[name], check, runs, random.Random(f"{name} 37").randrange)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.sample(4)
def test_an_answer_that_somebody_has_stays_and_none_is_doubled_in_some_orders(name: str, tmp_path: Path) -> None:
    explore(name, tmp_path, SOME)


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_answer_that_somebody_has_stays_and_none_is_doubled_in_many_orders(name: str, tmp_path: Path) -> None:
    explore(name, tmp_path, MANY)
