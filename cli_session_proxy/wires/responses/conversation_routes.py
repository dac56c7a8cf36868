"""The routes of OpenAI Conversations, and the bodies that `/openapi.json` shows for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...domain.models import JSON
from ...errors import NotFound
from ...settings import Settings
from ..answers import ignored_header
from ..asgi import JSONAnswer, RouteDoc, add, check_client_is_there, named, read_call
from ..common import compact
from ..schemas import COUNT, TEXT, body, message
from . import conversations
from . import items as responses_items
from .dialogues import Dialogues, new_id

T = TypeVar("T")

METADATA: JSON = {"type": ["object", "null"], "additionalProperties": {"type": "string"}, "maxProperties": 16}
MESSAGE = message("input_text", "user", "assistant", "system", "developer")
_ITEMS: JSON = {"type": "array", "maxItems": 20, "items": MESSAGE}
_CONVERSATION = body({}, items={**_ITEMS, "type": ["array", "null"]}, metadata=METADATA)
# The query of a list.
PAGE = {"limit": COUNT, "after": TEXT, "order": {"enum": ["asc", "desc"]}}

ID = "/v1/conversations/{conversation_id}"
ITEM = f"{ID}/items/{{item_id}}"


class ConversationsRoutes:
    def __init__(self, app: Starlette, settings: Settings, dialogues: Dialogues) -> None:
        self._settings = settings
        self._dialogues = dialogues
        add(app, "POST", "/v1/conversations", self.create, RouteDoc(_CONVERSATION))
        add(app, "GET", ID, self.retrieve)
        add(app, "POST", ID, self.update, RouteDoc(body({"metadata": METADATA})))
        add(app, "DELETE", ID, self.delete)
        add(app, "POST", f"{ID}/items", self.add_items, RouteDoc(body({"items": _ITEMS})))
        add(app, "GET", f"{ID}/items", self.items, RouteDoc(query=PAGE))
        add(app, "GET", ITEM, self.item)
        add(app, "DELETE", ITEM, self.delete_item)

    async def create(self, request: Request) -> Response:
        new, headers = await self._read(request, partial(conversations.read, new_id=new_id))
        return JSONAnswer(await self._dialogues.create(named(request).owner, new), headers=headers)

    async def retrieve(self, request: Request, conversation_id: str) -> JSON:
        return await self._dialogues.conversation(named(request).owner, conversation_id)

    async def update(self, request: Request, conversation_id: str) -> Response:
        metadata, headers = await self._read(request, conversations.read_metadata)
        annotated = await self._dialogues.annotate(named(request).owner, conversation_id, metadata)
        return JSONAnswer(annotated, headers=headers)

    async def delete(self, request: Request, conversation_id: str) -> JSON:
        check_client_is_there(request)
        await self._dialogues.delete(named(request).owner, conversation_id)
        return conversations.deleted(conversation_id)

    async def add_items(self, request: Request, conversation_id: str) -> Response:
        new, headers = await self._read(request, partial(conversations.read_items, new_id=new_id))
        by = named(request)
        added = await self._dialogues.add_items(by.owner, conversation_id, new, is_retry=by.is_retry)
        return JSONAnswer(responses_items.listed(added), headers=headers)

    async def items(self, request: Request, conversation_id: str) -> Response:
        dialogue = await self._dialogues.whole(named(request).owner, conversation_id)
        page = responses_items.page([entry.item for entry in dialogue.entries], request.query_params)
        items = self._dialogues.with_files(dialogue, page["data"])
        return StreamingResponse(_written(page, items), media_type=JSONAnswer.media_type)

    async def item(self, request: Request, conversation_id: str, item_id: str) -> JSON:
        dialogue = await self._dialogues.whole(named(request).owner, conversation_id)
        found = [entry.item for entry in dialogue.entries if entry.id == item_id][:1]
        async for item in self._dialogues.with_files(dialogue, found):
            return item
        raise NotFound(f"there is no item {item_id!r} in this conversation", param="item_id")

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> JSON:
        return await self._dialogues.remove_item(named(request).owner, conversation_id, item_id)

    async def _read(self, request: Request, read: Callable[[JSON], T]) -> tuple[T, dict[str, str]]:
        """The parsed body, and headers that name ignored fields.

        `read` must be importable by name: a large body is parsed in another process.
        """
        parsed, unread = await read_call(
            request, self._settings.max_body, partial(conversations.read_with_ignored, read=read)
        )
        check_client_is_there(request)
        return parsed, ignored_header(unread)


async def _written(page: JSON, items: AsyncIterator[JSON]) -> AsyncIterator[bytes]:
    """A page in pieces, one for each of its items."""
    piece, end = compact({**page, "data": []}).split(b"]", 1)
    async for item in items:
        yield piece
        yield compact(item)
        piece = b","
    yield (b"]" if page["data"] else piece + b"]") + end
