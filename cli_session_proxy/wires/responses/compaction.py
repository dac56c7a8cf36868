"""A whole conversation in one item: made by POST /v1/responses/compact, and read in a later input. Pure.

The item is opaque to its client. It has the whole conversation as text: the chain stores all of it anyway, and the CLI
compacts by itself if the model's context is full.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...domain.models import JSON, Message
from ...domain.system_prompts import reminder
from ...errors import ContextTooLong
from ..fields import optional

_PREFIX = "csp1:"
# The largest decompressed item: a small item must not become huge.
LARGEST = 32 * 1024 * 1024
# Characters of JSON that are read for it: thinking, which is not part of it, may be longer than the words.
MOST_READ = 4 * LARGEST
UNKNOWN = "The earlier part of this conversation was compacted by another service and cannot be read here."


def sealed(messages: Sequence[Message]) -> str:
    """The conversation as the `encrypted_content` of a compaction item. Raises `ContextTooLong`: of a larger one the
    newest part would not be read again."""
    pieces, size = [], 0
    for message in messages:
        pieces.append(f"{message.role}: {_as_text(message)}".encode("utf-8", "surrogatepass"))
        size += len(pieces[-1]) + 2
        if size > LARGEST:
            raise ContextTooLong(
                f"the conversation has more than {LARGEST:,} bytes of text: it does not fit into one item"
            )
    return _PREFIX + base64.b64encode(zlib.compress(b"\n\n".join(pieces))).decode()


def read_compaction(item: Mapping[str, Any], where: str) -> Message:
    """The message that replaces the item: the earlier conversation. An item of another server is encrypted and cannot
    be read."""
    content = optional(item, "encrypted_content", str, where)
    if content is None or not content.startswith(_PREFIX):
        return reminder(UNKNOWN)
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(content.removeprefix(_PREFIX), validate=True), LARGEST)
        return reminder(f"The conversation until here:\n\n{raw.decode('utf-8', 'replace')}")
    except (zlib.error, ValueError):
        return reminder(UNKNOWN)


def _as_text(message: Message) -> str:
    out = []
    for block in message.content:
        kind = block["type"]
        if kind == "text":
            out.append(str(block["text"]))
        elif kind == "tool_use":
            out.append(f"[called {block['name']} with {json.dumps(block['input'], ensure_ascii=False)}]")
        elif kind == "tool_result":
            content = block.get("content")
            out.append(f"[result: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}]")
        else:
            out.append(f"[{kind}]")
    return "\n".join(out)


def compacted(response: str, created_at: float, messages: Sequence[Message], usage: JSON) -> JSON:
    """The `response.compaction` object."""
    item = {"id": f"cmp_{response}", "type": "compaction", "encrypted_content": sealed(messages)}
    return {
        "id": f"resp_{response}", "object": "response.compaction", "created_at": int(created_at), "output": [item],
        "usage": usage,
    }  # fmt: skip
