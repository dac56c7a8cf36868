"""The routes of OpenAI Responses, and where the retired Assistants were."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import InvalidRequest, NotFound, SessionBusy
from ..models import FINISHED, JSON
from ..protocols import responses, responses_items
from ..protocols.blocks import estimated_tokens
from ..protocols.common import encoded_agent_id
from ..protocols.responses_stream import EventWriter
from ..settings import Settings
from ..turns import Engine
from .addresses import add
from .answers import ESTIMATED, JsonAnswer, StreamAnswer, ignored_header
from .bodies import named, read_call
from .dialogues import Dialogues

ID = "/v1/responses/{response_id}"
RETIRED = ("/v1/assistants", "/v1/threads")
METHODS = ("GET", "POST", "DELETE")


class ResponsesRoutes:
    def __init__(self, engine: Engine, settings: Settings, dialogues: Dialogues) -> None:
        self._engine = engine
        self._settings = settings
        self._dialogues = dialogues

    def add_to(self, app: Starlette) -> None:
        for method, path, handler in (
            ("POST", "/v1/responses", self.create),
            ("POST", "/v1/responses/input_tokens", self.input_tokens),
            ("GET", ID, self.retrieve),
            ("DELETE", ID, self.delete),
            ("POST", f"{ID}/cancel", self.cancel),
            ("GET", f"{ID}/input_items", self.input_items),
        ):
            add(app, method, path, handler)
        for path in RETIRED:
            for rest in ("", "/{rest:path}"):
                for method in METHODS:
                    add(app, method, path + rest, retired)

    async def create(self, request: Request) -> Response:
        call = await read_call(request, self._settings.max_body, responses.read)
        answer = await self._dialogues.submit(call)
        headers = ignored_header(call.ignored)
        if call.background:
            self._engine.keep(answer.another() if call.stream else answer)
            if not call.stream:
                about = {"X-Agent-Id": encoded_agent_id(answer.agent_id), "X-Turn-Id": answer.turn_id}
                return JSONResponse(responses.response(answer.accepted), headers={**about, **headers})
        if not call.stream:
            return JsonAnswer(answer, headers, responses.response)
        return StreamAnswer(answer, headers, EventWriter(answer.accepted), self._settings.keepalive)

    async def input_tokens(self, request: Request) -> JSONResponse:
        """An estimate: the CLI counts nothing ahead. What came before is known from its own turn's usage."""
        call = await read_call(request, self._settings.max_body, responses.read)
        parent = await self._dialogues.parent(call)
        system = "\n\n".join(text for text in (call.instructions, *call.system) if text)
        tokens = estimated_tokens(system or None, call.messages)
        if parent is not None:
            tokens += parent.usage.prompt_tokens + parent.usage.output_tokens
        body = {"object": "response.input_tokens", "input_tokens": tokens}
        return JSONResponse(body, headers=ESTIMATED)

    async def retrieve(self, request: Request, response_id: str) -> Response:
        turn = await self._dialogues.response(named(request).owner, response_id)
        if request.query_params.get("stream") != "true":
            return JSONResponse(responses.response(turn), headers=await self._dialogues.about(turn))
        after = _starting_after(request)
        answer = None if turn.status in FINISHED else self._engine.follow(turn.id)
        if answer is not None:
            writer = EventWriter(answer.accepted, starting_after=after)
            return StreamAnswer(answer, {}, writer, self._settings.keepalive)
        turn = await self._dialogues.response(named(request).owner, response_id)
        if turn.status not in FINISHED:
            raise SessionBusy("another proxy on this store runs this response: ask again without stream")
        body = b"".join(EventWriter(turn, starting_after=after).whole(turn))
        return Response(body, media_type="text/event-stream", headers=await self._dialogues.about(turn))

    async def delete(self, request: Request, response_id: str) -> JSON:
        await self._dialogues.delete_response(named(request).owner, response_id)
        return responses.deleted(response_id)

    async def cancel(self, request: Request, response_id: str) -> JSON:
        return responses.response(await self._dialogues.cancel(named(request).owner, response_id))

    async def input_items(self, request: Request, response_id: str) -> JSON:
        turn = await self._dialogues.response(named(request).owner, response_id)
        written = [item for item in await self._engine.store.items(turn.agent_key) if item.turn_id == turn.id]
        entries = responses_items.input_entries(turn, written)
        return responses_items.page([entry.item for entry in entries], request.query_params)


def _starting_after(request: Request) -> int:
    given = request.query_params.get("starting_after", "")
    if given and not (given.isascii() and given.isdigit() and len(given) < 10):
        raise InvalidRequest("starting_after must be a sequence_number: 0, 1, 2, …", param="starting_after")
    return int(given) if given else -1


async def retired() -> Response:
    raise NotFound(
        "Assistants and threads are retired (OpenAI shut them down on 2026-08-26): use POST /v1/conversations for "
        "what was a thread, and POST /v1/responses with `conversation` for what was a run"
    )
