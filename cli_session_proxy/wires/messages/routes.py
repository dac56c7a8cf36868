"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...engine.engine import Engine
from ...settings import Settings
from ..answers import ESTIMATED, reply
from ..asgi import STREAMED, About, add, read_call
from . import body as messages
from . import schema


class MessagesRoutes:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def add_to(self, app: Starlette) -> None:
        add(app, "POST", "/v1/messages", self.create, About(schema.BODY, media=STREAMED, turn=True))
        add(app, "POST", "/v1/messages/count_tokens", self.count_tokens, About(schema.COUNTED))

    async def create(self, request: Request) -> Response:
        call = await read_call(request, self._settings.max_body, messages.read)
        answer = await self._engine.submit(call.request, request.is_disconnected)
        writer = partial(messages.EventWriter, answer.turn_id, call.request.model, request.scope["state"]["request_id"])
        return reply(answer, call, self._settings.keepalive, messages.message, writer)

    async def count_tokens(self, request: Request) -> Response:
        counted = await read_call(request, self._settings.max_body, messages.count)
        return JSONResponse(counted, headers=ESTIMATED)
