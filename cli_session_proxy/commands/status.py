"""`status`: does it work, what does it cost, must somebody act. From the running server, else from the store."""

from __future__ import annotations

import contextlib
import json
import time
from http.client import HTTPException

from ..domain import times
from ..errors import ClaudeUnavailable, UpstreamError
from ..export import status
from ..export.status import WEEK, ProxyStatus
from ..http.served import Served, served_at
from ..sandbox import LOCAL_OWNER
from ..settings import Settings
from .asking import ANSWER_TIMEOUT, alive, get_from, key_of

STOPPED = "no server runs on {var}: start it with `cli-session-proxy serve`"


async def look(settings: Settings, owner: str = LOCAL_OWNER) -> tuple[ProxyStatus, Served | None]:
    """The status, and the server that runs on this store, if any. Raises `ProxyError`."""
    served = served_at(settings.var)
    if served is not None and await alive(served):
        try:
            _, _, body = await get_from(served, "/v1/overview", key_of(settings, owner), ANSWER_TIMEOUT)
            return ProxyStatus.from_json(json.loads(body)["status"]), served
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as exc:
            raise UpstreamError(f"{served} (from serve.json in --var) does not answer like this version") from exc
    return await _without_server(settings), None


async def _without_server(settings: Settings) -> ProxyStatus:
    """The status as the store and the CLI on this machine tell it."""
    # Imported here: with a server none of these is needed, and they take half a second.
    from ..backends.claude.process import capability, environment, observed  # noqa: PLC0415
    from ..engine.plan import stored  # noqa: PLC0415
    from ..export import explain  # noqa: PLC0415
    from ..export.lists import TURNS  # noqa: PLC0415
    from ..selfcheck.service import recorded  # noqa: PLC0415
    from .prerequisites import login_of  # noqa: PLC0415
    from .stored import opened  # noqa: PLC0415

    now = time.time()
    since = times.begins(times.days(now, WEEK)[0])
    async with opened(settings, may_be_new=True) as store:
        facts = [] if store is None else await store.facts(None, since=since, limit=TURNS)
        forgotten = [] if store is None else await store.forgotten(None, since)
        plan = None if store is None else await stored(store)
        findings = [] if store is None else await store.findings()
    today, week = status.costs(facts, now, forgotten)
    cli = None
    login = await login_of(settings)
    problem = login.advice or STOPPED.format(var=settings.var)
    with contextlib.suppress(ClaudeUnavailable):  # reported as `problem`
        claude = capability.find(settings)
        known = await capability.version(claude, environment.common(settings, environment.config_dir(settings)))
        if known is not None:
            seen = recorded(settings, findings, claude, known[0])
            cli = explain.program(observed.program(known[0], str(claude), known[0], seen, known[1]))
    plan = plan and plan.current(now)
    return ProxyStatus(problem, cli, 0, 0, today, week, None, plan, login=explain.login(login.kind))
