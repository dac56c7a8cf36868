"""The routes that belong to no wire: models, chains and their dumps, approvals, health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from ..domain.approvals import DECISIONS, LONGEST_WORD, OUTCOMES, Verdict
from ..domain.models import JSON, Agent
from ..engine.committing import CommitOrder
from ..engine.engine import Engine
from ..engine.passing import ORIGIN
from ..engine.subscription import POLL, Follower
from ..errors import InvalidRequest, MethodNotAllowed, NotFound, ProxyError
from ..export import feed, shown
from ..export.formats import FORMATS
from ..export.lists import DAY, LISTED, ONE_SHOT_SHOWN, summary_json
from ..sandbox import Sandboxes
from ..settings import ALIASES, MODELS, Settings
from ..wires.asgi import (
    EVENT_STREAM,
    JSONAnswer,
    RouteDoc,
    add,
    check_client_is_there,
    error_body,
    is_on,
    methods_of,
    owner_of,
    raw_path,
    read_body,
    whole_number,
)
from ..wires.base import Models
from ..wires.common import decoded_agent_id
from ..wires.fields import model_name, parse_body, required
from ..wires.schemas import COUNT, SWITCH, TEXT
from .gate import CHAINS
from .large_turns import TurnRenderer
from .proof import ANSWERING, AWAITING, HOP_MARK, LEFT, ONLY_HERE
from .served import CHALLENGE, PROOF, proof

if TYPE_CHECKING:  # its HTTP client is only loaded with a cluster
    from .relay import Relay

EVENTS = b"/events"
BACK = b"/rewind"
REWIND: JSON = {
    "type": "object", "required": ["to"],
    "properties": {"to": {"type": "string", "description": "a turn of the path to the head, or -N for N turns back"}},
}  # fmt: skip
STOP = b"/cancel"
CANCEL: JSON = {
    "type": "object",
    "properties": {"turn": {"type": "string", "description": "one that waits or runs; without it all of the agent's"}},
}
APPROVE = b"/approve"
APPROVED: JSON = {
    "type": "object", "required": ["approval", "decision"],
    "properties": {
        "approval": {"type": "string", "description": "the id of what waits"},
        "decision": {"enum": list(DECISIONS)},
        "word": {"type": "string", "maxLength": LONGEST_WORD, "description": "with deny: what the model is told"},
    },
}  # fmt: skip
COMMIT = b"/commit"
COMMITTED: JSON = {
    "type": "object",
    "properties": {
        "fix_id": {"type": "string", "description": "which fix this was an attempt at; the profile's otherwise"},
        "outcome": {"enum": ["passed", "failed"]},
        "why": {"type": "string", "description": "why it failed, or what showed that it passed"},
        "note": {"type": "string", "description": "write a note on this commit, which HEAD leads to, not a new one"},
        "model": {"type": "boolean", "description": "false: without a summary by the model"},
    },
}  # fmt: skip
COMMIT_LIMIT = 16 * 1024
APPROVE_LIMIT = 16 * 1024
REWIND_LIMIT = 4096  # bytes of the body of a rewind, and of a cancellation
# Seconds between two polls of a running turn, so that its text looks live.
LIVE_POLL = 0.1
SEQ_DIGITS = 19  # a seq is a 64-bit number
# A browser gives a dump an opaque origin: nothing in it could send requests to the proxy.
DUMP_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
PIECE = 64 * 1024  # the fewest characters of a dump that are sent at once

# The answer of `GET /`. It needs no key, because it has no data of this machine.
OVERVIEW: JSON = {
    "name": "cli-session-proxy",
    "what": "a local proxy that gives the Claude CLI a memory you can rely on",
    "base_url": {"openai": "/v1", "anthropic": "/", "google": "/", "one agent": "/agents/{agent_id}/v1"},
    "page": "/ui",
    "routes": "/openapi.json",
    "health": "/healthz",
}


class Routes:
    """The handlers of one app."""

    def __init__(self, app: Starlette, engine: Engine, settings: Settings, relay: Relay | None = None) -> None:
        self._engine = engine
        self._settings = settings
        self._relay = relay
        self._sandboxes = Sandboxes(settings)
        self._since = int(time.time())
        self._render = TurnRenderer(engine.aside.showing)
        dumps = tuple(dict.fromkeys(one.media_type.partition(";")[0] for one in FORMATS.values()))
        add(app, "GET", "/", self.root)
        add(app, "HEAD", "/", self.root)
        add(app, "GET", "/v1/models", self.models)
        add(app, "GET", "/v1/models/{model:path}", self.model)
        add(app, "GET", "/v1beta/models", self.models)
        add(app, "GET", "/v1beta/models/{model:path}", self.model)
        listed = RouteDoc(query={"search": TEXT, "limit": COUNT, "side": SWITCH, "one_shots": SWITCH})
        add(app, "GET", "/v1/chains", self.chains, listed)
        followed = RouteDoc(query={"live": SWITCH}, media=(EVENT_STREAM,))
        add(app, "GET", "/v1/chains/{agent_id}/events", self.events, followed)
        dumped = RouteDoc(query={"format": {"enum": list(FORMATS)}, "redact": SWITCH}, media=dumps)
        add(app, "GET", "/v1/chains/{agent_id:path}", self.dump, dumped)
        add(app, "POST", "/v1/chains/{agent_id:path}/rewind", self.rewind, RouteDoc(body=REWIND))
        add(app, "POST", "/v1/chains/{agent_id:path}/cancel", self.cancel, RouteDoc(body=CANCEL))
        add(app, "POST", "/v1/chains/{agent_id:path}/commit", self.commit, RouteDoc(body=COMMITTED))
        add(app, "POST", "/v1/chains/{agent_id:path}/approve", self.approve, RouteDoc(body=APPROVED))
        add(app, "GET", "/v1/approvals", self.approvals)
        add(app, "GET", "/v1/approvals/events", self.approval_events, RouteDoc(media=(EVENT_STREAM,)))
        add(app, "DELETE", "/v1/chains/{agent_id:path}", self.delete)
        add(app, "GET", "/healthz", self.healthz)
        add(app, "GET", "/readyz", self.readyz)
        app.add_exception_handler(HTTPException, no_such_route)

    # --- reading

    async def models(self, request: Request) -> JSON:
        models = _models_of(request)
        names = (*MODELS, *ALIASES, *self._settings.models)
        return models.listed([self._info(models, name) for name in names])

    async def model(self, request: Request, model: str) -> JSON:
        name = model_name(model.removeprefix("models/"))
        if not self._settings.knows_model(name):
            raise NotFound(f"there is no model {name!r}: GET /v1/models lists all", param="model")
        return self._info(_models_of(request), name)

    def _info(self, models: Models, name: str) -> JSON:
        known = self._settings.models.get(name)
        return models.info(name, self._since, "anthropic" if known is None else known.litellm.partition("/")[0])

    async def root(self, request: Request) -> Response:
        """An overview of the addresses. A browser is redirected to the page."""
        headers = {"Vary": "Accept"}
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/ui", 303, headers)
        return JSONAnswer(OVERVIEW, headers=headers)

    # --- administration

    async def healthz(self, request: Request) -> Response:
        """Whether the server runs. With a challenge, the answer proves that it is the server that `var` names. Another
        proxy may ask whether a request that it has forwarded is still answered here, whether one from here is still
        waited for, and which clients have left."""
        if self._relay is not None and HOP_MARK in request.headers:
            asked, awaited, left = map(request.query_params.get, (ANSWERING, AWAITING, LEFT))
            if awaited is not None and not self._relay.awaits(awaited):
                return JSONAnswer({"status": "not waiting for that answer"}, 410)
            ended = None if asked is None else await self._relay.answered(asked)
            if ended is not None:
                return JSONAnswer({"status": "not answering that request"}, 410, ended)
            if left is not None and not await self._relay.settle(left, others=ONLY_HERE not in request.query_params):
                return JSONAnswer({"status": "its clients came through proxies that do not respond"}, 503)
        secret, challenge = getattr(request.app.state, "served_secret", None), request.headers.get(CHALLENGE)
        headers = {PROOF: proof(secret, challenge)} if secret and challenge else {}
        return JSONAnswer({"status": "ok"}, headers=headers)

    async def readyz(self) -> Response:
        """For load balancers: whether the store could be written and read a moment ago. The state of the registry is
        shown, but does not count."""
        state = await self._engine.state()
        registry = None if self._engine.registry is None else self._engine.registry.state
        beside = {} if registry is None else {"registry": registry}
        return JSONAnswer({"status": state, **beside}, 200 if state == "ready" else 503)

    async def chains(self, request: Request) -> JSON:
        """The agents, last active first. `?search=`: a part of the name; `?limit=N` (1000); `?side=1`: also agents that
        only have side calls; `?one_shots=1`: also agents of a single turn, which are only counted otherwise."""
        searched = request.query_params.get("search", "").casefold()
        limit = whole_number(request, "limit", LISTED)
        with_side_calls = is_on(request, "side", default=False)
        now = time.time()
        # Older agents of a single turn are only counted.
        until = None if is_on(request, "one_shots", default=False) else now - ONE_SHOT_SHOWN
        data: list[JSON] = []
        more = False
        async for row in self._engine.view.summaries(owner_of(request), since=until):
            if searched in row.agent.agent_id.casefold() and (with_side_calls or not row.side):
                if more := len(data) == limit:
                    break
                data.append(summary_json(row))
        answer: JSON = {"object": "list", "data": data, "has_more": more}
        if until is not None:
            count, cost = await self._engine.view.one_shots(owner_of(request), since=now - DAY, until=until)
            answer["one_shots"] = {"count": count, "cost_usd": cost, "hours": 24}
        return answer

    async def dump(self, request: Request) -> Response:
        """The dump of a chain. `?format=`; `?redact=0`: with secrets as they are."""
        name = request.query_params.get("format", "json")
        if name not in FORMATS:
            raise InvalidRequest(f"format must be one of {', '.join(FORMATS)}", param="format")
        verbatim = not is_on(request, "redact", default=True)
        agent = await self._agent(request)
        written = FORMATS[name]
        sandbox = str(self._sandboxes.path(agent.dir))
        text = written.write(self._engine.view, agent, sandbox=sandbox, verbatim=verbatim, render=self._render)
        headers = {"Content-Security-Policy": DUMP_POLICY} if name == "html" else {}
        return StreamingResponse(_utf8(text), media_type=written.media_type, headers=headers)

    async def events(self, request: Request) -> Response:
        """Server-sent events: `turn` for each that began or ended, from `Last-Event-ID` (a seq) or from now on.

        `?live=1`: also `progress`: the steps and texts of running turns, also of those in other proxies that this one
        can reach.
        """
        live = is_on(request, "live", default=False)
        agent = await self._agent(request, EVENTS)
        last = request.headers.get("last-event-id", "")
        after = int(last) if last.isascii() and last.isdigit() and len(last) < SEQ_DIGITS else None
        request.scope["state"]["held"].stream()
        return StreamingResponse(self._event_texts(agent, after, live=live), media_type="text/event-stream")

    async def _event_texts(self, agent: Agent, after: int | None, *, live: bool) -> AsyncIterator[bytes]:
        yield b": following\n\n"
        quiet = time.monotonic()
        last: list[JSON] = []
        follower = Follower(self._engine.view, agent, after)
        elsewhere = None
        if live and self._relay is not None and ORIGIN.get() != "forwarded":
            elsewhere = self._relay.progress_elsewhere(agent)
        try:
            async for happened in follower.follow(LIVE_POLL if live else POLL):
                if not self._engine.ready:
                    return
                for one in happened:
                    yield feed.turn_event(one, await self._render(shown.turn, one.turn, one.links)).encode()
                going = feed.progress(self._engine.progress(agent.key)) if live else []
                going += await elsewhere.turns() if elsewhere is not None else []
                if going != last:
                    last = going
                    yield feed.progress_event(going).encode()
                if happened or time.monotonic() - quiet > self._settings.keepalive:
                    quiet = time.monotonic()
                    yield b": alive\n\n"
        finally:
            if elsewhere is not None:
                await elsewhere.close()

    async def delete(self, request: Request) -> JSON:
        agent_id = _agent_in_path(request)
        check_client_is_there(request)
        if not await self._engine.delete(owner_of(request), agent_id):
            raise NotFound(f"there is no agent {agent_id!r}: GET /v1/chains lists all", param="agent_id")
        return {"object": "chain.deleted", "agent_id": agent_id, "deleted": True}

    async def rewind(self, request: Request) -> JSON:
        """Move the head back along its path, to a turn or by `-N`: the tree stays, the next turn branches there."""
        body = parse_body(await read_body(request, REWIND_LIMIT))
        to = required(body, "to", str, expected="a turn's id or -N")
        check_client_is_there(request)
        rewound = await self._engine.rewind(owner_of(request), _agent_in_path(request, BACK), to)
        _note(request, was=rewound.was, head=rewound.head)
        return rewound.as_json()

    async def cancel(self, request: Request) -> JSON:
        """End a turn that waits or runs: nothing of it is kept, and the conversation is as before."""
        body = parse_body(await read_body(request, REWIND_LIMIT))
        turn = body.get("turn")
        if turn is not None and not isinstance(turn, str):
            raise InvalidRequest("turn must be a turn's id", param="turn")
        check_client_is_there(request)
        agent_id = _agent_in_path(request, STOP)
        ended = await self._engine.cancel(owner_of(request), agent_id, turn)
        return {"object": "chain.cancelled", "agent_id": agent_id, "cancelled": ended}

    async def approvals(self, request: Request) -> JSON:
        """The tool calls that wait for this owner's approval."""
        enabled = any(profile.approve for profile in self._settings.profiles.values())
        return {"object": "list", "enabled": enabled, "data": await self._waiting_approvals(owner_of(request))}

    async def approval_events(self, request: Request) -> Response:
        """Server-sent events: `approvals` with the same list, at once and whenever it changes."""
        request.scope["state"]["held"].stream()
        return StreamingResponse(self._approval_texts(owner_of(request)), media_type="text/event-stream")

    async def _waiting_approvals(self, owner: str) -> list[JSON]:
        """The tool calls that wait here and, as far as the store knows them, at other proxies."""
        waiting = [
            {"agent_id": one.agent.agent_id, "turn_id": one.turn_id, **feed.request_json(one.waiting, most=None)}
            for one in self._engine.asked(owner)
        ]
        for agent, turn, approval in await self._engine.asked_elsewhere(owner):
            waiting.append({"agent_id": agent.agent_id, "turn_id": turn.id, **feed.stored_request_json(approval)})
        return waiting

    async def _approval_texts(self, owner: str) -> AsyncIterator[bytes]:
        last: list[JSON] | None = None
        quiet = time.monotonic()
        while self._engine.ready:
            now = await self._waiting_approvals(owner)
            if now != last or time.monotonic() - quiet > self._settings.keepalive:
                quiet = time.monotonic()
                yield b": alive\n\n" if now == last else feed.approvals_event(now).encode("utf-8", "replace")
                last = now
            await asyncio.sleep(POLL)

    async def approve(self, request: Request) -> JSON:
        """Allow or deny a tool call that waits for approval. The first decision counts."""
        body = parse_body(await read_body(request, APPROVE_LIMIT))
        approval = required(body, "approval", str, expected="the id of what waits")
        decision, word = body.get("decision"), body.get("word")
        if decision not in DECISIONS:
            raise InvalidRequest(f"decision must be one of {', '.join(DECISIONS)}", param="decision")
        if word is not None and (not isinstance(word, str) or len(word) > LONGEST_WORD or decision != "deny"):
            raise InvalidRequest(f"word takes {LONGEST_WORD} characters, and goes with deny", param="word")
        owner, agent_id = owner_of(request), _agent_in_path(request, APPROVE)
        verdict = Verdict(OUTCOMES[decision], owner, word)
        ended = await self._engine.approve(owner, agent_id, approval, verdict)
        _note(request, approval=ended.id, tool=ended.tool, outcome=ended.outcome)
        about: JSON = {"object": "chain.approval", "agent_id": agent_id}
        return about | {"approval": ended.id, "tool": ended.tool, "outcome": ended.outcome}

    async def commit(self, request: Request) -> JSON:
        """Write the agent's attempt into the repository of its profile. A request cannot choose another one."""
        order = CommitOrder.read(parse_body(await read_body(request, COMMIT_LIMIT)))
        check_client_is_there(request)
        return (await self._engine.commit(owner_of(request), _agent_in_path(request, COMMIT), order)).as_json()

    async def _agent(self, request: Request, after: bytes = b"") -> Agent:
        return await self._engine.agent_named(owner_of(request), _agent_in_path(request, after))


def _note(request: Request, **detail: object) -> None:
    """Add to the request's line of the audit: our ids and outcomes, never content."""
    if (audit := request.scope["state"].get("audit")) is not None:
        audit.detail.update(detail)


def _models_of(request: Request) -> Models:
    """The list of models in the client's own protocol: several wires share the path."""
    models: Models | None = request.scope["state"]["wire"].models
    assert models is not None, "a wire that claims a list of models has one"
    return models


def _agent_in_path(request: Request, after: bytes = b"") -> str:
    return decoded_agent_id(raw_path(request.scope).removeprefix(CHAINS).removesuffix(after))


async def _utf8(texts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Join small texts: sending 20,000 of them took longer than making them."""
    pieces: list[str] = []
    size = 0
    async for text in texts:
        pieces.append(text)
        size += len(text)
        if size >= PIECE:
            # Half of a surrogate pair from a model cannot be sent as UTF-8: show it as "?"; the store keeps it.
            yield "".join(pieces).encode("utf-8", "replace")
            pieces, size = [], 0
    yield "".join(pieces).encode("utf-8", "replace")


async def no_such_route(request: Request, exc: Exception) -> Response:
    """404 and 405 in the error format of the address's wire."""
    status = exc.status_code if isinstance(exc, HTTPException) else 404
    headers: dict[str, str] = {}
    path, method = request.url.path, request.method
    error: ProxyError
    if status == 405:
        headers = {"Allow": ", ".join(sorted(methods_of(request.app, request.scope)))}
        error = MethodNotAllowed(f"{path} does not take {method}: use {headers['Allow']}")
    elif status == 404:
        error = NotFound(f"{method} {path} does not exist: GET / lists the routes, such as POST /v1/chat/completions")
    else:
        error = InvalidRequest("the request cannot be served")  # any other error of Starlette's router
    return JSONAnswer(error_body(request.scope, error), error.status, headers=headers)
