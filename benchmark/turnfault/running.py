"""The rows of the benchmark on one target, one after another, each in a conversation of its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import TargetError
from .faults import Lab, NotHereError
from .provider.seen import Seen
from .provider.upstream import Upstream
from .rows import ROWS, Row
from .score import Score, messages_of
from .talk import RequestRefused, shortened
from .targets.base import Target

# Seconds that one row may take: six requests at once, each of them slow.
LIMIT = 300.0
# Turns that are acknowledged before something breaks.
TOLD = (2, 5)
# Bytes of one row's trace; what is beyond is left out, and told as such.
TRACE = 64 * 1024

Trace = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RowResult:
    """`score` None: the row was left out, and `why` says why. `calls`: requests that reached the model. `trace`: what
    the client saw and what broke, in order, and then what the model was shown."""

    row: Row
    score: Score | None
    calls: int = 0
    seconds: float = 0.0
    why: str = ""
    trace: Trace = field(default_factory=list, repr=False)


def provider(port: int = 0) -> Upstream:
    """Whose answers are known again, and repeat nothing of what they answer."""

    def answer(texts: Sequence[tuple[str, str]]) -> str:
        newest = texts[-1][1] if texts else ""
        return f"Noted as {hashlib.sha256(newest.encode('utf-8', 'replace')).hexdigest()[:16]}."

    return Upstream(port=port, answer=answer, keep=200_000)


async def run(
    target: Target,
    upstream: Upstream,
    tell: Callable[[RowResult], None],
    rows: Sequence[Row] = ROWS,
    seed: int = 0,
) -> list[RowResult]:
    """In the order of `rows`; they run in the seed's. The target is up, and is up again afterwards. Where it has no
    conversations by id, all rows send the history.

    The seed decides the order of the rows, how many turns are told before the fault, the facts, and where in an answer
    the fault happens.
    """
    named = secrets.token_hex(4)
    results: dict[str, RowResult] = {}
    for row in random.Random(seed).sample(rows, len(rows)):
        result = await _measured(row, f"{row.id}-{seed}-{named}", target, upstream, random.Random(f"{seed} {row.id}"))
        results[row.id] = result
        tell(result)
        upstream.heal()
    return [results[row.id] for row in rows]


async def _measured(row: Row, name: str, target: Target, upstream: Upstream, dice: random.Random) -> RowResult:
    by_id = row.by_id and "id" in target.surfaces
    missing = row.needs - target.surfaces
    if not row.by_id and "history" not in target.surfaces:
        missing |= {"history"}
    if missing:
        return RowResult(row, None, why=f"it has no {' and '.join(sorted(missing))}")
    began = time.monotonic()
    upstream.forget()
    talk = target.talk(name, by_id=by_id)
    talk.dice = dice
    lab = Lab(name, target, upstream, talk)
    try:
        async with asyncio.timeout(LIMIT):
            for _ in range(dice.randint(*TOLD)):
                await talk.tell()
            talk.sound = talk.before
            await row.breaks(lab)
            found = await talk.probe()
    except NotHereError as exc:
        return RowResult(row, None, why=str(exc))
    except RequestRefused as exc:
        found = Score(len(talk.facts), refused=exc.why)
    except TimeoutError:
        found = Score(len(talk.facts), refused="no end")
    except TargetError:
        found = Score(len(talk.facts), refused="it does not start again")
    seconds, requests = time.monotonic() - began, upstream.requests
    if found.refused is not None:
        # A row that ended half-way leaves a target that takes the next one.
        if "process" in target.surfaces:
            await target.down()
        await target.up()
    return RowResult(row, found, len(requests), seconds, trace=bounded([*talk.log, *shown(requests)]))


def shown(requests: Sequence[Seen]) -> Trace:
    """What the model was shown. Of each request, the messages that the one before it did not begin with."""
    told: Trace = []
    before: list[tuple[str, str]] = []
    for seen in requests:
        messages = messages_of(seen)
        same = next(
            (at for at, pair in enumerate(zip(messages, before, strict=False)) if pair[0] != pair[1]),
            min(len(messages), len(before)),
        )
        new = [[role, shortened(text)] for role, text in messages[same:]]
        told.append({"event": "request", "outcome": seen.outcome, "as_before": same, "messages": new})
        before = messages
    return told


def bounded(trace: Trace) -> Trace:
    size = 0
    for at, event in enumerate(trace):
        size += len(json.dumps(event, ensure_ascii=False))
        if size > TRACE:
            return [*trace[:at], {"event": "left out", "count": len(trace) - at}]
    return trace
