"""The route of Chat Completions."""

from __future__ import annotations

from starlette.applications import Starlette

from ...engine.engine import Engine
from ...settings import Settings
from ..answers import answered
from ..asgi import STREAMED, About, add
from . import body as chat
from . import schema


class ChatRoutes:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._completions = answered(engine, settings, chat.read, chat.completion, chat.writer)

    def add_to(self, app: Starlette) -> None:
        about = About(schema.BODY, media=STREAMED, turn=True)
        add(app, "POST", "/v1/chat/completions", self._completions, about)
