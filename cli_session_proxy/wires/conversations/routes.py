"""The routes of OpenAI Conversations."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request

from ...domain.models import JSON, Item
from ...errors import NotFound
from ...http.addresses import add
from ...http.bodies import named, read_call
from ...http.dialogues import Dialogues, new_id
from ...settings import Settings
from ..common import Naming
from ..responses import items as responses_items
from ..responses.body import checked_metadata
from . import body as conversations
from .body import NewConversation

ID = "/v1/conversations/{conversation_id}"
ITEM = f"{ID}/items/{{item_id}}"


class ConversationsRoutes:
    def __init__(self, settings: Settings, dialogues: Dialogues) -> None:
        self._settings = settings
        self._dialogues = dialogues

    def add_to(self, app: Starlette) -> None:
        for method, path, handler in (
            ("POST", "/v1/conversations", self.create),
            ("GET", ID, self.retrieve),
            ("POST", ID, self.update),
            ("DELETE", ID, self.delete),
            ("POST", f"{ID}/items", self.add_items),
            ("GET", f"{ID}/items", self.items),
            ("GET", ITEM, self.item),
            ("DELETE", ITEM, self.delete_item),
        ):
            add(app, method, path, handler)

    async def create(self, request: Request) -> JSON:
        new: NewConversation = await read_call(request, self._settings.max_body, _read_new)
        return await self._dialogues.create(named(request).owner, new)

    async def retrieve(self, request: Request, conversation_id: str) -> JSON:
        return await self._dialogues.conversation(named(request).owner, conversation_id)

    async def update(self, request: Request, conversation_id: str) -> JSON:
        metadata: JSON = await read_call(request, self._settings.max_body, _read_metadata)
        return await self._dialogues.annotate(named(request).owner, conversation_id, metadata)

    async def delete(self, request: Request, conversation_id: str) -> JSON:
        await self._dialogues.delete(named(request).owner, conversation_id)
        return conversations.deleted(conversation_id)

    async def add_items(self, request: Request, conversation_id: str) -> JSON:
        new: tuple[Item, ...] = await read_call(request, self._settings.max_body, _read_items)
        return responses_items.listed(await self._dialogues.add_items(named(request).owner, conversation_id, new))

    async def items(self, request: Request, conversation_id: str) -> JSON:
        found = await self._dialogues.items(named(request).owner, conversation_id)
        return responses_items.page(found, request.query_params)

    async def item(self, request: Request, conversation_id: str, item_id: str) -> JSON:
        for item in await self._dialogues.items(named(request).owner, conversation_id):
            if item["id"] == item_id:
                return item
        raise NotFound(f"there is no item {item_id!r} in this conversation", param="item_id")

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> JSON:
        return await self._dialogues.remove_item(named(request).owner, conversation_id, item_id)


def _read_new(body: JSON, naming: Naming) -> NewConversation:  # noqa: ARG001 - the shape of a wire's `read`
    return conversations.read(body, new_id)


def _read_metadata(body: JSON, naming: Naming) -> JSON:  # noqa: ARG001 - as above
    return checked_metadata(body.get("metadata"))


def _read_items(body: JSON, naming: Naming) -> tuple[Item, ...]:  # noqa: ARG001 - as above
    return conversations.read_items(body.get("items"), new_id)
