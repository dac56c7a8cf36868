"""What the CLI was seen to mend by itself: it tells nobody, but notes it in its transcript (2.1.330). Pure.

Thinking that it leaves out from then on is an attachment. An image or a document that the provider refused leaves the
record of an API error in the middle of the turn, and words in its place in the request that it keeps for itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ....domain.models import Block, Record
from ....domain.notes import Code
from .. import transcript
from .reopening import SYNTHETIC_MODEL

# Types of the attachments by which it remembers what it leaves out from then on.
_ATTACHMENTS: Mapping[str, Code] = {
    "thinking_stripped": "cli_left_out_thinking",
    "thinking_drop": "cli_left_out_thinking",
    "tool_results_cut": "cli_left_out_tool_results",
}


_REMOVED: Mapping[str, Code] = {"[Image removed": "cli_left_out_images", "[Document removed": "cli_left_out_documents"}


def seen(records: Iterable[Record], prompt: Sequence[Block]) -> dict[Code, int]:
    """By code, how often. `prompt` is what we gave it: an image that it wrote down otherwise was changed."""
    found: dict[Code, int] = {}
    given = {_data(block) for block in prompt if block.get("type") == "image"}
    for record in records:
        if record.uuid is None:
            for words, removed in _REMOVED.items():
                found[removed] = max(found.get(removed, 0), record.line.count(words))
            continue
        if not (given or '"attachment"' in record.line):
            continue
        data = json.loads(record.line)
        attachment = data.get("attachment")
        code = _ATTACHMENTS.get(str(attachment.get("type"))) if isinstance(attachment, dict) else None
        if code is not None:
            found[code] = found.get(code, 0) + 1
        content = data.get("message", {}).get("content") if data.get("type") == "user" and given else None
        for block in content if isinstance(content, list) else ():
            if block.get("type") == "image" and _data(block) not in given:
                found["cli_changed_images"] = found.get("cli_changed_images", 0) + 1
    return found


def of_other_models(path: Sequence[Record], records: Iterable[Record]) -> int:
    """How many thoughts of this path the CLI does not send, where these records are the first of another model."""
    now = {model for record in records if (model := _model(record)) is not None}
    before = next((model for record in reversed(path) if (model := _model(record)) is not None), None)
    if not now or before is None or before in now:
        return 0
    return transcript.count((record for record in path if _model(record) not in now), "thinking")


def _model(record: Record) -> str | None:
    """Which model this answer is of; None where it is none, or the CLI's own words in the model's place."""
    if record.uuid is None or '"assistant"' not in record.line:
        return None
    said = json.loads(record.line).get("message")
    model = said.get("model") if isinstance(said, dict) and said.get("role") == "assistant" else None
    return model if isinstance(model, str) and model != SYNTHETIC_MODEL else None


def since_stripped(path: Sequence[Record]) -> Sequence[Record]:
    """The records behind those whose thinking it has left out already."""
    at = next((at for at in range(len(path), 0, -1) if '"thinking_stripped"' in path[at - 1].line), 0)
    return path[at:]


def _data(block: Block) -> object:
    return (block.get("source") or {}).get("data")
