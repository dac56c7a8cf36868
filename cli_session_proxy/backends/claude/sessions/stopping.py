"""Shortens the records of an answer that was cut at a stop sequence or at the token limit. Pure.

A CLI that does not know the sequences records more than the answer, and every CLI asks the model to go on after the
token limit. The turn is stored with the cut answer, and its records are shortened accordingly (run on 2.1.329: the
model then sees the short answer, and the prefix of the prompt cache holds).
"""

from __future__ import annotations

from collections.abc import Sequence

from ....domain.models import Block, Message, Record
from ..transcript import Entry, Scribe
from .exchanges import says_stopped
from .reopening import closing


def cut(
    entries: Sequence[Entry], output: Sequence[Block], scribe: Scribe, model: str, *, unseen: bool, quiet: bool = False
) -> list[Record]:
    """The turn's records up to the end of the answer: whole ones, then one with the last text.

    `output`: the cut answer; only its last text may be shortened. `unseen`: the CLI accepts an answer that the model
    never sees, for an empty answer. `quiet`: the records have no prompt; else records before the prompt are no part of
    the answer.
    """
    ends_in_words = bool(output) and output[-1].get("type") == "text"
    whole = len(output) - ends_in_words
    prompts = [] if quiet else [at for at, entry in enumerate(entries) if entry.on_path and entry.kind == "user"]
    start = prompts[0] if prompts else 0
    shortened: list[Entry] = list(entries[:start])
    full = False
    for at, entry in enumerate(entries[start:]):
        if entry.on_path and entry.kind == "user" and (full or (says_stopped(entry) and (quiet or at > 0))):
            break  # the CLI's own messages: "go on", or "interrupted"
        if entry.on_path and entry.kind == "assistant":
            full = entry.data.get("message", {}).get("stop_reason") == "max_tokens"
            said = [block for block in entry.content if block.get("type") != "tool_use"]
            if said and len(said) > whole:
                break
            whole -= len(said)
            model = str(entry.data.get("message", {}).get("model") or model)
        shortened.append(entry)
    shortened = shortened[: _as_far_as_answered(shortened)]
    scribe.parent = next((entry.uuid for entry in reversed(shortened) if entry.on_path), scribe.parent)
    words = tuple(output[-1:]) if ends_in_words and str(output[-1].get("text", "")).strip() else ()
    last = scribe.record(Message("assistant", words), model) if words or not unseen else closing(scribe)
    return [*(entry.record() for entry in shortened), last]


def _as_far_as_answered(entries: Sequence[Entry]) -> int:
    """How many entries come before the first call without a result: that call was cut."""
    blocks = [block for entry in entries if entry.on_path for block in entry.content]
    answered = {block.get("tool_use_id") for block in blocks if block.get("type") == "tool_result"}
    for at, entry in enumerate(entries):
        calls = {block.get("id") for block in entry.content if block.get("type") == "tool_use"}
        if entry.on_path and not calls <= answered:
            return at
    return len(entries)
