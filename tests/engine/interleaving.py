"""Runs a scenario of several proxies on one store in random orders of its steps.

A step is one transaction of the store that deals with deliveries, or something that a client, a wire or a proxy does.
Everything in between is the real code: engines, placement, deliveries, and the statements of `stores.sql`, on one
SQLite database in memory. Each run has a new agent. Time passes only while leases are handed over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.pool import StaticPool

from cli_session_proxy.domain.models import Turn
from cli_session_proxy.domain.searching import Found, Indexed, Search
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.live import Answer
from cli_session_proxy.engine.passing import ORIGIN, VIA
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import AgentState
from cli_session_proxy.stores.sql.database import Database, Urgency, Work
from cli_session_proxy.stores.sql.store import SqlStore
from cli_session_proxy.stores.sql.tables import metadata
from cli_session_proxy.stores.sqlite.file import WRITING, File, driver_of, transaction

from ..memory_backend import MemoryBackend
from ..simulated import FastLoop
from ..talking import request

T = TypeVar("T")

# The store's methods that are steps. Others happen together with the step before them.
STEPS = (
    "arrival", "accept", "begin", "commit", "turn", "set_delivery", "claim", "hand_on", "fail", "requeue",
    "doubt", "pending_deliveries", "followers", "follow", "unfollow",
)  # fmt: skip
# Seconds that pass when nothing else can happen: leases are asked for and handed over meanwhile.
WAIT = 0.06
# After so many waits in a row nothing happens any more.
WAITS = 60

# A lease is handed over within so many.
HANDOVER = 4

# Who does this, within a run.
ACTOR: ContextVar[str | None] = ContextVar("actor", default=None)


class InMemory(Database):
    """Transactions on one connection, each at once. The stores of all proxies share it."""

    name = "memory"

    def __init__(self, loop: FastLoop) -> None:
        self.asked: dict[str, asyncio.Event] = {}
        engine = create_engine("sqlite://", poolclass=StaticPool, paramstyle="named", connect_args={"factory": File})

        def connected(dbapi: Any, _record: object) -> None:
            dbapi.isolation_level = None
            dbapi.create_function("store_clock", 0, lambda: 1e9 + loop.time())

        event.listen(engine, "connect", connected)
        self.conn = engine.connect()
        self.driver = driver_of(self.conn)

    async def open(self, prepare: Work[None]) -> None:
        transaction(self.conn, WRITING, prepare)

    async def close(self) -> None: ...

    def claim(self, name: str) -> None:
        raise NotImplementedError(name)

    async def read(self, work: Work[T], *, quick: bool = False) -> T:
        return work(self.conn)

    async def write(
        self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False, alone: bool = False
    ) -> T:
        (result,) = transaction(self.conn, WRITING, work)
        return result

    def ring(self, conn: Connection, proxy_id: str) -> None:
        if proxy_id in self.asked:
            self.asked[proxy_id].set()


class SteppedStore(SqlStore):
    """A proxy's store, on several hosts. In a run, each of `STEPS` waits until it is chosen."""

    spans_hosts = True

    def __init__(self, database: InMemory, world: World) -> None:
        super().__init__(database)
        self.memory, self.world = database, world

    async def index(self, seconds: float) -> Indexed:
        raise NotImplementedError

    async def search(self, wanted: Search) -> Found:
        raise NotImplementedError

    async def until_asked(self, proxy_id: str, longest: float) -> None:
        asked = self.memory.asked.setdefault(proxy_id, asyncio.Event())
        await asked.wait()
        await asyncio.sleep(WAIT / 4)  # it is asked again while the agent is in use
        if not (await self.asked(proxy_id)).leases:
            asked.clear()

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in STEPS or ACTOR.get() is None:
            return method
        world: World = super().__getattribute__("world")

        async def step(*given: Any, **how: Any) -> Any:
            shown = [world.shown(value) for value in (*given, *how.values())]
            await world.step(f"{name}({', '.join(shown)})")
            return await method(*given, **how)

        return step


@dataclass(eq=False)
class Client:
    """What happened to a client. `has`: the turns whose answer it has."""

    world: World
    name: str
    has: list[str] = field(default_factory=list)
    asked_for: set[str] = field(default_factory=set)  # the turns of all its requests
    began: set[str] = field(default_factory=set)  # those of them that it did not share with an earlier request
    failed: list[str] = field(default_factory=list)
    says: str = ""  # equal for clients whose equal words are one request

    async def ask(
        self, at: int, said: str, *, through: int | None = None, leaves: bool = True, lost: bool = False, **more: Any
    ) -> str | None:
        """Ask proxy `at`, maybe `through` another one that forwards the request, and wait for the answer. Returns its
        turn; None if the client left or was told to send it again. `leaves`: it may leave at any step. `lost`: the line
        between the two proxies may be lost at any step."""
        world = self.world
        await world.step(f"{self.name} asks")
        asked = request(said, agent=world.agent, **more)
        self.says = asked.idempotency_key or self.name
        try:
            if through is None:
                return await self._asked_here(world.engines[at], asked, leaves=leaves)
            return await self._forwarded(world.engines[at], world.engines[through], asked, leaves=leaves, lost=lost)
        except ProxyError as exc:
            self.failed.append(exc.code)
            return None

    async def _asked_here(self, engine: Engine, asked: Any, *, leaves: bool) -> str | None:
        left = self.world.event(f"{self.name} leaves", possible=leaves)
        answer = await engine.submit(asked, left.is_set)
        self._is_answered_by(answer)
        try:
            waiting = self.world.own(_given(answer))
            gone = self.world.own(left.wait())
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not waiting.done():
                waiting.cancel()
                return None
            turn = await waiting
            if await self.world.choose(f"{self.name} has it", *["leaves"] * leaves) or left.is_set():
                return None
            self.has.append(turn.id)
            await self.world.step(f"{self.name} is done")
            answer.acknowledge()
            return turn.id
        finally:
            self.world.over(f"{self.name} leaves")
            answer.leave()

    def _is_answered_by(self, answer: Answer) -> None:
        self.asked_for.add(answer.turn_id)
        if not answer.replayed:
            self.began.add(answer.turn_id)

    async def _forwarded(self, engine: Engine, via: Engine, asked: Any, *, leaves: bool, lost: bool) -> str | None:
        """As `http.relay` does it, whose own tests go over sockets. The client `leaves`, or the line is `lost`, at any
        step; then the forwarding proxy gives up. The other proxy may see that late or never."""
        world, name = self.world, self.name
        closed = asyncio.Event()  # as the other proxy sees it
        accepted: list[bool] = []
        sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def there() -> None:
            ORIGIN.set("forwarded")
            VIA.set(via.instance_id)
            answer: Answer | None = None
            try:
                answer = await engine.submit(asked, closed.is_set)
                self._is_answered_by(answer)
                accepted.append(True)
                waiting, gone = self.world.own(_given(answer)), world.own(closed.wait())
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
                if waiting.done():
                    turn = await waiting
                    await world.step(f"{name} is sent")
                    if not closed.is_set():
                        answer.acknowledge()
                        if not sent.done():
                            sent.set_result(turn.id)
                else:
                    waiting.cancel()
            except ProxyError as exc:
                if not sent.done():
                    sent.set_exception(exc)
            finally:
                if answer is not None:
                    answer.leave()

        async def loses() -> str:
            return await world.choose(f"{name}: its line", *["leaves"] * leaves, *["lost"] * lost, first=False)

        running = world.own(there())
        ends = world.own(loses()) if leaves or lost else None
        await asyncio.wait({sent, *([ends] if ends else [])}, return_when=asyncio.FIRST_COMPLETED)
        if sent.done():
            world.over(f"{name}: its line")
            if ends is not None:
                ends.cancel()
            turn_id = sent.result()
            how = await world.choose(f"{name} has it", *["leaves"] * leaves, *["lost"] * lost)
            if not how:
                self.has.append(turn_id)
            if how == "lost":  # a part of it came, with the id
                await via.note_lost(world.agent_key, engine.instance_id, turn_id, asked.fingerprint)
                self.failed.append("interrupted")
            else:
                if how:  # it asks the other proxy whether that has stored its own part
                    await asyncio.wait({running})
                    await engine.delivery_stored(turn_id)
                if how and asked.call is not None:  # a background turn: it runs on, and the client has no id
                    await via.note_lost(world.agent_key, engine.instance_id, turn_id, asked.fingerprint)
                else:
                    await via.note_arrival(turn_id, arrived=not how)
            return None if how else turn_id
        assert ends is not None
        sent.cancel()
        if ends.result() == "leaves":
            closed.set()
            await asyncio.wait({running})
            await via.note_lost(world.agent_key, engine.instance_id, None, asked.fingerprint)
        else:
            if not accepted:
                closed.set()  # the end of the connection comes with the request
            await via.note_lost(world.agent_key, engine.instance_id, None, asked.fingerprint)
            self.failed.append("interrupted")
        return None


async def _given(answer: Answer) -> Turn:
    """What the client is given: of a background turn, its id."""
    return answer.accepted if answer.accepted.in_background else await answer.turn()


class Stored(NamedTuple):
    """A stored turn."""

    id: str
    status: str
    delivery: str
    instance: str | None
    parent_id: str | None
    input: str


_TURNS = "SELECT id, status, delivery, instance, parent_id, input FROM turns WHERE agent_key = ? ORDER BY seq"
_HEAD = "SELECT head FROM agents WHERE key = ?"

# What happens in a run: who does what, at once.
Actors = Iterable[tuple[str, Coroutine[Any, Any, Any]]]


@dataclass(eq=False)
class _Waiting:
    """A step that has not been taken."""

    options: tuple[str, ...]
    chosen: asyncio.Future[str]


class World:
    """The proxies, and one run at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self.loop = FastLoop()
        self.memory = InMemory(self.loop)
        self.engines: list[Engine] = []
        self.runs = 0
        for n in range(count):
            var = folder / str(n)
            # Long, as only steps let a proxy be silent.
            settings = Settings(
                var=var, claude_config_dir=var, disconnect_grace=1e6, lease=1e6, turn_timeout=1e9, idle_timeout=1e9
            )
            self.engines.append(Engine(settings, SteppedStore(self.memory, self), MemoryBackend()))
        self.agent, self.agent_key = "", 0
        self._draining = False
        self._places: dict[str, str] = {}
        self._silent: set[int] = set()
        self.clients: dict[str, Client] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._actors: list[asyncio.Task[Any]] = []
        self._numbers: Counter[str] = Counter()

    @contextmanager
    def started(self) -> Iterator[World]:
        asyncio.set_event_loop(self.loop)
        for engine in self.engines:
            self.loop.run_until_complete(engine.start())
        try:
            yield self
        finally:
            for engine in self.engines:
                self.loop.run_until_complete(engine.stop())
            self.memory.conn.close()
            self.memory.conn.engine.dispose()  # its pool keeps the driver's connection
            self.loop.close()
            asyncio.set_event_loop(None)

    # --- for actors

    def client(self, name: str) -> Client:
        return self.clients.setdefault(name, Client(self, name))

    async def step(self, what: str) -> None:
        await self.choose(what)

    async def choose(self, what: str, *others: str, first: bool = True) -> str:
        """Wait until this step is chosen: "", or one of the others. Without `first` only one of these."""
        if self._draining:
            return ""
        key = f"{ACTOR.get()}: {what}"
        self._numbers[key] += 1
        key = f"{key} #{self._numbers[key]}"
        waiting = _Waiting((*[""] * first, *others), self.loop.create_future())
        self._waiting[key] = waiting
        try:
            return await waiting.chosen
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]

    def event(self, what: str, *, possible: bool = True) -> asyncio.Event:
        """An event that may happen at any step until it is `over`."""
        happened = asyncio.Event()

        async def wait() -> None:
            await self.choose(what, what, first=False)
            happened.set()

        if possible:
            self._tasks.append(self.loop.create_task(wait(), name=what))
        return happened

    def over(self, what: str) -> None:
        for task in self._tasks:
            if task.get_name() == what:
                task.cancel()
        for key in [key for key in self._waiting if f": {what} #" in key]:
            self._waiting.pop(key).chosen.cancel()

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(work)
        self._tasks.append(task)
        return task

    async def silent(self, at: int) -> None:
        """The heartbeat of this proxy expires: others take it for one that has ended. It may go on at any step."""
        await self.step(f"proxy {at} is silent")
        self._silent.add(at)
        self.memory.driver.execute("UPDATE proxies SET until = 0 WHERE id = ?", (self.engines[at].instance_id,))

    # --- what it looks like

    def shown(self, value: object) -> str:
        if isinstance(value, Turn | Stored):
            return f"{self.place(value.id)} {value.status} {value.delivery} {self.proxy(value.instance)}"
        if isinstance(value, AgentState):
            return "state" if value.parent is None else self.shown(value.parent)
        if isinstance(value, list | tuple):
            return "[" + " ".join(map(self.shown, value)) + "]"
        if isinstance(value, str):
            return self.place(value)
        return str(value) if isinstance(value, bool | None) else ""

    def proxy(self, instance: str | None) -> str:
        ids = [engine.instance_id for engine in self.engines]
        return f"P{ids.index(instance)}" if instance in ids else str(instance)

    def place(self, text: str) -> str:
        if text == self.agent:
            return "agent"
        if text.startswith("turn_"):
            if text not in self._places:
                self._places = {row.id: f"T{n}" for n, row in enumerate(self.turns())}
            return self._places.get(text, "new")
        known = self.proxy(text)
        return known if known != text or len(text) < 20 else "new"

    def turns(self) -> list[Stored]:
        """This run's turns, in the order of acceptance."""
        rows = self.memory.driver.execute(_TURNS, (self.agent_key,)).fetchall()
        return [Stored(*row) for row in rows]

    def head(self) -> str | None:
        head: str | None = self.memory.driver.execute(_HEAD, (self.agent_key,)).fetchone()[0]
        return head

    def path(self) -> list[Stored]:
        """The path to the head, as the next turn continues it."""
        turns = {turn.id: turn for turn in self.turns()}
        at, path = self.head(), list[Stored]()
        while at is not None:
            if path or turns[at].delivery != "undelivered":
                path.insert(0, turns[at])
            at = turns[at].parent_id
        return path

    # --- runs

    @property
    def ended(self) -> bool:
        """Nobody waits, and no turn waits or runs."""
        return all(task.done() for task in self._tasks) and not any(engine._live for engine in self.engines)

    @property
    def silences(self) -> bool:
        """Whether a proxy was silent."""
        return bool(self._silent)

    def _settle(self) -> None:
        """Everything goes as far as it goes without a step. A lease is handed over in a few waits, or not before the
        next step."""
        waits = 0
        while True:
            self._turn_loop()
            polls = any(
                live._doing[0] == "lease" or live.elsewhere for engine in self.engines for live in engine._live.values()
            )
            most = HANDOVER if self._waiting else WAITS
            if waits >= most or self.ended or (self._waiting and not polls):
                return
            waits += 1
            self.loop.run_until_complete(asyncio.sleep(WAIT))

    def _turn_loop(self) -> None:
        """Run all that is ready."""
        ready: Any = self.loop._ready  # type: ignore[attr-defined]
        while ready:
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def _begin(self, scenario: Callable[[World], Actors]) -> None:
        self.runs += 1
        self.agent = f"agent{self.runs}"
        store = self.engines[0].store
        made = SqlStore.ensure_agent(store, "local", self.agent, self.agent, named=True, now=0.0)  # type: ignore[arg-type]
        self.agent_key = _at_once(made).key
        self.clients = {}
        self._waiting, self._tasks, self._actors = {}, [], []
        self._numbers.clear()
        self._places, self._silent = {}, set()
        self.memory.driver.execute("UPDATE proxies SET until = 1e12")
        for name, work in scenario(self):
            ACTOR.set(name)
            self._actors.append(self.own(work))
            ACTOR.set(None)
        self._settle()

    def _options(self) -> list[tuple[str, str]]:
        return [(key, option) for key, waiting in sorted(self._waiting.items()) for option in waiting.options]

    def _take(self, key: str, option: str) -> None:
        waiting = self._waiting.pop(key)
        waiting.chosen.set_result(option)
        self._settle()

    def _forget(self) -> None:
        """Forget the run: whatever is under way is cancelled."""
        self._draining = True
        while True:
            tasks = [*self._tasks, *(task for engine in self.engines for task in engine._tasks._work)]
            left = [task for task in tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self._turn_loop()
        self._waiting.clear()
        self._draining = False
        for engine in self.engines:
            engine._ownership._held.clear()
        for table in reversed(metadata.sorted_tables):
            if table.name not in ("meta", "proxies"):
                self.memory.driver.execute(f"DELETE FROM {table.name}")
        self.loop.run_until_complete(asyncio.sleep(1.0))  # until no proxy looks for a lease any more

    def explore(
        self,
        scenario: Callable[[World], Actors],
        check: Callable[[World], None],
        runs: int,
        draw: Callable[[int], int],
    ) -> None:
        """Run the scenario so many times, and check the end of each run. `draw`: a number below this one, by which the
        next step is chosen."""
        for _ in range(runs):
            self._begin(scenario)
            taken: list[str] = []
            try:
                while options := self._options():
                    key, option = options[draw(len(options))]
                    taken.append(f"{key} {option}")
                    self._take(key, option)
                for task in self._actors:
                    if task.done():
                        task.result()
                check(self)
            except BaseException as exc:
                exc.add_note("\n".join([f"in run {self.runs}:", *taken, "", *map(self.shown, self.turns())]))
                raise
            finally:
                self._forget()


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that waits for nothing."""
    actor = ACTOR.set(None)
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        ACTOR.reset(actor)
    raise AssertionError("it waited")
