"""The routes of the page: its files, which anybody may load, and the views of a chain, which need the API's key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import aiofiles
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...domain.models import Agent, Turn
from ...engine.engine import Engine
from ...errors import NotFound
from ...export import shown
from ...wires.asgi import About, add, is_on, owner_of, whole_number
from ...wires.common import decoded_agent_id
from ...wires.schemas import COUNT, SWITCH
from ..large_turns import Teller
from . import views

STATIC = Path(__file__).parent / "static"
FILES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "chains.js": "text/javascript; charset=utf-8",
    "chain.js": "text/javascript; charset=utf-8",
    "graph.js": "text/javascript; charset=utf-8",
    "turn.js": "text/javascript; charset=utf-8",
}
# Nothing but our own files is loaded or run, nothing is sent elsewhere, and no page may frame this one.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Asked again at each load: a newer proxy brings a newer page.
    "Cache-Control": "no-cache",
}
PAGE = 100
# A row of a page is two short texts: a thousand of them are a few hundred KB.
MAX_PAGE = 1000
# Links of the timeline's overview; older ones stand at their turns.
NEWEST_REPAIRS = 200


class Ui:
    """The handlers. `add_to` before the catch-all of `/v1/chains/`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tell = Teller(engine.aside.showing)

    def add_to(self, app: Starlette) -> None:
        chain = "/v1/chains/{agent_id}"
        page = About(media=("text/html",))
        for path, handler, about in (
            ("/ui", self.page, page),
            ("/ui/", self.page, page),
            ("/ui/{name}", self.file, About(media=("text/html", "text/css", "text/javascript"))),
            (f"{chain}/turns", self.turns, About(query={"before": COUNT, "limit": COUNT})),
            (f"{chain}/turns/{{turn_id}}", self.turn, About(query={"redact": SWITCH})),
            (f"{chain}/turns/{{turn_id}}/transcript", self.transcript, None),
            (f"{chain}/repairs", self.repairs, None),
        ):
            add(app, "GET", path, handler, about)

    # the page itself

    async def page(self) -> Response:
        return await _file("index.html")

    async def file(self, name: str) -> Response:
        if name not in FILES:
            raise NotFound(f"/ui/{name} does not exist: the page is at /ui")
        return await _file(name)

    # what it shows

    async def turns(self, request: Request) -> Response:
        """A page of turns, newest first: `?before=SEQ&limit=N`."""
        before = whole_number(request, "before", None)
        limit = whole_number(request, "limit", PAGE) or PAGE
        agent = await self._agent(request)
        page = await self._engine.store.page(agent.key, before_seq=before, limit=min(limit, MAX_PAGE))
        return JSONResponse(views.page(agent, page))

    async def turn(self, request: Request) -> Response:
        """`?redact=0` shows what was said as it is."""
        verbatim = not is_on(request, "redact", default=True)
        agent = await self._agent(request)
        turn = await self._turn(request, agent)
        around = await self._engine.store.page(agent.key, before_seq=turn.seq + 1, limit=1)
        children = await self._engine.store.children(turn.id)
        return JSONResponse(
            {
                "turn": await self._tell(turn, around.links, verbatim=verbatim),
                "links": [shown.link(link) for link in around.links],
                "number": around.newest,
                "children": [child.id for child in children],
                "is_head": agent.head == turn.id,
            }
        )

    async def transcript(self, request: Request) -> Response:
        """The difference between the chain and the transcript at this turn."""
        agent = await self._agent(request)
        compared = await self._engine.backend.compare(agent, await self._turn(request, agent))
        return JSONResponse(await asyncio.to_thread(views.comparison, compared))

    async def repairs(self, request: Request) -> Response:
        """The newest links that are not a plain start, newest first."""
        agent = await self._agent(request)
        links = await self._engine.store.repairs(agent.key, limit=NEWEST_REPAIRS)
        return JSONResponse({"object": "list", "data": [shown.link(link) for link in links]})

    async def _agent(self, request: Request) -> Agent:
        agent_id = decoded_agent_id(request.path_params["agent_id"].encode("latin-1"))
        agent = await self._engine.store.agent(owner_of(request), agent_id)
        if agent is None:
            raise NotFound(f"there is no agent {agent_id!r}: GET /v1/chains lists those there are", param="agent_id")
        return agent

    async def _turn(self, request: Request, agent: Agent) -> Turn:
        turn_id = request.path_params["turn_id"]
        turn = await self._engine.store.turn(turn_id)
        if turn is None or turn.agent_key != agent.key:
            raise NotFound(f"agent {agent.agent_id!r} has no turn {turn_id!r}", param="turn_id")
        return turn


async def _file(name: str) -> Response:
    async with aiofiles.open(STATIC / name, "rb") as file:
        return Response(await file.read(), media_type=FILES[name], headers=dict(HEADERS))
