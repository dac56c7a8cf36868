"""The records of an answer that was cut at a stop sequence. Pure.

The CLI has no option for them, so the proxy cuts. The turn is committed as cut, and its records are shortened with it
(run on 2.1.329: the model then sees the short answer, and the prefix of the prompt cache holds).
"""

from __future__ import annotations

from collections.abc import Sequence

from ....domain.models import Block, Message, Record
from ..transcript import Entry, Scribe
from .reopening import closing


def cut(entries: Sequence[Entry], output: Sequence[Block], scribe: Scribe, model: str, *, unseen: bool) -> list[Record]:
    """The turn's records as far as the answer goes: whole ones, then one with the shortened text.

    `output` is the answer as cut, its last block the shortened one. `unseen`: the CLI takes an answer that the
    model never sees, for one of which nothing is left.
    """
    whole = len(output) - 1
    kept: list[Entry] = []
    for entry in entries:
        if entry.on_path and entry.kind == "assistant":
            said = [block for block in entry.content if block.get("type") != "tool_use"]
            if said and len(said) > whole:
                break
            whole -= len(said)
            model = str(entry.data.get("message", {}).get("model") or model)
        kept.append(entry)
    scribe.parent = next((entry.uuid for entry in reversed(kept) if entry.on_path), scribe.parent)
    says = bool(str(output[-1].get("text", "")).strip())
    words = tuple(output[-1:]) if says else ()
    last = scribe.record(Message("assistant", words), model) if says or not unseen else closing(scribe)
    return [*(entry.record() for entry in kept), last]
