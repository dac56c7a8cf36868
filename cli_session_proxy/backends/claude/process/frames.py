"""The CLI's stream-json, without I/O: bytes to lines, prompts to frames. What frames mean is in `turn_reader`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ....domain import limits
from ....domain.models import JSON, Block
from .capability import CLIENT_COMPOSED, Capability, newer

# A 3 MB answer is one 3 MB line (facts); a line beyond this is no answer of a model any more.
MAX_LINE = 64 * 1024 * 1024


class Unreadable(ValueError):
    """Nothing after it can be trusted. The text says what was printed."""


class LineTooLong(Unreadable):
    """A line of more than the cap."""


class FrameTooDeep(Unreadable):
    """A frame that nests deeper than any that a CLI prints by itself: a model's arguments can."""


class LineSplitter:
    """Chunks of bytes in, complete lines out (without their newline). Keeps at most `cap` bytes."""

    def __init__(self, cap: int = MAX_LINE) -> None:
        self._cap = cap
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises LineTooLong when an unfinished or finished line is longer than the cap."""
        lines: list[bytes] = []
        for number, part in enumerate(chunk.split(b"\n")):
            if number:
                lines.append(b"".join(self._parts))
                self._parts, self._size = [], 0
            self._size += len(part)
            if self._size > self._cap:
                raise LineTooLong(f"a line of more than {self._cap} bytes")
            if part:
                self._parts.append(part)
        return lines


def parse(line: bytes) -> JSON | None:
    """The frame of a line; None for anything that is not a JSON object (old CLIs print notices in between).

    Raises FrameTooDeep: a frame that is left out may be one that the CLI waits for an answer to.
    """
    try:
        frame = limits.loads(line.decode("utf-8", "surrogatepass"), limits.CLI_DEPTH)  # json would look for UTF-16
    except limits.TooDeep as exc:
        if line.lstrip().startswith(b"{"):
            raise FrameTooDeep(f"a frame that is nested deeper than {limits.CLI_DEPTH} levels") from exc
        return None
    except ValueError:
        return None
    return frame if isinstance(frame, dict) else None


def line(frame: JSON) -> bytes:
    """A frame as a line for stdin."""
    # ensure_ascii: a lone surrogate, NUL or U+2028 goes through as an escape and can never break a line.
    return json.dumps(frame, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def user_frame(uuid: str, content: Sequence[Block]) -> bytes:
    """One prompt as a line for stdin. Without `client_composed` a prompt `/clear` wipes the session (facts)."""
    message = {"role": "user", "content": list(content)}
    return line({"type": "user", "uuid": uuid, "client_composed": True, "message": message})


def control_request(request_id: str, subtype: str, **fields: Any) -> bytes:
    """A request on the control channel: `initialize`, `interrupt`, `set_model` (field `model`)."""
    return line({"type": "control_request", "request_id": request_id, "request": {"subtype": subtype, **fields}})


def control_response(frame: JSON) -> JSON | None:
    """What a `control_response` answers to a request of ours: its `request_id`, `subtype` (`success` or `error`),
    `response`."""
    response = frame.get("response")
    return response if isinstance(response, dict) else None


# --- prompts for CLIs that interpret them ------------------------------------------------------------------
#
# Read in 1.0.120's program text and run on it and, unmarked, on 2.1.329: only the LAST block of a prompt is
# interpreted, and only when it is text: a leading "/" is a command, (^|\s)@name a file of this machine whose
# content goes to the model. A last block that holds neither makes the whole prompt mere words.

_FILE_REFERENCE = re.compile(r"(?:^|[\s\ufeff])@\S")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_FIRST = frozenset("/@!#")


def _is_plain(text: str) -> bool:
    return not text.lstrip().startswith("/") and _FILE_REFERENCE.search(text) is None


def _plain_tail(text: str) -> int | None:
    """Where the shortest tail of `text` starts that a CLI cannot interpret, when there is one before it."""
    for start in range(len(text.rstrip()) - 1, 0, -1):
        first = text[start]
        if not first.isspace() and first not in _NOT_FIRST and first.isprintable():
            return start if _is_plain(text[start:]) else None
    return None


def deliverable(capability: Capability, content: Sequence[Block]) -> list[Block]:
    """The same words in blocks that this CLI passes to the model verbatim.

    For an older CLI the last text is cut in two where needed: the model reads the same characters, in two
    text blocks of one message. Ask `unsafe_prompt` first: what cannot be cut comes back as it is.
    """
    blocks = list(content)
    if capability.client_composed or not blocks or blocks[-1].get("type") != "text":
        return blocks
    text = str(blocks[-1].get("text", ""))
    cut = None if _is_plain(text) else _plain_tail(text)
    if cut is not None:
        blocks[-1:] = [{**blocks[-1], "text": text[:cut]}, {"type": "text", "text": text[cut:]}]
    return blocks


def unsafe_prompt(capability: Capability, content: str | Sequence[Block]) -> str | None:
    """Why this prompt cannot reach the model verbatim through this CLI; None when it can.

    Empty text: 2.1.329 replaces it by "(no content)", and the provider itself refuses it.
    """
    blocks: Sequence[Block] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not blocks:
        return "the prompt is empty"
    if all(block.get("type") == "text" and not str(block.get("text", "")).strip() for block in blocks):
        return "the prompt is empty or only white space"
    if any(_SURROGATE.search(str(block.get("text", ""))) for block in blocks if block.get("type") == "text"):
        return "the prompt holds half a surrogate pair, which is no character: the CLI would replace it"
    last = blocks[-1]
    if capability.client_composed or last.get("type") != "text":
        return None
    text = str(last.get("text", ""))
    if _is_plain(text) or _plain_tail(text) is not None:
        return None
    would = "would run this prompt as a command or a file reference"
    return f"Claude CLI {capability.version} {would}{newer(CLIENT_COMPOSED)}"
