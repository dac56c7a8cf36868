"""Estimates a turn's size in a request, for windows and for the choice of a model. Pure."""

from __future__ import annotations

import json

from .blocks import contents
from .client_tools import calls_of
from .models import THINKING, Block, Turn
from .options import TurnSize

# Tokens of an image or document of any size: about the most that providers count.
PICTURE_TOKENS = 1_500
CHARACTERS_PER_TOKEN = 4


def size_of(turn: Turn, parent: Turn | None) -> TurnSize:
    """A turn's size in a request. A request may begin with it unless it answers calls of the turn before."""
    open_calls = set(calls_of(parent.output)) if parent is not None else set()
    asked = [block for message in turn.shown_input for block in message.content]
    answers = any(block.get("type") == "tool_result" and block.get("tool_use_id") in open_calls for block in asked)
    return TurnSize(sum(map(_weight, (*asked, *turn.output))), not answers)


def _weight(block: Block) -> int:
    if block.get("type") in THINKING:
        return 0
    if block.get("type") == "tool_result":
        return 8 + sum(map(_weight, contents(block)))
    if block.get("type") in ("image", "document") and (block.get("source") or {}).get("type") == "base64":
        return PICTURE_TOKENS
    text = block["text"] if isinstance(block.get("text"), str) else json.dumps(block, ensure_ascii=False)
    return 4 + len(text) // CHARACTERS_PER_TOKEN
