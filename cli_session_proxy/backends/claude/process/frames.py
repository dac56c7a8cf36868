"""The CLI's stream-json: writes prompts as lines, and parses output into frames. `turn_reader` interprets frames."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from ....domain import limits
from ....domain.models import JSON, Block
from .capability import Capability

# The longest line. A 3 MB answer is one line of 3 MB (2.1.329); a longer line is no answer of a model.
MAX_LINE = 64 * 1024 * 1024
# The most output of one turn: a million tokens come in less than 100 MB. A program that imitates the CLI could go on
# until `turn_timeout`, and everything is kept in memory until then.
MOST_OF_A_TURN = 4 * MAX_LINE
# Bytes that are counted for each line and each value beyond their own size, because parsed objects need more memory:
# 77 MB of `{"a":0}` took 2 GB.
A_LINE, A_VALUE, FEW_VALUES = 256, 128, 64
# A character that is written as `\u…` and is not in Latin-1: a text with one takes up to four bytes for each character.
# Four frames of 55 MB with an emoji each took 1.2 GB.
WIDE = re.compile(rb"\\u(?!00)[0-9a-fA-F]{4}")


# --- input


def line(frame: JSON) -> bytes:
    """A frame as a line for stdin."""
    # ensure_ascii: a lone surrogate, NUL or U+2028 becomes an escape and can never break a line.
    return json.dumps(frame, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def user_frame(uuid: str, content: Sequence[Block], capability: Capability) -> bytes:
    """One prompt as a line for stdin, in blocks that this CLI passes to the model unchanged.

    Without the field `client_composed` a prompt `/clear` would wipe the session (2.1.329). For a CLI without that field
    the last text is split if necessary: the model gets the same characters in two text blocks of one message. Call
    `unsafe_prompt` first: a prompt that cannot be split is sent unchanged.
    """
    blocks = list(content)
    if not capability.client_composed and blocks and blocks[-1].get("type") == "text":
        text = str(blocks[-1].get("text", ""))
        cut = None if _is_plain(text) else _plain_tail(text)
        if cut is not None:
            blocks[-1:] = [{**blocks[-1], "text": text[:cut]}, {"type": "text", "text": text[cut:]}]
    message = {"role": "user", "content": blocks}
    return line({"type": "user", "uuid": uuid, "client_composed": True, "message": message})


def control_request(request_id: str, subtype: str, **fields: Any) -> bytes:
    """A request on the control channel: `initialize`, `interrupt`, `set_model` (field `model`)."""
    return line({"type": "control_request", "request_id": request_id, "request": {"subtype": subtype, **fields}})


def printable(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8 form, by U+FFFD, as the CLI would do for the model."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- output

# The frame types that matter in a turn.
FRAMES = frozenset(
    {
        "system",
        "assistant",
        "user",
        "stream_event",
        "result",
        "control_request",
        "conversation_reset",
        "rate_limit_event",
    }
)
STDERR_TAIL = 16 * 1024
NOTICES, NOTICE = (
    4,
    500,
)  # lines of stdout that are no frames, and bytes of each, kept for errors
READ_SIZE = 256 * 1024
INBOX = 256  # frames that are buffered for the listener; then reading stops, and the CLI waits
DRAIN_WAIT = 1.0  # seconds for the last bytes of a dead process; a descendant may hold its output open for ever


class UnreadableOutput(ValueError):
    """The CLI's output is invalid from here on. The message describes it."""


class LineTooLong(UnreadableOutput):
    """A line is longer than the limit."""


class FrameTooDeep(UnreadableOutput):
    """A frame nests too deep. The CLI's own frames do not, but arguments of a model's call can."""


class FrameTooDense(UnreadableOutput):
    """A frame has too many JSON values: parsing 60 MB of them would block the event loop for seconds."""


class LineSplitter:
    """Splits chunks of bytes into complete lines (without newline). Buffers at most `cap` bytes."""

    def __init__(self, cap: int = MAX_LINE) -> None:
        self._cap = cap
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes. Raises LineTooLong, also for an unfinished line."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if max([self._size, *map(len, lines)]) > self._cap:
            raise LineTooLong(f"a line of more than {self._cap} bytes")
        return lines


def parse(line: bytes) -> JSON | None:
    """The frame of a line; None for anything that is not a JSON object (old CLIs print notices in between).

    Raises FrameTooDeep and FrameTooDense: such a frame must not be skipped, the CLI may wait for an answer to it.
    """
    if limits.is_dense(line):
        raise FrameTooDense(f"a line of more than {limits.LINE_VALUES} values")
    try:
        # Never as UTF-16. Strictly: no CLI could load a record with what only Python takes for JSON.
        frame = limits.loads(line.decode("utf-8", "surrogatepass"), limits.FRAME_DEPTH, strict=True)
    except limits.TooDeep as exc:
        if line.lstrip().startswith(b"{"):
            raise FrameTooDeep(f"a frame that is nested deeper than {limits.FRAME_DEPTH} levels") from exc
        return None
    except ValueError:
        return None
    return frame if isinstance(frame, dict) else None


class End:
    """The end of the output."""


class Output(asyncio.Protocol):
    """Reads stdout and stderr of a process all the time, so that it never blocks on a full pipe. Frames that arrive
    while a turn listens belong to that turn; others are dropped. Of stderr the end is kept.

    It is the asyncio protocol of stdout. Until `begin`, bytes are buffered.
    """

    def __init__(self) -> None:
        self.started = asyncio.Event()  # its first output has come, or never will
        self.spoke = False  # it has printed something
        self.ended = False
        self.at_end = asyncio.get_running_loop().create_future()  # of its stdout
        self.failure: str | None = None
        self.writes_lost: str | None = None  # why it could not write its transcript, if it reported that
        self._splitter = LineSplitter()
        self._lines: deque[bytes] = deque()  # not parsed yet: the inbox is full
        self._heard: deque[JSON | None] = deque()  # frames for the listener; None: a line that was no frame
        self.listening = False  # a turn reads frames with `next`; else they are dropped
        self._said = 0  # bytes of the present turn
        self._more: asyncio.Future[None] | None = None  # what the listener waits for: a frame, or the end
        self._replies: dict[str, asyncio.Future[JSON | None]] = {}
        self._begun = self._lost = self._paused = False
        self._tail = bytearray()
        self._notices: deque[bytes] = deque(maxlen=NOTICES)

    def begin(
        self,
        stderr: asyncio.StreamReader,
        *,
        asked: Callable[[JSON], None],
        broken: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """`asked` gets each control request of the CLI, before the listener does; `broken` is called for invalid output
        (see `failure`), `ended` at the end of stdout."""
        self._asked, self._broken, self._tell_end = asked, broken, ended
        self._begun = True
        self._reading_stderr = asyncio.create_task(self._read_stderr(stderr))
        if self.failure is not None:
            broken()
        self._take()

    @property
    def stderr(self) -> str:
        """The last 16 KB of stderr."""
        return self._tail.decode(errors="replace")

    @property
    def notices(self) -> str:
        """The last lines of stdout that were no frames."""
        return b"\n".join(self._notices).decode(errors="replace")

    def reply(self, request_id: str) -> asyncio.Future[JSON | None]:
        """Its answer to our control request: `request_id`, `subtype` (`success` or `error`), `response`; None if it
        ends before. Cancel the future to give up."""
        coming = self._replies[request_id] = asyncio.get_running_loop().create_future()
        coming.add_done_callback(lambda _: self._replies.pop(request_id, None))
        if self.ended:
            coming.set_result(None)
        return coming

    # --- the listener

    def listen(self) -> None:
        """A turn begins."""
        self.listening, self._said = True, 0

    async def next(self) -> JSON | End | None:
        """The next frame; None for a line that was no frame. `End` at the end of output, and after `leave`."""
        while not self._heard:
            if self.ended or not self.listening:
                return End()
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        frame = self._heard.popleft()
        if self._paused or self._lost:
            self._take()
        return frame

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def leave(self) -> bool:
        """Drop its output from now on. Returns whether a turn was listening."""
        listened, self.listening, self._said = self.listening, False, 0
        self._heard.clear()
        self._take()
        self._wake()
        return listened

    # --- its end

    async def last_words(self) -> None:
        """Wait for the end of its stderr."""
        await asyncio.wait([self._reading_stderr], timeout=DRAIN_WAIT)

    async def drained(self) -> None:
        """Wait for the end of both."""
        await asyncio.wait([self.at_end, self._reading_stderr], timeout=DRAIN_WAIT)

    async def close(self) -> None:
        self._end()
        self._reading_stderr.cancel()
        await asyncio.wait([self._reading_stderr])

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.started.set()
        self.at_end.set_result(None)
        self._tell_end()
        for waiting in list(self._replies.values()):
            if not waiting.done():
                waiting.set_result(None)
        self._wake()

    # --- stdout, as the event loop calls it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stdout = cast(asyncio.ReadTransport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        if not self.spoke:
            self.spoke = True
            self.started.set()
        self.count(data)
        if self.failure is None:  # else only drain it
            try:
                self._lines.extend(filter(bytes.strip, self._splitter.feed(data)))
            except UnreadableOutput as exc:
                self._unreadable(exc)
            self._take()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if exc is not None:  # a read error, or an exception in our callbacks
            self._lines.clear()
        self._take()

    def count(self, data: bytes) -> None:
        """Count output, and our answers to its requests: a short request may have a long answer."""
        self._said += len(data) + A_LINE * data.count(b"\n")
        self._check_count()

    def _check_count(self) -> None:
        if self._said > MOST_OF_A_TURN and self.failure is None:
            self._unreadable(UnreadableOutput(f"more than {MOST_OF_A_TURN} bytes in one turn, or between two"))

    def _unreadable(self, why: UnreadableOutput) -> None:
        self.failure = f"it printed {why}"
        self._lines.clear()
        if self._begun:
            self._broken()

    def _take(self) -> None:
        """Parse lines while the inbox has room. The rest stays buffered, and reading is paused."""
        while self._begun and self._lines and len(self._heard) < INBOX:
            printed = self._lines.popleft()
            if limits.most_values(printed) > FEW_VALUES:
                self._said += A_VALUE * max(0, limits.values_in(printed) - FEW_VALUES)
            if WIDE.search(printed):
                self._said += 3 * len(printed)
            elif not printed.isascii():
                self._said += max(0, sys.getsizeof(printed.decode(errors="replace")) - len(printed))
            if self._said > MOST_OF_A_TURN and self.failure is None:
                self._check_count()
                break
            try:
                frame = parse(printed)
            except UnreadableOutput as exc:
                self._unreadable(exc)
                break
            match frame:
                case None:
                    self._notices.append(printed[:NOTICE])
                case {"type": "control_request"}:
                    self._asked(frame)
                case {"type": "control_response", "response": {"request_id": named} as replied}:
                    coming = self._replies.get(str(named))
                    if coming is not None and not coming.done():
                        coming.set_result(replied)
                case {"type": "system", "subtype": "session_writes_lost"}:
                    transcript = "transcript" in str(frame.get("lost"))  # else only its settings were lost
                    self.writes_lost = str(frame.get("error_code")) if transcript else None
            if self.listening:
                self._heard.append(frame)
        if self._heard:
            self._wake()
        if self._lost:
            if self._begun and not self._lines:
                self._end()
        elif self._paused != bool(self._lines) and not self._stdout.is_closing():
            self._paused = not self._paused
            self._stdout.pause_reading() if self._paused else self._stdout.resume_reading()

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(READ_SIZE):
            self._tail += chunk
            del self._tail[:-STDERR_TAIL]
            self.count(chunk)


# --- prompts for CLIs that interpret them ------------------------------------------------------------------
#
# Read in 1.0.120's program text and run on it and, unmarked, on 2.1.329: only the LAST block of a prompt is
# interpreted, and only when it is text: a leading "/" is a command, (^|\s)@name a file of this machine whose
# content goes to the model. A last block that holds neither makes the whole prompt mere words.

_FILE_REFERENCE = re.compile(r"(?:^|[\s\ufeff])@\S")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_FIRST = frozenset("/@!#")


def _is_plain(text: str) -> bool:
    """Whether a CLI passes this text on as it is: no command, no reference to a file."""
    return not text.lstrip().startswith("/") and _FILE_REFERENCE.search(text) is None


def _plain_tail(text: str) -> int | None:
    """The start of the shortest tail of `text` that a CLI cannot interpret; None if there is none."""
    for start in range(len(text.rstrip()) - 1, 0, -1):
        first = text[start]
        if not first.isspace() and first not in _NOT_FIRST and first.isprintable():
            return start if _is_plain(text[start:]) else None
    return None


def unsafe_prompt(capability: Capability, content: str | Sequence[Block]) -> str | None:
    """Why this CLI cannot pass this prompt to the model unchanged; None if it can.

    `content`: a text, or blocks. Empty text: 2.1.329 replaces it by "(no content)", and the provider refuses it.
    """
    blocks: Sequence[Block] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not blocks:
        return "the prompt is empty"
    if all(block.get("type") == "text" and not str(block.get("text", "")).strip() for block in blocks):
        return "the prompt is empty or only whitespace"
    if any(_SURROGATE.search(str(block.get("text", ""))) for block in blocks if block.get("type") == "text"):
        return "the prompt holds half a surrogate pair, which is not a character: the CLI would replace it"
    last = blocks[-1]
    if not capability.takes_blocks and (len(blocks) > 1 or last.get("type") != "text"):
        return capability.cannot("blocks", "take an image or a second block in a prompt")
    if capability.client_composed:  # the frame is marked: the CLI interprets nothing in it
        return None
    if last.get("type") != "text":  # only a last block of text is interpreted
        return None
    text = str(last.get("text", ""))
    if _is_plain(text):
        return None
    if capability.takes_blocks and _plain_tail(text) is not None:  # sent as two blocks, of which the last is plain
        return None
    return capability.cannot(
        "words", "pass this prompt on as plain text (it would run this prompt as a command, or read a file)"
    )
