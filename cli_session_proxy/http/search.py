"""`GET /v1/search`: all that the owner's agents were asked, answered and did, by words; agents and turns by a part of
an id."""

from __future__ import annotations

import math
import time
from typing import cast, get_args

from starlette.applications import Starlette
from starlette.requests import Request

from ..domain.models import JSON, Status
from ..domain.searching import MAX_TEXT, Search, moment
from ..engine.engine import Engine
from ..errors import InvalidRequest
from ..export import lists
from ..wires.asgi import RouteDoc, add, is_on, owner_of, whole_number
from ..wires.schemas import COUNT, SWITCH, TEXT

# Seconds for indexing new turns before a search; the answer says up to which time turns are indexed.
INDEXING = 1.0
HITS = 20
MAX_HITS = 100
AMOUNT: JSON = {"type": "number", "minimum": 0}
QUERY: dict[str, JSON] = {
    "q": TEXT, "since": TEXT, "until": TEXT, "model": TEXT, "status": {"enum": list(get_args(Status))},
    "repaired": SWITCH, "min_cost": AMOUNT, "limit": COUNT,
}  # fmt: skip


def add_search(app: Starlette, engine: Engine) -> None:
    async def search(request: Request) -> JSON:
        """`?q=` words, all of which a turn has, or a part of an agent's name or of a session's or turn's id; with
        `since`, `until` (30m, 12h, 7d or a date), `model`, `status`, `repaired=1`, `min_cost`, `limit`."""
        given = request.query_params
        text, status = given.get("q", ""), given.get("status")
        if len(text) > MAX_TEXT:
            raise InvalidRequest(f"q has {len(text)} characters: at most {MAX_TEXT}", param="q")
        if status is not None and status not in get_args(Status):
            raise InvalidRequest(f"status must be one of {', '.join(get_args(Status))}", param="status")
        try:
            min_cost = float(given["min_cost"]) if "min_cost" in given else None
        except ValueError:
            min_cost = math.nan
        if min_cost is not None and not 0 <= min_cost < math.inf:
            raise InvalidRequest("min_cost must be an amount in dollars, from 0", param="min_cost")
        query = Search(
            text,
            owner_of(request),
            since=_time(request, "since"),
            until=_time(request, "until"),
            model=given.get("model"),
            status=cast(Status | None, status),
            repaired=is_on(request, "repaired", default=False),
            min_cost=min_cost,
            limit=min(whole_number(request, "limit", HITS) or HITS, MAX_HITS),
        )
        indexed = await engine.store.index(INDEXING)
        return lists.found_json(query, await engine.store.search(query), indexed)

    add(app, "GET", "/v1/search", search, RouteDoc(query=QUERY))


def _time(request: Request, name: str) -> float | None:
    given = request.query_params.get(name)
    try:
        return None if given is None else moment(given, time.time())
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} must be 30m, 12h, 7d, or a date such as 2026-11-20", param=name) from None
