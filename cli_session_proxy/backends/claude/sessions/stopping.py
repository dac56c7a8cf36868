"""The records of an answer that was cut: at a stop sequence, or where it had as many tokens as it may. Pure.

A CLI that cannot be told the sequences says more than the answer, and every CLI asks the model to go on after the last
token. The turn is committed as cut, and its records are shortened with it (run on 2.1.329: the model then sees the
short answer, and the prefix of the prompt cache holds).
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
    """The turn's records as far as the answer goes: whole ones, then one with its last text.

    `output` is the answer as cut; what may be short of it is the last text. `unseen`: the CLI takes an answer that the
    model never sees, for one of which nothing is left. `quiet`: they hold no prompt; else what the CLI writes before it
    is no part of the answer.
    """
    ends_in_words = bool(output) and output[-1].get("type") == "text"
    whole = len(output) - ends_in_words
    prompts = [] if quiet else [at for at, entry in enumerate(entries) if entry.on_path and entry.kind == "user"]
    start = prompts[0] if prompts else 0
    kept: list[Entry] = list(entries[:start])
    full = False
    for at, entry in enumerate(entries[start:]):
        if entry.on_path and entry.kind == "user" and (full or (says_stopped(entry) and (quiet or at > 0))):
            break  # the CLI's own words: they ask the model to go on, or tell it that it was stopped
        if entry.on_path and entry.kind == "assistant":
            full = entry.data.get("message", {}).get("stop_reason") == "max_tokens"
            said = [block for block in entry.content if block.get("type") != "tool_use"]
            if said and len(said) > whole:
                break
            whole -= len(said)
            model = str(entry.data.get("message", {}).get("model") or model)
        kept.append(entry)
    kept = kept[: _as_far_as_answered(kept)]
    scribe.parent = next((entry.uuid for entry in reversed(kept) if entry.on_path), scribe.parent)
    words = tuple(output[-1:]) if ends_in_words and str(output[-1].get("text", "")).strip() else ()
    last = scribe.record(Message("assistant", words), model) if words or not unseen else closing(scribe)
    return [*(entry.record() for entry in kept), last]


def _as_far_as_answered(entries: Sequence[Entry]) -> int:
    """How many entries there are before a call that has no result among them: it was cut off."""
    blocks = [block for entry in entries if entry.on_path for block in entry.content]
    answered = {block.get("tool_use_id") for block in blocks if block.get("type") == "tool_result"}
    for at, entry in enumerate(entries):
        calls = {block.get("id") for block in entry.content if block.get("type") == "tool_use"}
        if entry.on_path and not calls <= answered:
            return at
    return len(entries)
