"""Scenarios of long chains: what a turn costs at their end, and a dump of the whole."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli_session_proxy.domain import lineage
from cli_session_proxy.domain.models import Link, Message, Placed, Record, Session, Turn, Usage
from cli_session_proxy.sandbox import make_private
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.base import ChainPart, NewChain, WholeTurn

from . import machine
from .contenders import SYSTEM, BareCLI, Contender, body
from .figures import figure
from .plan import Bench, Row
from .servers import HTTPServer
from .turns import SETTLE

FORMATS = ("json", "markdown", "mermaid", "html")
_WORDS = "the quick brown fox jumps over the lazy dog, and "


@dataclass
class _Chain:
    """One length, its contenders, and what was measured: seconds, and of the proxy CPU seconds.

    The proxy's share of a turn is taken within that turn: the difference of two turns of 90 ms is mostly their noise.
    """

    length: int
    bare: BareCLI
    spawned: BareCLI
    ours: list[float] = field(default_factory=list)
    in_cli: list[float] = field(default_factory=list)  # of ours: from before the frame is sent to the result
    floor: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        for contender, some in (("proxy", self.ours), (self.bare.name, self.floor), (self.spawned.name, self.cold)):
            yield Row("turn at the end of a chain", contender, "ms", figure(some, 1000), self.length)
        share = [ours - in_cli for ours, in_cli in zip(self.ours, self.in_cli, strict=True)]
        yield Row("the proxy's share of it", "proxy", "ms", figure(share, 1000), self.length)
        yield Row("the proxy's CPU for it", "proxy", "ms", figure(self.cpu, 1000), self.length)


async def long_chains(bench: Bench) -> list[Row]:
    """A warm turn at the end of chains of several lengths; all contenders go on with the same transcript.

    The proxy gets the chain as a client's history, once; the transcript that it wrote is what the bare CLI resumes.
    Lengths take turns too: their ratio is what is asked for.
    """
    chains: list[_Chain] = []
    proxy = await bench.proxy("chains-proxy")
    try:
        for length in bench.plan.lengths:
            transcript = await _filled(proxy, bench.place.folder / "chains-proxy", length)
            warm, cold = (_copied(bench, transcript, length, warm=warm) for warm in (True, False))
            chains.append(_Chain(length, warm, cold))
        order = list(chains)
        for n in range(bench.plan.chain_turns + 3):
            order = order[1:] + order[:1]
            for chain in order:
                await _round(proxy, chain, n)
        for chain in chains:
            # What the CLI took for each of the proxy's timed turns, as the proxy's own dump tells.
            agent = _agent(chain.length)
            answer = await proxy.connections.get(agent, f"/v1/chains/{agent}")
            steps = [turn["timings"] for turn in json.loads(answer.body)["turns"][-len(chain.ours) :]]
            chain.in_cli += [(at["result"] - at["session_ready"]) / 1000 for at in steps]
            turns = range(max(1, bench.plan.spawns // 4))
            chain.cold += [(await chain.spawned.turn("a", f"more {n}")).whole for n in turns]
    finally:
        await asyncio.gather(proxy.close(), *(cli.close() for chain in chains for cli in (chain.bare, chain.spawned)))
    return [row for chain in chains for row in chain.rows()]


async def _round(proxy: HTTPServer, chain: _Chain, n: int) -> None:
    """A turn of each, the first one alternating; the first three rounds warm up."""
    asked: list[tuple[Contender, str, list[float]]] = [
        (proxy, _agent(chain.length), chain.ours),
        (chain.bare, "a", chain.floor),
    ]
    for contender, agent, seconds in asked if n % 2 else reversed(asked):
        before = proxy.own_cpu_seconds()
        timing = await contender.turn(agent, f"more {n}", stream=False)
        await asyncio.sleep(SETTLE)
        if n < 3:
            continue
        seconds.append(timing.whole)
        if contender is proxy:
            chain.cpu.append(proxy.own_cpu_seconds() - before)


def _agent(length: int) -> str:
    return f"chain-{length}"


async def _filled(proxy: HTTPServer, folder: Path, length: int) -> Path:
    """A chain of so many turns, and a copy of its transcript."""
    before: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for n in range(length - 1):
        before.append({"role": "user", "content": f"question {n}: {_WORDS * 2}"})
        before.append({"role": "assistant", "content": f"answer {n}: {_WORDS * 4}"})
    agent = _agent(length)
    answer = await proxy.connections.post(agent, proxy.path(agent), body("go on", stream=False, before=before))
    session = answer.headers["x-session-id"]
    (found,) = (folder / "config" / "projects").glob(f"*/{session}.jsonl")
    records = sum(1 for row in found.read_text().splitlines() if '"role":"assistant"' in row)
    assert records >= length, f"{records} answers in a chain of {length}"
    return found


def _copied(bench: Bench, transcript: Path, length: int, *, warm: bool) -> BareCLI:
    """A bare CLI whose agent `a` goes on with a copy of this transcript."""
    place = bench.place.beside(f"chains-{'warm' if warm else 'cold'}-{length}")
    place.folder.mkdir()
    copy = place.folder / transcript.name
    shutil.copy(transcript, copy)
    return BareCLI(place, warm=warm, sessions={"a": str(copy)})


async def dumps(bench: Bench) -> list[Row]:
    """A long chain out of a running server in every format: the clock, the first byte, memory above idle."""
    folder = bench.place.folder / "dumps"
    await store_chain(folder / "var", bench.plan.dump_turns)
    clock: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    proxy = await bench.proxy("dumps")
    try:
        await proxy.turn("short", "hello")  # whatever is done once is done
        idle = machine.resident_mb(proxy.process.pid)
        for _ in range(bench.plan.dumps):
            for name in FORMATS:
                machine.forget_peak(proxy.process.pid)
                answer = await proxy.connections.get("a", f"/v1/chains/long?format={name}", keep=False)
                clock.setdefault(name, []).append(answer.timing.whole)
                first.setdefault(name, []).append(answer.timing.first)
                memory.setdefault(name, []).append(machine.peak_mb(proxy.process.pid) - idle)
    finally:
        await proxy.close()
    return [
        row
        for name in FORMATS
        for row in (
            Row("dump", name, "s", figure(clock[name])),
            Row("dump, first byte", name, "s", figure(first[name])),
            Row("dump, memory above idle", name, "MB", figure(memory[name])),
        )
    ]


async def store_chain(var: Path, length: int) -> None:
    """A chain in a store as turns of a server leave it there."""
    make_private(var)
    store = store_for(Settings(var=var))
    await store.open()
    try:
        at = time.time() - length
        last: list[str | None] = [None]

        def parts() -> Iterator[ChainPart]:
            for part in _parts(length, at):
                if isinstance(part, WholeTurn):
                    last[0] = part.turn.id
                yield part

        new = NewChain("local", "long", "long", named=True, created_at=at, now=time.time(), head=lambda: last[0])
        await store.import_chain(new, parts())
    finally:
        await store.close()


def _parts(length: int, at: float) -> Iterator[ChainPart]:
    session, parent, path_hash = str(uuid.uuid4()), None, None
    for n in range(length):
        asked = Message.user(f"question {n}: {_WORDS * 3}")
        said = {"type": "text", "text": f"answer {n}: {_WORDS * 6}"}
        path_hash = lineage.path_hash(path_hash, (asked,), (said,))
        frame = str(uuid.uuid4())
        now = at + n
        turn = Turn(
            f"turn_{uuid.uuid4().hex}", 0, 0, parent, "completed", "sonnet", (asked,), now,
            output=(said,), stop_reason="end_turn", session_id=session, continuity="warm" if n else "started",
            placed=Placed("head", messages=1, matched=0, imported=0, delta=True),
            usage=Usage(10, 60, 1000, 60), cost_usd=0.0012,
            attempts=({"attempt": 1, "frame_uuid": frame, "session_id": session, "continuity": "warm"},),
            timings={"queued": 0.4, "session_ready": 1.2, "sent": 1.9, "first_block": 21.0, "result": 25.4,
                     "committed": 27.1},
            delivery="delivered", fingerprint=uuid.uuid4().hex, frame_uuid=frame, path_hash=path_hash, depth=n + 1,
            started_at=now, finished_at=now + 0.03,
        )  # fmt: skip
        parent = turn.id
        line = f'{{"type":"user","uuid":"{frame}","message":{{"role":"user","content":"question {n}"}}}}'
        yield WholeTurn(turn, (Record(line, frame),))
    yield Session(session, 0, parent, f"{session}.jsonl", "2.1.329", at)
    yield Link(None, session, None, "started", {}, at)
