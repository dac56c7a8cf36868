"""The routes of the page: its files, which need no key, and the views of a chain, which need the API's key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ...aside.pool import OutOfBoundsError
from ...domain import times
from ...domain.models import JSON, Agent, Turn
from ...engine.engine import Engine
from ...errors import InvalidRequest, NotFound
from ...export import explain, shown, words
from ...wires.asgi import JSONAnswer, RouteDoc, add, is_on, owner_of, whole_number
from ...wires.common import decoded_agent_id
from ...wires.schemas import COUNT, SWITCH, TEXT
from ..keys import Keys
from ..large_turns import TurnRenderer
from . import views
from .overview import AskLogin, Overview, title_of
from .script import joined

STATIC = Path(__file__).parent / "static"
FILES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
}
# Images of conversations that the page shows: pixel formats only, as others can contain programs.
IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
# The most agents in one request for previews.
PREVIEWS = 20
# Only our own files are loaded and run, nothing is sent elsewhere, and no page may frame this one.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Revalidate at each load: a newer proxy has a newer page.
    "Cache-Control": "no-cache",
}
PAGE = 100
# The most bytes of a page's turns in the store: they are in memory at once.
PAGE_BYTES = 64 * 1024 * 1024
# A row has two short texts: a thousand rows are a few hundred KB.
MAX_PAGE = 1000
# The most links in the timeline's overview; older ones are shown at their turns.
NEWEST_REPAIRS = 200


class Ui:
    """The handlers. Create it before the catch-all route of `/v1/chains/` is added."""

    def __init__(self, app: Starlette, engine: Engine, keys: Keys, ask: AskLogin) -> None:
        self._engine = engine
        self._keys = keys
        self._render = TurnRenderer(engine.aside.showing)
        self._overview = Overview(engine, ask)
        # Read once: after an update, a running server still serves the files of its own version.
        self._files = {name: (STATIC / name).read_bytes() for name in FILES}
        if times.in_utc():
            self._files["index.html"] = self._files["index.html"].replace(b"<html ", b'<html data-times="utc" ', 1)
        modules = {path.stem: path.read_text() for path in STATIC.glob("*.js")}
        self._files["main.js"] = joined(modules, "main").encode()
        chain = "/v1/chains/{agent_id}"
        turns = RouteDoc(query={"before": COUNT, "from": COUNT, "with": TEXT, "limit": COUNT})
        page = RouteDoc(media=("text/html",))
        for path, handler, about in (
            ("/ui", self.page, page),
            ("/ui/", self.page, page),
            ("/ui/{name}", self.file, RouteDoc(media=("text/html", "text/css", "text/javascript"))),
            ("/v1/overview", self.overview, RouteDoc(query={"wait": SWITCH})),
            ("/v1/previews", self.previews, RouteDoc(query={"agent": TEXT})),
            (f"{chain}/turns", self.turns, turns),
            (f"{chain}/tree", self.tree, RouteDoc(query={"after": COUNT})),
            (f"{chain}/turns/{{turn_id}}", self.turn, RouteDoc(query={"redact": SWITCH})),
            (f"{chain}/turns/{{turn_id}}/images/{{sha256}}", self.image, RouteDoc(media=tuple(sorted(IMAGES)))),
            (f"{chain}/turns/{{turn_id}}/transcript", self.transcript, None),
            (f"{chain}/turns/{{turn_id}}/seen", self.seen, None),
            (f"{chain}/repairs", self.repairs, None),
        ):
            add(app, "GET", path, handler, about)

    # --- the page

    async def page(self) -> Response:
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        if name not in FILES:
            raise NotFound(f"/ui/{name} does not exist: the page is at /ui")
        return Response(self._files[name], media_type=FILES[name], headers=dict(HEADERS))

    # --- its data

    async def overview(self, request: Request) -> Response:
        """Agents that need attention, running turns, and the costs of the last days; for operators, of all keys.
        `?wait=0`: do not ask the CLI for its login, which may take two seconds."""
        owner, wait = owner_of(request), is_on(request, "wait", default=True)
        return JSONAnswer(await self._overview.of(owner, of_all=self._keys.is_operator(owner), wait=wait))

    async def previews(self, request: Request) -> Response:
        """The newest words of some agents: `?agent=NAME&agent=NAME`, at most 20."""
        names = request.query_params.getlist("agent")
        if len(names) > PREVIEWS:
            raise InvalidRequest(f"{len(names)} agents: ask for {PREVIEWS} at once, at most", param="agent")
        data = []
        for name in names:
            agent = await self._engine.view.agent(owner_of(request), name)
            page = await self._engine.view.page(agent.key, before_seq=None, limit=1) if agent is not None else None
            if agent is not None and page is not None:
                data += [views.newest(agent, turn, await title_of(self._engine.view, agent)) for turn in page.turns]
        return JSONAnswer({"object": "list", "data": data})

    async def turns(self, request: Request) -> Response:
        """A page of turns, newest first: `?before=SEQ&limit=N`; `?from=N`: beginning with the agent's N-th turn;
        `?with=TURN`: the one of those from N, 2 N, … that this turn is on."""
        before = whole_number(request, "before", None)
        newest = whole_number(request, "from", None)
        limit = min(whole_number(request, "limit", PAGE) or PAGE, MAX_PAGE)
        turn_id = request.query_params.get("with")
        agent = await self._agent(request)
        if turn_id is not None:
            place = (await self._engine.view.places(agent.key, [turn_id])).get(turn_id)
            if place is None:
                raise NotFound(f"agent {agent.agent_id!r} has no turn {turn_id!r}")
            newest = -(-place // limit) * limit
        page = await self._engine.view.page(
            agent.key, before_seq=before, limit=limit, newest=newest, most_bytes=PAGE_BYTES
        )
        store = self._engine.view
        budgets = await self._engine.budgets.shown(store, agent.owner, agent.agent_id, time.time())
        return JSONAnswer(views.page(agent, page, await title_of(store, agent), budgets))

    async def tree(self, request: Request) -> Response:
        """The shape of the whole chain: of each turn in the order of acceptance its parent's place, from 1 (0: none),
        and the places of those with repairs. `?after=N`: without the first N."""
        agent = await self._agent(request)
        after = whole_number(request, "after", None) or 0
        tree = await self._engine.view.tree(agent.key, after=after)
        return JSONAnswer({"object": "tree", "after": after, "parents": tree.parents, "marked": tree.marked})

    async def turn(self, request: Request) -> Response:
        """One turn with its links and children. `?redact=0`: with secrets as they are."""
        verbatim = not is_on(request, "redact", default=True)
        agent = await self._agent(request)
        turn = await self._turn(request, agent)
        around = await self._engine.view.page(agent.key, before_seq=turn.seq + 1, limit=1)
        children = [child for child, _ in await self._engine.view.children(turn.id)]
        related = [*children, *([turn.parent_id] if turn.parent_id else [])]
        rendered = await self._render(shown.turn, turn, around.links, verbatim=verbatim)
        return JSONAnswer(
            {
                "turn": rendered,
                "links": [shown.link(link) for link in around.links],
                "told": [one._asdict() for one in words.in_brief(turn, around.links)],
                "number": around.newest,  # this turn's: the page ends at it
                "numbers": await self._engine.view.places(agent.key, related[:MAX_PAGE]),
                "children": children,
                "is_head": agent.head == turn.id,
                "placed": explain.placed(turn),
                "waterfall": views.waterfall(turn, rendered),
            }
        )

    async def image(self, request: Request) -> Response:
        """An image in this turn, by its hash. Only of kinds that a browser draws and that cannot run code."""
        turn = await self._turn(request, await self._agent(request))
        sha256 = request.path_params["sha256"]
        image = await asyncio.to_thread(views.image, turn, sha256)
        if image is None or image[0] not in IMAGES:
            raise NotFound(f"turn {turn.id!r} has no image {sha256[:64]!r} that can be shown", param="sha256")
        return Response(image[1], media_type=image[0])

    async def transcript(self, request: Request) -> Response:
        """The difference between the chain and the transcript at this turn."""
        agent = await self._agent(request)
        comparison = await self._engine.backend.compare(agent, await self._turn(request, agent))
        compared, large = await asyncio.to_thread(views.compared, comparison)
        return await self._rendered(large, views.comparison, compared, len(comparison.records))

    async def seen(self, request: Request) -> Response:
        """The messages that the model was sent in this turn, compared with the chain. Without records `verdict` is
        null."""
        turn = await self._turn(request, await self._agent(request))
        request_seen = await self._engine.backend.request_of(turn)
        if request_seen is None:
            return JSONAnswer({"verdict": None, "forgotten": False, "missing": [], "total": 0, "messages": []})
        newest, large = await asyncio.to_thread(views.newest_sent, request_seen)
        return await self._rendered(large, views.seen, turn.usage, newest, len(request_seen.messages))

    async def _rendered(self, is_large: bool, render: Callable[..., JSON], *arguments: Any) -> Response:
        """The JSON of a view. A large one is made in a process with bounds, any other on a thread."""
        if not is_large:
            return JSONAnswer(await asyncio.to_thread(render, *arguments))
        try:
            return JSONAnswer(await self._render.aside(render, *arguments))
        except OutOfBoundsError as exc:
            raise InvalidRequest(f"this cannot be shown: {exc}") from exc

    async def repairs(self, request: Request) -> Response:
        """The newest links that are not a plain start, newest first."""
        agent = await self._agent(request)
        links = await self._engine.view.repairs(agent.key, limit=NEWEST_REPAIRS)
        numbers = await self._engine.view.places(agent.key, [link.turn_id for link in links if link.turn_id])
        data = [{**shown.link(link), **words.link_in_brief(link)._asdict()} for link in links]
        return JSONAnswer({"object": "list", "data": data, "numbers": numbers})

    async def _agent(self, request: Request) -> Agent:
        agent_id = decoded_agent_id(request.path_params["agent_id"].encode("latin-1"))
        return await self._engine.agent_named(owner_of(request), agent_id)

    async def _turn(self, request: Request, agent: Agent) -> Turn:
        turn_id = request.path_params["turn_id"]
        turn = await self._engine.view.turn(turn_id)
        if turn is None or turn.agent_key != agent.key:
            raise NotFound(f"agent {agent.agent_id!r} has no turn {turn_id!r}", param="turn_id")
        return turn
