"""System and developer messages in mid-conversation: they stay at their place, as reminders. Pure.

The provider has one system prompt, before everything: moving a text there would change the prefix of every request. So
a later one is sent in the newest turn, in the tags that the model knows from the CLI.
"""

from __future__ import annotations

from .models import Block, Message

OPENING, CLOSING = "<system-reminder>", "</system-reminder>"


def reminder(text: str) -> Message:
    return Message("user", ({"type": "text", "text": f"{OPENING}\n{text}\n{CLOSING}"},))


def reminded(block: Block) -> str | None:
    """The text of a reminder block; None for any other."""
    text = str(block.get("text", "")).strip()
    if block.get("type") != "text" or not text.startswith(OPENING) or text.find(CLOSING) != len(text) - len(CLOSING):
        return None
    return text[len(OPENING) : -len(CLOSING)].strip("\n")
