"""Ollama's API, for programs that use no other: its bodies, routes and addresses."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ...domain.models import JSON
from ...engine.engine import Engine
from ...errors import NotFound
from ...settings import MODELS, Settings
from ..answers import reply
from ..asgi import JSONAnswer, RouteDoc, add, has_left, read_call
from ..base import AddressClaim, ErrorShape, Wire
from ..common import Naming
from ..fields import model_name, optional
from ..schemas import FLAG, FUNCTIONS, MODEL, NUMBER, OBJECT, TEXT, TEXT_OR_NULL, TEXTS, body
from . import body as ollama

_KEEP: JSON = {"type": ["number", "string", "null"]}
_FORMAT: JSON = {"anyOf": [{"enum": ["json", "", None]}, {"type": "object"}]}
_THINK: JSON = {"enum": [True, False, "low", "medium", "high", "max", None]}
_OPTIONS: JSON = {
    "type": ["object", "null"],
    "properties": {"temperature": NUMBER, "num_predict": NUMBER, "num_ctx": NUMBER, "seed": NUMBER, "stop": TEXTS},
}
_MESSAGE = body({"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT})

CHAT = body(
    {"messages": {"type": "array", "items": _MESSAGE}},
    model=MODEL, stream=FLAG, tools=FUNCTIONS, format=_FORMAT, options=_OPTIONS, think=_THINK, keep_alive=_KEEP,
    agent_id=TEXT_OR_NULL, metadata=OBJECT,
)  # fmt: skip
GENERATE = body(
    {"prompt": TEXT},
    model=MODEL, system=TEXT_OR_NULL, stream=FLAG, format=_FORMAT, options=_OPTIONS, think=_THINK, keep_alive=_KEEP,
    context={"type": ["array", "null"], "items": {"type": "integer"}}, images=TEXTS, agent_id=TEXT_OR_NULL,
    metadata=OBJECT,
)  # fmt: skip
SHOW = body({"model": {**MODEL, "type": "string"}})


LINES = ("application/json", ollama.LineWriter.media_type)
# The version of Ollama with this API, from which clients conclude what they may send. It added ids of tool calls.
API_VERSION = "0.12.10"
# Tokens, by Anthropic's documentation of today's models ("Context windows").
CONTEXT_LENGTH = 200_000
DETAILS: JSON = {
    "parent_model": "", "format": "", "family": "claude", "families": ["claude"], "parameter_size": "",
    "quantization_level": "",
}  # fmt: skip


class OllamaRoutes:
    def __init__(self, app: Starlette, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._since = ollama.timestamp(time.time())
        add(app, "POST", "/api/chat", self.chat, RouteDoc(CHAT, media=LINES, turn=True))
        add(app, "POST", "/api/generate", self.generate, RouteDoc(GENERATE, media=LINES, turn=True))
        add(app, "GET", "/api/tags", self.tags)
        add(app, "POST", "/api/show", self.show, RouteDoc(SHOW))
        add(app, "GET", "/api/ps", self.ps)
        add(app, "GET", "/api/version", self.version)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ollama.read_chat)

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, ollama.read_generate)

    async def _answer(
        self, request: Request, read: Callable[[JSON, Naming], ollama.OllamaCall | ollama.Load]
    ) -> Response:
        call = await read_call(request, self._settings.max_body, read)
        if isinstance(call, ollama.Load):
            return JSONAnswer(ollama.loaded(call))
        answer = await self._engine.submit(call.request, partial(has_left, request.scope, request.receive))
        return reply(
            answer,
            call,
            self._settings.keepalive,
            lambda turn: ollama.answer(turn, call),
            lambda: ollama.LineWriter(call),
        )

    async def tags(self) -> JSON:
        """The models, with the tag that Ollama appends to their names."""
        listed = [
            {
                "name": name, "model": name, "modified_at": self._since, "size": 0,
                "digest": hashlib.sha256(name.encode()).hexdigest(), "details": DETAILS,
            }
            for name in (f"{plain}{ollama.TAG}" for plain in (*MODELS, *self._settings.models))
        ]  # fmt: skip
        return {"models": listed}

    async def show(self, request: Request) -> JSON:
        """A model's abilities and context length, which clients check before they send tools, images or long texts."""
        name = await read_call(request, self._settings.max_body, _model_name)
        if not self._settings.knows_model(name):
            raise NotFound(f"model {name!r} not found: GET /api/tags lists what there is", param="model")
        return {
            "modelfile": f"FROM {name}\n", "parameters": "", "template": "", "details": DETAILS,
            "model_info": {
                "general.architecture": "claude", "general.basename": name, "claude.context_length": CONTEXT_LENGTH,
            },
            "capabilities": ["completion", "vision", "tools", "thinking"], "modified_at": self._since,
        }  # fmt: skip

    async def ps(self) -> JSON:
        """No models: none is loaded into this machine's memory."""
        return {"models": []}

    async def version(self) -> JSON:
        return {"version": API_VERSION}


def _model_name(body: JSON, naming: Naming) -> str:  # noqa: ARG001 - every `read` of a body takes both
    """The model's name, which older clients send as `name`."""
    given = optional(body, "model", str) or optional(body, "name", str)
    return model_name(given.removesuffix(ollama.TAG) if given else None)


# An agent's base URL is the server's with `/agents/{agent_id}` appended. These addresses may follow it; any other
# "/api/" is part of the agent's name. Addresses that are not served are listed, to be refused in Ollama's form.
_API_NAMES = (
    "chat", "generate", "tags", "show", "ps", "version", "embed", "embeddings", "pull", "push", "create", "copy",
    "delete", "blobs",
)  # fmt: skip

WIRE = Wire(
    name=ollama.WIRE,
    claims=(AddressClaim("/api"),),
    errors=ErrorShape(
        "ollama", lambda error, _: ollama.error_body(error), body({"error": TEXT, "code": TEXT}, param=TEXT)
    ),
    routes=OllamaRoutes,
    bases=tuple(f"/api/{name}" for name in _API_NAMES),
)
