"""Google's Interactions: their body, routes and addresses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ...domain.models import ANSWERED, JSON, TurnRequest
from ...engine.engine import Engine
from ...errors import InvalidRequest, NotFound
from ...settings import Settings
from ..answers import reply
from ..asgi import STREAMED, JSONAnswer, RouteDoc, add, has_left, named, read_call
from ..base import AddressClaim, ErrorShape, Wire
from ..common import KeptCall
from ..kept import KeptTurns
from ..schemas import FLAG, MODEL, OBJECT, OBJECTS, TEXT, TEXT_OR_NULL, YES_OR_NO, body, error_schema
from . import body as interactions
from .stream import InteractionsWriter

BODY = body(
    {
        "model": {**MODEL, "type": "string"},
        "input": {"type": ["string", "array", "object"], "items": {"type": "object"}},
    },
    previous_interaction_id=TEXT_OR_NULL, system_instruction=TEXT_OR_NULL, store=FLAG, stream=FLAG, background=FLAG,
    generation_config=OBJECT, tools=OBJECTS, response_modalities={"enum": [["text"], None]},
)  # fmt: skip


class InteractionsRoutes:
    def __init__(self, app: Starlette, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._kept = KeptTurns(engine, interactions.turn_id_of, unknown)
        for version in ("v1", "v1beta"):
            root = f"/{version}/interactions"
            add(app, "POST", root, self.create, RouteDoc(BODY, media=STREAMED, turn=True))
            asked = {"stream": YES_OR_NO, "last_event_id": TEXT, "include_input": YES_OR_NO}
            add(app, "GET", f"{root}/{{name}}", self.retrieve, RouteDoc(query=asked, media=STREAMED))
            add(app, "DELETE", f"{root}/{{name}}", self.delete)
            add(app, "POST", f"{root}/{{name}}/cancel", self.cancel)

    async def create(self, request: Request) -> Response:
        call = await read_call(request, self._settings.max_body, interactions.read)
        left = partial(has_left, request.scope, request.receive)
        answer = await self._engine.submit(await self._continued(call), left)
        writer = partial(InteractionsWriter, answer.accepted)
        return reply(answer, call, self._settings.keepalive, interactions.interaction, writer)

    async def _continued(self, call: KeptCall) -> TurnRequest:
        if call.previous is None:
            return call.request
        previous = await self._kept.turn(call.request.owner, call.previous)
        if previous.status not in ANSWERED:
            raise InvalidRequest(
                f"the previous interaction is {interactions.status_of(previous)}: wait for it, "
                "or go on from the one before it",
                param="previous_interaction_id",
            )
        return replace(call.request, continues=previous.id)

    async def retrieve(self, request: Request, name: str) -> Response:
        owner = named(request).owner
        if _is_true(request, "stream"):
            last = request.query_params.get("last_event_id") or "0"
            if not (last.isascii() and last.isdigit() and len(last) < 16):
                raise InvalidRequest(
                    "last_event_id must be an event_id of this interaction's stream", param="last_event_id"
                )
            writer = partial(InteractionsWriter, after=int(last))
            return await self._kept.stream(owner, name, writer, self._settings.keepalive)
        turn = await self._kept.turn(owner, name)
        shown = interactions.interaction(turn, include_input=_is_true(request, "include_input"))
        return JSONAnswer(shown, headers=await self._kept.headers_of(turn))

    async def delete(self, request: Request, name: str) -> JSON:
        await self._kept.delete(named(request).owner, name)
        return {}

    async def cancel(self, request: Request, name: str) -> JSON:
        turn = await self._kept.cancel(named(request).owner, name)
        if turn.status != "cancelled":
            raise InvalidRequest(f"a {interactions.status_of(turn)} interaction cannot be cancelled", param="id")
        return interactions.interaction(turn)


def unknown(name: str) -> NotFound:
    return NotFound(f"there is no interaction {name!r}: it was never stored, or is deleted", param="id")


def _is_true(request: Request, name: str) -> bool:
    """Whether a query parameter is `true`."""
    return request.query_params.get(name, "").lower() == "true"


WIRE = Wire(
    name=interactions.WIRE,
    claims=(AddressClaim("/v1/interactions"), AddressClaim("/v1beta/interactions")),
    errors=ErrorShape(
        "interactions",
        lambda error, _: interactions.error_body(error),
        error_schema({"code": TEXT, "message": TEXT}),
    ),
    routes=InteractionsRoutes,
    bases=("/v1/", "/v1beta/"),
    key_in_address=True,
)
