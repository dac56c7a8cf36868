"""The routes of Google's generateContent."""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...engine.engine import Engine
from ...errors import InvalidRequest, NotFound
from ...settings import Settings
from ..answers import ESTIMATED, reply
from ..asgi import EVENT_STREAM, About, add, has_left, read_call
from ..google import checked_model
from . import body as generate
from . import schema


class GenerateRoutes:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def add_to(self, app: Starlette) -> None:
        for version in ("v1", "v1beta"):
            model = f"/{version}/models/{{model}}"
            events = About(schema.BODY, {"alt": {"const": "sse"}}, (EVENT_STREAM,), turn=True)
            shown = {
                f"{model}:generateContent": About(schema.BODY, turn=True),
                f"{model}:streamGenerateContent": events,
                f"{model}:countTokens": About(schema.COUNTED),
            }
            add(app, "POST", f"/{version}/models/{{target:path}}", self.call, shown=shown)

    async def call(self, request: Request, target: str) -> Response:
        """`target` is `{model}:{method}`."""
        model, _, method = target.rpartition(":")
        if method == "countTokens":
            checked_model(model)
            counted = await read_call(request, self._settings.max_body, generate.count)
            return JSONResponse(counted, headers=ESTIMATED)
        if method not in ("generateContent", "streamGenerateContent") or not model:
            raise NotFound(
                f"there is no POST {request.url.path}: send models/{{model}}:generateContent, "
                ":streamGenerateContent?alt=sse or :countTokens"
            )
        stream = method == "streamGenerateContent"
        if stream and request.query_params.get("alt") != "sse":
            raise InvalidRequest("streamGenerateContent is served as events: add ?alt=sse", param="alt")
        read = partial(generate.read, model=model, stream=stream)
        call = await read_call(request, self._settings.max_body, read)
        answer = await self._engine.submit(call.request, partial(has_left, request.scope, request.receive))
        request_id = request.scope["state"]["request_id"]
        writer = partial(
            generate.GenerateWriter, answer.turn_id, call.request.model, request_id, thoughts=call.thoughts
        )
        render = partial(generate.answer, thoughts=call.thoughts)
        return reply(answer, call, self._settings.keepalive, render, writer)
