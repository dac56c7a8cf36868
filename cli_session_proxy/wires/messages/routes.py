"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...engine.engine import Engine
from ...settings import Settings
from ..answers import ESTIMATED, answered
from ..asgi import STREAMED, About, add, read_call
from . import body as messages
from . import schema


class MessagesRoutes:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._create = answered(engine, settings, messages.read, messages.message, messages.writer)
        self._max_body = settings.max_body

    def add_to(self, app: Starlette) -> None:
        add(app, "POST", "/v1/messages", self._create, About(schema.BODY, media=STREAMED, turn=True))
        add(app, "POST", "/v1/messages/count_tokens", self.count_tokens, About(schema.COUNTED))

    async def count_tokens(self, request: Request) -> Response:
        counted = await read_call(request, self._max_body, messages.count)
        return JSONResponse(counted, headers=ESTIMATED)
