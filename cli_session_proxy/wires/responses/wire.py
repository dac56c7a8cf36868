"""OpenAI Responses and Conversations, and where the retired Assistants were: their routes and addresses."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute

from ...domain.models import JSON, Message, Usage
from ...engine.engine import Engine
from ...errors import InvalidRequest, NotFound
from ...settings import Settings
from ..answers import ESTIMATED, reply
from ..asgi import STREAMED, JSONAnswer, RouteDoc, add, has_left, named, read_call
from ..base import AddressClaim, Wire
from ..blocks import estimated_tokens
from ..openai import OPENAI
from ..schemas import CHOICE, FLAG, MODEL, NUMBER, OBJECT, OBJECTS, TEXT_OR_NULL, TEXT_OR_OBJECT, YES_OR_NO, body
from . import body as responses
from . import compaction
from . import items as responses_items
from .conversation_routes import MESSAGE, METADATA, PAGE, ConversationsRoutes
from .dialogues import Dialogues
from .socket import ResponsesSocket
from .stream import ResponsesWriter

BODY = body(
    {"input": {"anyOf": [{"type": "string"}, {"type": "array", "items": MESSAGE}]}},
    model=MODEL, instructions=TEXT_OR_NULL, previous_response_id=TEXT_OR_NULL, conversation=TEXT_OR_OBJECT,
    store=FLAG, stream=FLAG, background=FLAG, metadata=METADATA, reasoning=OBJECT, text=OBJECT, tools=OBJECTS,
    tool_choice=CHOICE, agent_id=TEXT_OR_NULL, temperature=NUMBER, max_output_tokens=NUMBER,
)  # fmt: skip
SOCKET = "/v1/responses"
ID = "/v1/responses/{response_id}"
RETIRED = ("/v1/assistants", "/v1/threads")
METHODS = ("GET", "POST", "DELETE")


class ResponsesRoutes:
    def __init__(self, app: Starlette, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._dialogues = Dialogues(engine)
        self._socket = ResponsesSocket(engine, self._dialogues)
        add(app, "POST", "/v1/responses", self.create, RouteDoc(BODY, media=STREAMED, turn=True))
        app.router.routes.append(WebSocketRoute(SOCKET, self._socket.talk))
        add(app, "POST", "/v1/responses/input_tokens", self.input_tokens, RouteDoc(BODY))
        add(app, "POST", "/v1/responses/compact", self.compact, RouteDoc(BODY))
        again = {"stream": YES_OR_NO, "starting_after": {"type": "integer", "minimum": 0}}
        add(app, "GET", ID, self.retrieve, RouteDoc(query=again, media=STREAMED))
        add(app, "DELETE", ID, self.delete)
        add(app, "POST", f"{ID}/cancel", self.cancel)
        add(app, "GET", f"{ID}/input_items", self.input_items, RouteDoc(query=PAGE))
        for path in RETIRED:
            for rest in ("", "/{rest:path}"):
                for method in METHODS:
                    add(app, method, path + rest, retired)
        ConversationsRoutes(app, settings, self._dialogues)

    async def create(self, request: Request) -> Response:
        call = await read_call(request, self._settings.max_body, responses.read)
        answer = await self._dialogues.submit(call, has_left=partial(has_left, request.scope, request.receive))
        writer = partial(ResponsesWriter, answer.accepted)
        return reply(answer, call, self._settings.keepalive, responses.response, writer)

    async def input_tokens(self, request: Request) -> JSONAnswer:
        """An estimate, because the CLI cannot count before a turn. Earlier turns' tokens are known from their usage."""
        call = await read_call(request, self._settings.max_body, responses.read)
        parent = await self._dialogues.parent(call)
        system = "\n\n".join(text for text in (call.instructions, *call.system) if text)
        tokens = estimated_tokens(system or None, call.request.messages, call.request.options.tools)
        if parent is not None:
            tokens += parent.usage.prompt_tokens + parent.usage.output_tokens
        return JSONAnswer({"object": "response.input_tokens", "input_tokens": tokens}, headers=ESTIMATED)

    async def compact(self, request: Request) -> JSONAnswer:
        """The conversation as one item, which replaces it in a later input. No model is asked."""
        call = await read_call(request, self._settings.max_body, responses.read)
        parent = await self._dialogues.parent(call)
        store = self._engine.store
        path = await store.path_texts(parent.id, compaction.MOST_READ) if parent is not None else []
        messages = [one for turn in path for one in (*turn.input, Message("assistant", turn.output))]
        messages += call.request.messages
        usage = responses.usage(Usage())
        return JSONAnswer(await asyncio.to_thread(compaction.compacted, uuid.uuid4().hex, time.time(), messages, usage))

    async def retrieve(self, request: Request, response_id: str) -> Response:
        owner, kept_turns = named(request).owner, self._dialogues.kept
        if request.query_params.get("stream") == "true":
            after = request.query_params.get("starting_after") or "-1"
            if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 10):
                raise InvalidRequest("starting_after must be a sequence_number: 0, 1, 2, …", param="starting_after")
            writer = partial(ResponsesWriter, starting_after=int(after))
            return await kept_turns.stream(owner, response_id, writer, self._settings.keepalive)
        turn = await kept_turns.turn(owner, response_id)
        return JSONAnswer(responses.response(turn), headers=await kept_turns.headers_of(turn))

    async def delete(self, request: Request, response_id: str) -> JSON:
        await self._dialogues.kept.delete(named(request).owner, response_id)
        return responses.deleted(response_id)

    async def cancel(self, request: Request, response_id: str) -> JSON:
        return responses.response(await self._dialogues.cancel(named(request).owner, response_id))

    async def input_items(self, request: Request, response_id: str) -> JSON:
        turn = await self._dialogues.kept.turn(named(request).owner, response_id)
        own_items = {item.id: item for item in await self._engine.store.items(turn.agent_key)}
        entries = responses_items.input_entries(turn, own_items)
        return responses_items.page([entry.item for entry in entries], request.query_params)


async def retired() -> Response:
    raise NotFound(
        "Assistants and threads are retired (OpenAI shut them down on 2026-08-26): use POST /v1/conversations for "
        "what was a thread, and POST /v1/responses with `conversation` for what was a run"
    )


WIRE = Wire(
    name=responses.WIRE,
    claims=tuple(AddressClaim(root) for root in ("/v1/responses", "/v1/conversations", *RETIRED)),
    errors=OPENAI,
    routes=ResponsesRoutes,
    sockets=frozenset({SOCKET}),
)
