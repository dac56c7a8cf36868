"""Google's generateContent: its bodies, routes and addresses."""

from __future__ import annotations

import re
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ...engine.engine import Engine
from ...errors import InvalidRequest, NotFound
from ...settings import Settings
from ..answers import ESTIMATED, reply
from ..asgi import EVENT_STREAM, JSONAnswer, RouteDoc, add, has_left, read_call
from ..base import AddressClaim, Models, Wire
from ..google import checked_model
from ..schemas import OBJECT, OBJECTS, TEXT_OR_NULL, body
from . import body as generate

_CONTENT = body({"parts": {"type": "array", "items": body({}, text={"type": "string"})}}, role=TEXT_OR_NULL)
BODY = body(
    {"contents": {"type": ["array"], "minItems": 1, "items": _CONTENT}},
    systemInstruction={"anyOf": [_CONTENT, {"type": "null"}]}, generationConfig=OBJECT, tools=OBJECTS,
    toolConfig=OBJECT,
)  # fmt: skip
COUNTED = body({}, contents=OBJECTS, generateContentRequest=OBJECT)


class GenerateRoutes:
    def __init__(self, app: Starlette, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        for version in ("v1", "v1beta"):
            model = f"/{version}/models/{{model}}"
            events = RouteDoc(BODY, {"alt": {"const": "sse"}}, (EVENT_STREAM,), turn=True)
            documented = {
                f"{model}:generateContent": RouteDoc(BODY, turn=True),
                f"{model}:streamGenerateContent": events,
                f"{model}:countTokens": RouteDoc(COUNTED),
            }
            add(app, "POST", f"/{version}/models/{{target:path}}", self.call, documented=documented)

    async def call(self, request: Request, target: str) -> Response:
        """`target` is `{model}:{method}`."""
        model, _, method = target.rpartition(":")
        if method == "countTokens":
            checked_model(model)
            counted = await read_call(request, self._settings.max_body, generate.count)
            return JSONAnswer(counted, headers=ESTIMATED)
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


# Google's clients may send their key in the address.
_KEY = re.compile(r"(^|&)key=")
# A method after the model's name, in Google's addresses. Other vendors' model names have colons, too (`llama3:8b`).
_METHOD = re.compile(r"/v1/models/.*:(?:\w+(?:Contents?|Tokens|Answer)|predict\w*)", re.S)

WIRE = Wire(
    name=generate.WIRE,
    claims=(
        AddressClaim("/v1beta"),
        AddressClaim("/v1/models", form=_METHOD),
        AddressClaim(
            "/v1/models", by=lambda asked: "x-goog-api-key" in asked.headers or _KEY.search(asked.query) is not None
        ),
    ),
    errors=generate.GOOGLE,
    routes=GenerateRoutes,
    models=Models(generate.model_info, generate.model_list),
    bases=("/v1/", "/v1beta/"),
    key_in_address=True,
)
