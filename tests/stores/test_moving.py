"""A store moves into another database: whole, beside its writers, and after every interruption."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select, update

from cli_session_proxy.domain.budgets import Limit, budget_of
from cli_session_proxy.domain.models import Item, Link, Record
from cli_session_proxy.errors import InvalidRequest, StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import move_of, store_for
from cli_session_proxy.stores.base import Expiry, MirrorKey, Proxy, Store
from cli_session_proxy.stores.sql import moving
from cli_session_proxy.stores.sql.moving import COPIED, LAST, LEFT, Move, NotHeld, Side
from cli_session_proxy.stores.sql.tables import metadata, turns
from cli_session_proxy_store_conformance.samples import (
    AWKWARD,
    HOLDER,
    IMAGE,
    a_begin,
    a_session,
    a_turn,
    accepted,
    an_agent,
    complete,
    gathered,
    granted,
    imported_turns,
    opened,
    raised,
    turn_of,
)

from ..conftest import CONFORMANCE, ROOT

MOVER = Proxy("mover", "here", 3600.0)
Contents = dict[str, list[tuple[Any, ...]]]


def in_file(folder: Path) -> Settings:
    folder.mkdir(exist_ok=True)
    return Settings(var=folder)


def in_postgresql(url: str, folder: Path) -> Settings:
    return Settings(store=SecretStr(url), var=folder)


@pytest.fixture(params=["to postgresql", "back"])
def places(request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str) -> tuple[Settings, Settings]:
    """Where the store is, and where it moves to."""
    ends = in_file(tmp_path / "var"), in_postgresql(postgres_url, tmp_path)
    return ends if request.param == "to postgresql" else (ends[1], ends[0])


async def fill(store: Store) -> None:
    """Something in every table."""
    agent, gone = await an_agent(store), await an_agent(store, "gone")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    link = Link(None, "s1", "t1", "started", {"why": AWKWARD}, 9.0)
    kept: dict[str, Any] = {"idempotency_key": "k", "idempotency_until": 9e9, "instance": "holder"}
    await store.add_items(agent.key, [Item("item_1", {"text": AWKWARD})])
    turn = await accepted(store, a_turn(agent, "t1", **kept))
    await store.begin(**a_begin(turn, call={"items": {"input": ["item_1"]}}, takes=(("item_1", "t1"),)))
    lines = (Record(f'{{"data":"{IMAGE}"}}', "u1"), Record("\udcff not JSON", None, synthetic=True))
    await complete(
        store, agent, "t2", "t1", output=(image, {"type": "text", "text": AWKWARD}), records=lines, links=[link]
    )
    await store.import_turns(imported_turns(agent, 8))
    await store.annotate(agent.key, {"topic": AWKWARD})
    await store.take_out(agent.key, "x")
    await store.mirror(agent.key, MirrorKey("project", "s9"), [Record('{"uuid":"m1"}', "m1"), Record("{}")])
    await store.keep_findings("one", {"a": {"is": 1}})
    await store.follow("t1", "other")
    # a parent that was stored later than its child, and numbers that nobody has any more
    await store.import_turns([*imported_turns(gone, 0)])
    await complete(store, gone, "lost", session="s-lost")
    await store.delete_agent(gone.key)
    shot = await an_agent(store, "shot", named=False)
    await complete(store, shot, "shot1", session="s-shot")
    assert await store.delete_agent(shot.key, Expiry(one_shots=99.0))
    budgets = (budget_of("local", None, [Limit("requests", "month", 9)]),)
    await accepted(store, a_turn(await an_agent(store, "late"), "late", budgets=budgets))


async def hang_below_a_later_one(store: Store) -> None:
    assert hasattr(store, "database")
    await store.database.write(
        lambda conn: conn.execute(update(turns).where(turns.c.id == "i0").values(parent_id="late"))
    )


def contents(settings: Settings, side: Side | None = None) -> Contents:
    side = side or move_of(settings, settings).source
    with side.connection() as conn:
        return {
            table.name: sorted((tuple(row) for row in conn.execute(select(table)).all()), key=repr)
            for table in (*COPIED, *LAST)
        }


async def moved(
    source: Settings, target: Settings, told: Callable[[int, int], None] = lambda _done, _total: None
) -> Move:
    """All of it, as `migrate` does it, where nobody else is on the store."""
    move = move_of(source, target, told)
    for step in (move.begin, move.copy, move.verify, move.catch_up):
        step()
    try:
        move.finish(MOVER.id)
    except NotHeld as exc:
        async with opened(lambda: store_for(source)) as store:
            for key in exc.agent_keys:
                agent = await store.agent_by_key(key)
                assert agent is not None
                await granted(store, agent, MOVER, dead=("holder",))
        move.finish(MOVER.id)
    return move


def test_no_table_is_forgotten() -> None:
    known = [*COPIED, *LAST, *LEFT]
    assert sorted(table.name for table in known) == sorted(metadata.tables), (
        "say in stores/sql/moving.py what becomes of a new table when a store moves, and fill it in `fill`"
    )


@pytest.mark.sample(1)
async def test_everything_that_a_store_holds_arrives(
    places: tuple[Settings, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PAGE", 3)
    monkeypatch.setattr(moving, "PAGE_SIZE", 500)
    source, target = places
    async with opened(lambda: store_for(source)) as store:
        await fill(store)
        await hang_below_a_later_one(store)
    told: list[tuple[int, int]] = []
    await moved(source, target, lambda done, total: told.append((done, total)))
    before, after = contents(source), contents(target)
    assert all(before.values()), [name for name, rows in before.items() if not rows]
    for name, rows in before.items():
        assert after[name] == rows, name
    assert told[-1][0] == told[-1][1] == 2 * sum(len(before[table.name]) for table in COPIED)
    async with opened(lambda: store_for(target)) as store:
        agent = await store.agent("local", "a")
        assert agent is not None
        assert [turn.id for turn in await gathered(store.turns(agent.key))][:2] == ["t1", "t2"]
        assert (await turn_of(store, "t2")).output[1]["text"] == AWKWARD
        lease = await granted(store, agent, HOLDER, dead=("mover",))
        assert lease.epoch > max(row[1] for row in before["leases"])
        # numbers go on where the former store was, also behind what was deleted
        new = await store.ensure_agent("local", "new", "new", named=True, now=1.0)
        assert new.key > max(row[0] for row in before["agents"])
        assert (await accepted(store, a_turn(new, "new"))).seq > max(row[0] for row in before["turns"])
        assert (
            await raised(store.save_session(a_session(new, "sx", "no such turn"))) is not None
        )  # it looks at references


@pytest.mark.sample(1)
async def test_what_is_written_meanwhile_arrives_as_well(places: tuple[Settings, Settings]) -> None:
    source, target = places
    async with opened(lambda: store_for(source)) as store:
        await fill(store)
        agent, gone = await an_agent(store, "b"), await an_agent(store, "gone again")
        await complete(store, gone, "g1", session="sg")
        move = move_of(source, target)
        move.begin()
        await complete(store, agent, "m1", session="sm")
        move.copy()
        await complete(store, agent, "m2", "m1", session="sm")
        await store.set_delivery("m1", "delivered")
        await store.delete_agent(gone.key)
        move.verify()
        await store.mirror(agent.key, MirrorKey("project", "s9"), [Record('{"uuid":"m1"}', "m1")])
        move.catch_up()
        await complete(store, agent, "m3", "m2", session="sm")
        with pytest.raises(NotHeld) as held:
            move.finish(MOVER.id)
        await complete(store, agent, "m4", "m3", session="sm")  # nothing has changed for its holder
        for key in held.value.agent_keys:
            there = await store.agent_by_key(key)
            assert there is not None
            await granted(store, there, MOVER, dead=("holder",))
        done = move.finish(MOVER.id)
    before = contents(source)
    assert contents(target) == before
    assert done.rows == {name: len(rows) for name, rows in before.items()}
    assert {"m1", "m2", "m3", "m4"} <= {row[1] for row in before["turns"]}
    assert "gone again" not in str(before["agents"])


@pytest.mark.sample(1)
async def test_a_store_that_was_moved_takes_no_write_and_names_the_new_place(
    places: tuple[Settings, Settings],
) -> None:
    """Nor is it read then: a proxy that still has it would say that what was said since does not exist."""
    source, target = places
    if target.store is not None:
        url = target.store.get_secret_value().replace("proxy@", "proxy:hidden-word@") + "&require_auth=none"
        target = target.model_copy(update={"store": SecretStr(url)})
    async with opened(lambda: store_for(source)) as store:
        await fill(store)
        agent = await an_agent(store, "b")
        move = await moved(source, target)
        place = move.target.name
        for write in (
            accepted(store, a_turn(agent, "t9")),
            store.acquire(agent.key, HOLDER),
            store.renew(Proxy("new", "here", 10.0)),
            store.probe(),
            store.ensure_agent("local", "c", "c", named=True, now=1.0),
            store.set_delivery("t2", "delivered"),
            store.turn("t2"),
            store.agent("local", "b"),
        ):
            error = await raised(write)
            assert isinstance(error, StoreUnavailable), error
            assert f"was moved to {place}" in error.message
            assert error.detail == {"moved_to": place}
            assert "hidden-word" not in error.message
    with pytest.raises(StoreUnavailable, match="was moved to"):
        await store_for(source).open()
    # run again, it has nothing to do but to open the new place, and never goes elsewhere
    again = move_of(source, target)
    with pytest.raises(StoreUnavailable, match="already"):
        again.was_marked()
    async with opened(lambda: store_for(target)) as store:
        assert await store.agent("local", "b") == agent


def test_a_move_into_a_store_that_is_used_is_refused(places: tuple[Settings, Settings], tmp_path: Path) -> None:
    async def made(settings: Settings) -> None:
        async with opened(lambda: store_for(settings)) as store:
            await an_agent(store)

    source, target = places
    asyncio.run(made(source))
    asyncio.run(made(target))
    before = contents(target)
    for other in (target, source):
        with pytest.raises(InvalidRequest, match="holds a store already"):
            move_of(source, other).begin()
    assert contents(target) == before
    asyncio.run(made(source))


@pytest.mark.sample(1)
async def test_a_row_that_is_not_the_same_ends_the_move_and_the_store_goes_on(
    places: tuple[Settings, Settings],
) -> None:
    source, target = places
    async with opened(lambda: store_for(source)) as store:
        await fill(store)
        move = move_of(source, target)
        move.begin()
        move.copy()
        with move.target.connection() as conn:
            move.target.drop_foreign_keys(conn)
            conn.execute(update(turns).where(turns.c.id == "t2").values(model="another"))
        with pytest.raises(StoreUnavailable, match=r"is not the same in turns; nothing was moved"):
            move.verify()
        with pytest.raises(StoreUnavailable, match=r"a move into .* has not ended"):
            await store_for(target).open()
        agent = await store.agent("local", "a")
        assert agent is not None
        await complete(store, agent, "t3", "t2")
        move.give_up()
        await complete(store, agent, "t4", "t3")
    # the next try begins anew
    await moved(source, target)
    assert contents(target) == contents(source)


class Killed(Exception):
    pass


@pytest.mark.sample(1)
async def test_a_move_that_is_interrupted_anywhere_goes_on_where_it_was(
    places: tuple[Settings, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PAGE", 4)
    source, target = places
    async with opened(lambda: store_for(source)) as store:
        await fill(store)
        agent = await store.agent("local", "a")
        assert agent is not None
        copied: list[int] = []
        for number in range(6):
            steps = 0

            def told(done: int, _total: int, number: int = number) -> None:
                nonlocal steps
                steps += 1
                if steps > 1 + 3 * number:
                    copied.append(done)
                    raise Killed

            move = move_of(source, target, told)
            with pytest.raises(Killed):  # noqa: PT012 - in any of these
                move.begin()
                move.copy()
                move.verify()
            await complete(store, agent, f"n{number}", "t2")  # it serves
    assert copied == sorted(copied)
    await moved(source, target)
    assert contents(target) == contents(source)


# Ends itself by SIGKILL: `argv` are the folder, the URL, a function, and at which call of it, or at one with this text.
KILLED_AT = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.stores import test_moving as at
from cli_session_proxy.stores.sql import moving
folder, url, name, which = sys.argv[1:]
inner, calls = getattr(moving, name), 0
def last(*args, **more):
    global calls
    calls += 1
    if which == str(calls) or (which.isalpha() and which in repr(args[1:])):
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*args, **more)
setattr(moving, name, last)
moving.PAGE = 4
asyncio.run(at.moved(at.in_file(Path(folder)), at.in_postgresql(url, Path(folder))))
"""


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("_insert", "6"),
        ("_set_meta", "moved"),
        *(
            pytest.param(name, which, marks=pytest.mark.full)
            for name, which in (
                ("_insert", "1"),
                ("_differing", "4"),
                ("_count", "14"),
                ("_set_meta", "true"),
                ("_count", "40"),
            )
        ),
    ],
)
@pytest.mark.sample(1)
async def test_a_move_that_is_killed_loses_nothing(name: str, which: str, tmp_path: Path, postgres_url: str) -> None:
    source, target = in_file(tmp_path / "var"), in_postgresql(postgres_url, tmp_path)
    async with opened(lambda: store_for(source)) as store:
        await fill(store)
    before = contents(source)
    run = [sys.executable, "-c", KILLED_AT, str(source.var), postgres_url, name, which]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{CONFORMANCE}"}
    process = await asyncio.create_subprocess_exec(*run, cwd=ROOT, env=env, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()
    move = move_of(source, target)
    if move.was_marked():
        move.open_target()
    else:
        with pytest.raises(StoreUnavailable):
            await store_for(target).open()
        async with opened(lambda: store_for(source)) as store:  # it serves
            agent = await store.agent("local", "late")
            assert agent is not None
            await accepted(store, a_turn(agent, "after"))
        await moved(source, target)
    there = contents(target)
    assert {row[1] for row in there["turns"]} >= {row[1] for row in before["turns"]}
    assert there == contents(source)
