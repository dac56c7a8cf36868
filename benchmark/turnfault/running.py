"""The rows of the benchmark on one target, one after another, each in a conversation of its own."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .provider.upstream import Upstream
from .rows import ROWS, TOLD, Lab, NotHereError, Row
from .score import Score
from .talk import RequestRefused
from .targets import Target

# Seconds that one row may take: six requests at once, each of them slow.
LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class RowResult:
    """`score` None: the row was left out, and `why` says why. `calls`: requests that reached the model."""

    row: Row
    score: Score | None
    calls: int = 0
    seconds: float = 0.0
    why: str = ""


def provider(port: int = 0) -> Upstream:
    """Whose answers are known again, and repeat nothing of what they answer."""

    def answer(texts: Sequence[tuple[str, str]]) -> str:
        newest = texts[-1][1] if texts else ""
        return f"Noted as {hashlib.sha256(newest.encode('utf-8', 'replace')).hexdigest()[:16]}."

    return Upstream(port=port, answer=answer, keep=200_000)


async def run(
    target: Target, upstream: Upstream, tell: Callable[[RowResult], None], rows: Sequence[Row] = ROWS
) -> list[RowResult]:
    """The target is up, and is up again afterwards. Where it has no conversations by id, all rows send the history."""
    named = secrets.token_hex(4)
    results = []
    for number, row in enumerate(rows):
        result = await _measured(row, f"bench-{named}-{number}", target, upstream)
        results.append(result)
        tell(result)
        upstream.heal()
    return results


async def _measured(row: Row, name: str, target: Target, upstream: Upstream) -> RowResult:
    by_id = row.by_id and "id" in target.surfaces
    missing = row.needs - target.surfaces
    if not row.by_id and "history" not in target.surfaces:
        missing |= {"history"}
    if missing:
        return RowResult(row, None, why=f"it has no {' and '.join(sorted(missing))}")
    began, calls = time.monotonic(), len(upstream.requests)
    talk = target.talk(name, by_id=by_id)
    lab = Lab(name, target, upstream, talk)
    try:
        async with asyncio.timeout(LIMIT):
            for _ in range(TOLD):
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
    if found.refused is not None:
        # A row that ended half-way leaves a target that takes the next one.
        if "process" in target.surfaces:
            await target.down()
        await target.up()
    return RowResult(row, found, len(upstream.requests) - calls, time.monotonic() - began)
