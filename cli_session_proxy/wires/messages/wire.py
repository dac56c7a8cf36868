"""Anthropic's Messages API: its bodies, routes and addresses."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ...engine.engine import Engine
from ...settings import Settings
from ..answers import ESTIMATED, answered
from ..asgi import STREAMED, JSONAnswer, RouteDoc, add, read_call
from ..base import AddressClaim, Models, Wire
from ..schemas import FLAG, MODEL, NUMBER, OBJECT, OBJECTS, TEXT_OR_OBJECTS, TEXTS, THINKING, body
from ..schemas import messages as conversation
from . import body as messages

BODY = body(
    {"messages": conversation("user", "assistant"), "max_tokens": {"type": "integer"}},
    model=MODEL, system=TEXT_OR_OBJECTS, stream=FLAG, metadata=OBJECT, thinking=THINKING, output_config=OBJECT,
    stop_sequences=TEXTS, tools=OBJECTS, tool_choice=OBJECT, temperature=NUMBER, thread=OBJECT,
)  # fmt: skip
COUNTED = body({"messages": conversation("user", "assistant")}, model=MODEL, system=TEXT_OR_OBJECTS, tools=OBJECTS)


def routes(app: Starlette, engine: Engine, settings: Settings) -> None:
    async def count_tokens(request: Request) -> Response:
        counted = await read_call(request, settings.max_body, messages.count)
        return JSONAnswer(counted, headers=ESTIMATED)

    create = answered(engine, settings, messages.read, messages.message, messages.writer)
    add(app, "POST", "/v1/messages", create, RouteDoc(BODY, media=STREAMED, turn=True))
    add(app, "POST", "/v1/messages/count_tokens", count_tokens, RouteDoc(COUNTED))


WIRE = Wire(
    name=messages.WIRE,
    claims=(
        AddressClaim("/v1/messages"),
        AddressClaim("/v1/models", by=lambda asked: "anthropic-version" in asked.headers),
    ),
    errors=messages.ANTHROPIC,
    routes=routes,
    models=Models(messages.model_info, messages.model_list),
)
