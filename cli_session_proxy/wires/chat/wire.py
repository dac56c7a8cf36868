"""OpenAI Chat Completions. It also answers for every address that is no wire's own."""

from __future__ import annotations

from ..base import ANY, AddressClaim, Models, Wire
from ..openai import OPENAI
from . import body as chat
from .routes import ChatRoutes

WIRE = Wire(
    name=chat.WIRE,
    claims=(AddressClaim("/v1/chat"), AddressClaim("/v1/models"), AddressClaim(ANY)),
    errors=OPENAI,
    routes=ChatRoutes,
    models=Models(chat.model_info, chat.model_list),
)
