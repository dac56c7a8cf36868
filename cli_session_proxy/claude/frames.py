"""The CLI's stream-json, without I/O: bytes to lines, prompts to frames, frames to events."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..models import JSON, Block, BlockDelta, BlockStart, BlockStop, Usage
from .capability import Capability
from .events import (
    Activity,
    ApiRetry,
    AssistantMessage,
    CliEvent,
    Compacted,
    Result,
    SessionSeen,
    ToolActivity,
)

# A 3 MB answer is one 3 MB line (facts); a line beyond this is no answer of a model any more.
MAX_LINE = 64 * 1024 * 1024


class LineTooLong(ValueError):
    """A line of more than the cap: nothing after it can be trusted."""


class LineSplitter:
    """Chunks of bytes in, complete lines out (without their newline). Keeps at most `cap` bytes."""

    def __init__(self, cap: int = MAX_LINE) -> None:
        self._cap = cap
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises LineTooLong when an unfinished or finished line is longer than the cap."""
        first, *rest = chunk.split(b"\n")
        self._keep(first)
        lines: list[bytes] = []
        for part in rest:
            lines.append(self.finish())
            self._keep(part)
        return lines

    def finish(self) -> bytes:
        """What is left without a newline; the splitter is empty afterwards."""
        line = b"".join(self._parts)
        self._parts, self._size = [], 0
        return line

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._cap:
            raise LineTooLong(f"a line of more than {self._cap} bytes")
        if part:
            self._parts.append(part)


def parse(line: bytes) -> JSON | None:
    """The frame of a line; None for anything that is not a JSON object (old CLIs print notices in between)."""
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: "[[[[…" is no frame either
        return None
    return frame if isinstance(frame, dict) else None


def _line(frame: JSON) -> bytes:
    # ensure_ascii: a lone surrogate, NUL or U+2028 goes through as an escape and can never break a line.
    return json.dumps(frame, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def user_frame(uuid: str, content: Sequence[Block]) -> bytes:
    """One prompt as a line for stdin. Without `client_composed` a prompt `/clear` wipes the session (facts)."""
    message = {"role": "user", "content": list(content)}
    return _line({"type": "user", "uuid": uuid, "client_composed": True, "message": message})


def control_request(request_id: str, subtype: str, **fields: Any) -> bytes:
    """A request on the control channel: `initialize`, `interrupt`, `set_model` (field `model`)."""
    return _line({"type": "control_request", "request_id": request_id, "request": {"subtype": subtype, **fields}})


# --- prompts for CLIs that interpret them ------------------------------------------------------------------
#
# Read in 1.0.120's program text and run on it and, unmarked, on 2.1.329: only the LAST block of a prompt is
# interpreted, and only when it is text: a leading "/" is a command, (^|\s)@name a file of this machine whose
# content goes to the model. A last block that holds neither makes the whole prompt mere words.

_FILE_REFERENCE = re.compile(r"(?:^|[\s\ufeff])@\S")
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
    last = blocks[-1]
    if capability.client_composed or last.get("type") != "text":
        return None
    text = str(last.get("text", ""))
    if _is_plain(text) or _plain_tail(text) is not None:
        return None
    return f"Claude CLI {capability.version} would run this prompt as a command or a file reference; upgrade the CLI"


# --- one turn's frames to events ----------------------------------------------------------------------------

# What of an answer reaches a client; every other block belongs to the CLI's own tools.
ANSWER_BLOCKS = frozenset({"text", "thinking", "redacted_thinking"})
SYNTHETIC_MODEL = "<synthetic>"  # messages the CLI makes itself: API errors, "No response requested."
_TAG = "user_message_uuids"
_RESULT_DETAIL = (
    "api_error_type", "api_error", "errors", "permission_denials", "structured_output", "modelUsage", "duration_ms",
    "duration_api_ms", "ttft_ms",
)  # fmt: skip


class TurnReader:
    """Reads the frames of one turn, in order, and says what they mean.

    - Blocks are numbered over the whole turn, however many API calls it takes; the CLI's own tools and its
      sub-agents are `ToolActivity`, never blocks.
    - With `frame_uuid`, a result of another frame is ignored: where the CLI tags (2.1.x), only the result that
      lists ours ends the turn.
    - Without partial messages (1.0.17) the block events are made from the assistant frames.
    - `garbage` counts what was no frame at all.
    """

    def __init__(self, frame_uuid: str | None = None) -> None:
        self._uuid = frame_uuid
        self._tagged = False
        self._next = 0
        self._open: dict[int, int] = {}  # index within the API message -> index within the turn
        self._streaming: str | None = None
        self._streamed: set[str] = set()
        self._rate_limit: JSON | None = None
        self.garbage = 0

    def feed(self, frame: JSON | None) -> list[CliEvent]:
        """The events of one frame; None stands for a line that was no frame."""
        if frame is None:
            self.garbage += 1
            return [Activity("garbage")]
        if self._uuid is not None and self._uuid in (frame.get(_TAG) or ()):
            self._tagged = True
        kind = str(frame.get("type"))
        if frame.get("parent_tool_use_id") is not None:
            return _tools(frame, agent=str(frame["parent_tool_use_id"])) or [Activity("sub_agent")]
        match kind:
            case "stream_event":
                return self._stream(_dict(frame.get("event"))) or [Activity(kind)]
            case "assistant":
                return self._assistant(frame)
            case "user":
                return _tools(frame) or [Activity(kind)]
            case "result":
                return self._result(frame)
            case "system":
                return self._system(frame)
            case "conversation_reset":
                return [SessionSeen(str(frame.get("session_id", "")), kind)]
            case "rate_limit_event":
                self._rate_limit = _dict(frame.get("rate_limit_info"))
        return [Activity(kind)]

    def _system(self, frame: JSON) -> list[CliEvent]:
        subtype = str(frame.get("subtype"))
        if subtype == "api_retry":
            return [ApiRetry(_without_ids(frame))]
        if subtype == "compact_boundary":
            return [Compacted(_without_ids(frame))]
        if subtype in {"init", "conversation_reset"} and frame.get("session_id"):
            return [SessionSeen(str(frame["session_id"]), subtype)]
        return [Activity(subtype)]

    def _stream(self, event: JSON) -> list[CliEvent]:
        match event.get("type"):
            case "message_start":
                # A call that is repeated after a cut leaves its blocks open: they end here.
                events = self._close_all()
                self._streaming = str(_dict(event.get("message")).get("id"))
                return events
            case "content_block_start":
                block = _dict(event.get("content_block"))
                self._mark_streamed()
                if block.get("type") not in ANSWER_BLOCKS:
                    return []
                index = self._open[_index(event)] = self._number()
                return [BlockStart(index, block)]
            case "content_block_delta" if _index(event) in self._open:
                return [BlockDelta(self._open[_index(event)], _dict(event.get("delta")))]
            case "content_block_stop" if _index(event) in self._open:
                return [BlockStop(self._open.pop(_index(event)))]
        return []

    def _mark_streamed(self) -> None:
        if self._streaming is not None:
            self._streamed.add(self._streaming)

    def _close_all(self) -> list[CliEvent]:
        events: list[CliEvent] = [BlockStop(index) for index in self._open.values()]
        self._open.clear()
        return events

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _assistant(self, frame: JSON) -> list[CliEvent]:
        message = _dict(frame.get("message"))
        model = message.get("model")
        if model == SYNTHETIC_MODEL or frame.get("is_api_error_message") or frame.get("isApiErrorMessage"):
            return [Activity("synthetic")]
        blocks = tuple(block for block in _blocks(message) if block.get("type") in ANSWER_BLOCKS)
        events: list[CliEvent] = [] if str(message.get("id")) in self._streamed else self._made(blocks)
        said = AssistantMessage(_text(frame.get("uuid")), _text(message.get("id")), _text(model), blocks)
        return [*events, said, *_tools(frame)]

    def _made(self, blocks: tuple[Block, ...]) -> list[CliEvent]:
        """The block events of an answer that came whole."""
        events = self._close_all()
        for block in blocks:
            index = self._number()
            start, deltas = _as_stream(block)
            events += [BlockStart(index, start), *(BlockDelta(index, delta) for delta in deltas), BlockStop(index)]
        return events

    def _result(self, frame: JSON) -> list[CliEvent]:
        ours = frame.get(_TAG)
        if self._uuid is not None and (self._tagged if ours is None else self._uuid not in ours):
            return [Activity("result_of_another_frame")]
        session_id = str(frame.get("session_id", ""))
        status = frame.get("api_error_status")
        cost = frame.get("total_cost_usd")
        detail = {name: frame[name] for name in _RESULT_DETAIL if frame.get(name) not in (None, [], {})}
        if self._rate_limit is not None:
            detail["rate_limit"] = self._rate_limit
        result = Result(
            session_id=session_id,
            is_error=bool(frame.get("is_error")),
            subtype=str(frame.get("subtype", "")),
            text=_text(frame.get("result")) or "",
            stop_reason=_text(frame.get("stop_reason")),
            terminal_reason=_text(frame.get("terminal_reason")),
            api_error_status=status if isinstance(status, int) else None,
            usage=_usage(_dict(frame.get("usage"))),
            cost_total_usd=float(cost) if isinstance(cost, int | float) else None,
            num_turns=_count(frame.get("num_turns")),
            detail=detail,
        )
        seen = [SessionSeen(session_id, "result")] if session_id else []
        return [*self._close_all(), *seen, result]


def _dict(value: object) -> JSON:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _index(event: JSON) -> int:
    return _count(event.get("index"))


def _without_ids(frame: JSON) -> JSON:
    return {name: value for name, value in frame.items() if name not in {"type", "subtype", "uuid", "session_id"}}


def _blocks(message: JSON) -> list[Block]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _usage(usage: JSON) -> Usage:
    return Usage(
        input_tokens=_count(usage.get("input_tokens")),
        output_tokens=_count(usage.get("output_tokens")),
        cache_read_tokens=_count(usage.get("cache_read_input_tokens")),
        cache_write_tokens=_count(usage.get("cache_creation_input_tokens")),
        thinking_tokens=_count(_dict(usage.get("output_tokens_details")).get("thinking_tokens")),
    )


def _tools(frame: JSON, agent: str | None = None) -> list[CliEvent]:
    """Calls and results of the CLI's own tools in an assistant or user frame."""
    by = {} if agent is None else {"parent_tool_use_id": agent}
    return [
        ToolActivity({**block, **by})
        for block in _blocks(_dict(frame.get("message")))
        if str(block.get("type")).endswith(("tool_use", "tool_result"))
    ]


def _as_stream(block: Block) -> tuple[Block, list[Block]]:
    if block.get("type") == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text", "")}]
    if block.get("type") == "thinking":
        deltas: list[Block] = [{"type": "thinking_delta", "thinking": block.get("thinking", "")}]
        if block.get("signature"):
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    return dict(block), []
