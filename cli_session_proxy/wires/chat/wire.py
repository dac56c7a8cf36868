"""OpenAI Chat Completions: its body, route and addresses. It also has every address that no other wire claims."""

from __future__ import annotations

from starlette.applications import Starlette

from ...engine.engine import Engine
from ...settings import Settings
from ..answers import answered
from ..asgi import STREAMED, RouteDoc, add
from ..base import ANY, AddressClaim, Models, Wire
from ..openai import OPENAI
from ..schemas import (
    CHOICE,
    EFFORT,
    FLAG,
    FORMAT,
    FUNCTIONS,
    MODEL,
    NUMBER,
    OBJECT,
    TEXT_OR_NULL,
    TEXT_OR_TEXTS,
    body,
    messages,
)
from . import body as chat

BODY = body(
    {"messages": messages("system", "developer", "user", "assistant")},
    model=MODEL, stream=FLAG, stream_options=OBJECT, agent_id=TEXT_OR_NULL, metadata=OBJECT, reasoning_effort=EFFORT,
    stop=TEXT_OR_TEXTS, response_format=FORMAT, tools=FUNCTIONS, tool_choice=CHOICE, n={"enum": [1, None]},
    user=TEXT_OR_NULL, temperature=NUMBER, max_tokens=NUMBER,
)  # fmt: skip


def routes(app: Starlette, engine: Engine, settings: Settings) -> None:
    completions = answered(engine, settings, chat.read, chat.completion, chat.writer)
    add(app, "POST", "/v1/chat/completions", completions, RouteDoc(BODY, media=STREAMED, turn=True))


WIRE = Wire(
    name=chat.WIRE,
    claims=(AddressClaim("/v1/chat"), AddressClaim("/v1/models"), AddressClaim(ANY)),
    errors=OPENAI,
    routes=routes,
    models=Models(chat.model_info, chat.model_list),
)
