"""The route of Chat Completions."""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ...engine.engine import Engine
from ...settings import Settings
from ..answers import reply
from ..asgi import STREAMED, About, add, read_call
from . import body as chat
from . import schema


class ChatRoutes:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def add_to(self, app: Starlette) -> None:
        about = About(schema.BODY, media=STREAMED, turn=True)
        add(app, "POST", "/v1/chat/completions", self.chat_completions, about)

    async def chat_completions(self, request: Request) -> Response:
        call = await read_call(request, self._settings.max_body, chat.read)
        answer = await self._engine.submit(call.request, request.is_disconnected)
        writer = partial(chat.ChunkWriter, answer.turn_id, call.request.model, include_usage=call.include_usage)
        return reply(answer, call, self._settings.keepalive, chat.completion, writer)
