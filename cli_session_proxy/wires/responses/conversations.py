"""OpenAI Conversations: ids, bodies and objects. Pure, no I/O.

A conversation is an agent's chain. One that was created here is an agent named by the conversation's id. Any other
agent has a conversation id, too, so that a chain of another wire can be continued here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...domain.limits import conversation_id
from ...domain.models import JSON, Agent, Item
from ...errors import InvalidRequest, NotFound
from ..common import Naming, canonical
from ..fields import Fields
from .body import checked_metadata
from .items import stored_items

T = TypeVar("T")

# OpenAI's limit for one call.
ITEMS_LIMIT = 20


def unknown(conversation: str) -> NotFound:
    return NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")


@dataclass(frozen=True, slots=True)
class NewConversation:
    metadata: JSON
    items: tuple[Item, ...]


def read_with_ignored(body: JSON, _naming: Naming, *, read: Callable[[JSON], T]) -> tuple[T, tuple[str, ...]]:
    """Parse a body with one of the functions below; also returns its ignored fields. Raises `InvalidRequest`.

    Invalid numbers and texts are refused here. For other bodies that happens when their fingerprint is computed.
    """
    canonical(body)
    fields = Fields(body)
    return read(fields), fields.unread()


def read(body: JSON, new_id: Callable[[str], str]) -> NewConversation:
    """The metadata and items of a new conversation. Raises `InvalidRequest`."""
    items = read_items(body, new_id) if body.get("items") else ()
    return NewConversation(read_metadata(body), items)


def read_metadata(body: JSON) -> JSON:
    return checked_metadata(body.get("metadata"))


def read_items(body: JSON, new_id: Callable[[str], str]) -> tuple[Item, ...]:
    given = body.get("items")
    if isinstance(given, list) and len(given) > ITEMS_LIMIT:
        raise InvalidRequest(f"items takes at most {ITEMS_LIMIT} in one call: send the rest after them", param="items")
    return tuple(stored_items(given, new_id))


def conversation(agent: Agent, metadata: JSON) -> JSON:
    return {
        "id": conversation_id(agent.agent_id),
        "object": "conversation",
        "created_at": int(agent.created_at),
        "metadata": metadata,
    }


def deleted(conversation: str) -> JSON:
    return {"id": conversation, "object": "conversation.deleted", "deleted": True}
