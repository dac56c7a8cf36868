"""Is a changed system prompt another prompt, or the same one with new values? And reminders. Pure.

Newer models sign their thinking together with the head of the request, and the provider caches from its first byte on:
a clock or a counter in the system prompt would invalidate both at every turn. So if a prompt differs only in dates,
times, numbers or ids, the old one stays at the head, and the new values are sent with the newest prompt.
"""

from __future__ import annotations

import re

from .models import Block, Message

_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_RUN = re.compile(r"[A-Za-z0-9]+")
# Mixed letters and digits: req_8f3a9c21, but not python3 or windows11.
_ID = re.compile(r"(?=.{6,})(?:[A-Za-z]+[0-9]+[A-Za-z]|[0-9]+[A-Za-z]+[0-9])[A-Za-z0-9]*")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:[.,:/-][0-9]+)*")
_NAMES = re.compile(
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?|Mon(?:day)?|Tue(?:s(?:day)?)?|Wed(?:nesday)?|Thu(?:rs(?:day)?)?|Fri(?:day)?"
    r"|Sat(?:urday)?|Sun(?:day)?|AM|PM|am|pm|a\.m\.|p\.m\.)(?=\W|#|$)"
)
_VALUE = "#"


def is_same_but_for_values(one: str, other: str) -> bool:
    """Whether they differ only in dates, times, numbers or ids. A changed word makes another prompt."""
    return _masked(one) == _masked(other)


def is_another(before: str | None, now: str | None) -> bool:
    """Whether it is a different prompt, not a changed passage: less than half is shared, counted from both ends."""
    if before is None or now is None or before == now:
        return before != now
    shared = _shared(before, now)
    shared += _shared(before[shared:][::-1], now[shared:][::-1])
    return shared * 2 < max(len(before), len(now)) and not is_same_but_for_values(before, now)


def _shared(one: str, other: str) -> int:
    """The length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _masked(text: str) -> str:
    text = _UUID.sub(_VALUE, text)
    text = _RUN.sub(lambda run: _VALUE if _ID.fullmatch(run[0]) else run[0], text)
    return _NAMES.sub(_VALUE, _NUMBER.sub(_VALUE, text))


def change_reminder(before: str, now: str) -> Block:
    """The reminder that tells the model how the system prompt changed."""
    old, new = before.splitlines(), now.splitlines()
    if is_same_but_for_values(before, now) and len(old) == len(new):
        changed = [line for was, line in zip(old, new, strict=True) if was != line]
        text = "The system prompt has new values. These lines of it read now:\n" + "\n".join(changed)
    else:
        text = f"The system prompt is this one from here on, in place of the one before:\n{now}"
    return reminder(text).content[0]


# --- system and developer messages in mid-conversation: they stay at their place, as reminders

# The provider has one system prompt, before everything: moving a text there would change the prefix of every request.
# So a later one is sent in the newest turn, in the tags that the model knows from the CLI.

_OPENING, _CLOSING = "<system-reminder>", "</system-reminder>"


def reminder(text: str) -> Message:
    return Message("user", ({"type": "text", "text": f"{_OPENING}\n{text}\n{_CLOSING}"},))


def reminded(block: Block) -> str | None:
    """The text of a reminder block; None for any other."""
    text = str(block.get("text", "")).strip()
    if block.get("type") != "text" or not text.startswith(_OPENING) or text.find(_CLOSING) != len(text) - len(_CLOSING):
        return None
    return text[len(_OPENING) : -len(_CLOSING)].strip("\n")
