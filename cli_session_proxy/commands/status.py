"""`status`: does it work, what does it cost, must somebody do something. By the running server, else by the store."""

from __future__ import annotations

import contextlib
import time

import httpx

from ..backends.claude.process import capability
from ..domain import times
from ..engine.plan import stored
from ..errors import ClaudeUnavailable, UpstreamError
from ..export import explain, status
from ..export.status import WEEK, ProxyStatus
from ..export.sums import TURNS
from ..http.served import Served, served_at
from ..sandbox import LOCAL_OWNER
from ..settings import Settings
from .asking import ANSWER_TIMEOUT, alive, client_of, key_of
from .login import login_of
from .stored import opened

STOPPED = "no server runs on {var}: start it with `cli-session-proxy serve`"


async def look(settings: Settings, owner: str = LOCAL_OWNER) -> tuple[ProxyStatus, Served | None]:
    """And the server that answers on this store, where one does. Raises `ProxyError`."""
    served = served_at(settings.var)
    if served is not None and await alive(served):
        async with client_of(served, ANSWER_TIMEOUT, key_of(settings, owner)) as http:
            try:
                return ProxyStatus.from_json(
                    (await http.get("/v1/overview")).raise_for_status().json()["status"]
                ), served
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
                raise UpstreamError(f"{served} (from serve.json in --var) does not answer like this version") from exc
    now = time.time()
    since = times.begins(times.days(now, WEEK)[0])
    async with opened(settings, may_be_new=True) as store:
        facts = [] if store is None else await store.facts(None, since=since, limit=TURNS)
        forgotten = [] if store is None else await store.forgotten(None, since)
        plan = None if store is None else await stored(store)
    today, week = status.costs(facts, now, forgotten)
    known = None
    login = await login_of(settings)
    problem = login.advice or STOPPED.format(var=settings.var)
    with contextlib.suppress(ClaudeUnavailable):  # which `problem` says
        known = capability.known(capability.find(settings))
    cli = None if known is None else f"Claude CLI {known[0].version}"
    return ProxyStatus(
        problem, cli, 0, 0, today, week, None, plan and plan.current(now), login=explain.login(login.kind)
    ), None
