"""Converts the frames of one turn to events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from ....domain.blocks import as_stream
from ....domain.client_tools import ToolPolicy
from ....domain.evidence import CacheMiss
from ....domain.forms import replace
from ....domain.limits import MOST_COUNTED, MOST_USD, count, is_session_id
from ....domain.models import JSON, NO_USAGE, Block, BlockDelta, BlockStart, BlockStop, Usage
from ...base import Abandoned, Activity, Called, Compacted, PermissionWithdrawn, PlanTold, Retried, ToolActivity
from . import permissions
from .events import AssistantMessage, CallRefused, CliEvent, Declined, Result, SessionFrame, Truncated
from .tool_server import called_in

T = TypeVar("T")

# The block types that clients get; all others belong to the CLI's own tools.
ANSWER_BLOCKS = frozenset({"text", "thinking", "redacted_thinking"})
ANSWER_FRAMES = frozenset({"stream_event", "assistant", "user"})
PIECES = frozenset({"text", "thinking", "signature"})  # fields of deltas
WORDS = frozenset({"text", "tool_use"})  # without one of these an answer says nothing
LONGEST_REASON, LONGEST_NAME = 64, 4096  # characters of a field's name; of a tool's name, a call's id, a reason
FEW = 32  # fields that are kept of a retry or a compaction
# Characters of an answer and of its result's text that are compared. Longer ones are forged: 60 MB take 10 s.
LONGEST_COMPARED = 4 * 1024 * 1024
HALF_AN_ANSWER = "the provider's stream was cut, and the CLI took half the answer for the whole: send it again"
NO_CLIENT = "No client runs this tool now: it was called outside of a client's turn."
ENDS = ("end_turn", "stop_sequence")  # stop reasons after which the CLI sends no more requests
SYNTHETIC_MODEL = "<synthetic>"  # messages the CLI makes itself: API errors, "No response requested."
_PROMPTS = "user_message_uuids"
_CODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
REFUSAL = "refusal"
# A refusal in a result of a CLI without partial messages: 1.0 has no other sign of it (1.0.120).
_POLICY = "appears to violate our Usage Policy"
_SUMMARY = "This session is being continued from a previous conversation"  # its beginning (1.0.120 to 2.1.332)
_RESULT_DETAIL = (
    "api_error_type", "api_error", "errors", "permission_denials", "structured_output", "modelUsage", "duration_ms",
    "duration_api_ms", "ttft_ms", "startup_failure_reason",
)  # fmt: skip


@dataclass(slots=True)
class CallReader:
    """Decides about each call once, when its arguments are known. `ToolPolicy.examine` has seen the call before."""

    policy: ToolPolicy | None
    _message: str | None = None
    _decided: dict[str, Block | CallRefused | None] = field(default_factory=dict)
    accepted: list[Block] = field(default_factory=list)  # calls of the present message that the client gets
    for_client: set[str] = field(default_factory=set)  # ids of all calls that the client gets

    def message(self, message_id: str | None) -> None:
        """A message of the model begins."""
        if message_id != self._message:
            self._message = message_id
            self.accepted = []

    def decide(self, block: Block) -> Block | CallRefused | None:
        """The call under the client's name, or a refusal; None if the tool is not the client's."""
        call = str(block.get("id"))
        if call not in self._decided:
            verdict = self._decided[call] = self._verdict(block, call)
            if isinstance(verdict, dict):
                self.accepted.append(verdict)
                self.for_client.add(call)
        return self._decided[call]

    def knows(self, call: str | None) -> bool:
        return call in self._decided

    def _verdict(self, block: Block, call: str) -> Block | CallRefused | None:
        tool = self.policy.tool(str(block.get("name"))) if self.policy else None
        if self.policy is None or tool is None:
            return None
        why = self.policy.refusal(tool, len(self.accepted)) or self.policy.fault(tool, call)
        if why is not None:
            return CallRefused(call, why)
        return {**block, "name": tool.name}


class TurnReader:
    """Reads the frames of one turn in order, and returns events.

    - Blocks are numbered over the whole turn, however many API calls it takes; the CLI's own tools and its
      sub-agents are `ToolActivity`, never blocks.
    - A stream that the provider cut gives `Abandoned`, with the unfinished blocks. Blocks that were finished before
    have their `AssistantMessage`, and stay.
    - With `frame_uuid`, the result of another prompt is ignored. CLI 2.1.x names the prompts in its frames: there, only
      the result that names ours ends the turn. `names_first`: an answer began, and our prompt had been named. If it was
      so in earlier turns (`named`), an answer that begins without it is ignored: the CLI has prompted itself. So is one
      that begins while the CLI says that it has our prompt in its queue (2.1.329).
    - Without partial messages (1.0.17) the block events are made from the assistant frames.
    - With `policy`, calls of the client's tools are blocks, too, under the client's names. They come when their message
    is complete, and the turn ends with `Called`. The same reader continues after the results (`go_on`).
    - A message that ends at `max_tokens` is `Truncated` before the CLI asks for more.
    - A refusal gives `Declined` at once: later frames of the CLI about it are not read.
    - For a CLI with unknown frame or block types: if no assistant frame had text, the answer is what was streamed. If
    the result's text is not in the answer, it is appended. Without any text the result is `empty`.
    - `said_all`: the model has finished its answer, and only the result is missing.
    - `call_without_frame`: the CLI asked the client's tool server for a call that no assistant frame had.
    - `garbage` counts lines that were no frames.
    """

    def __init__(self, frame_uuid: str | None = None, policy: ToolPolicy | None = None, *, named: bool = False) -> None:
        self._uuid = frame_uuid
        self._named = named
        self.names_first = False
        self._calls = CallReader(policy)
        self._used = NO_USAGE  # of complete messages
        self._reported = NO_USAGE  # the part already reported to earlier turns
        self._using: JSON = {}  # of the message that is being streamed
        self._counted: Usage | None = NO_USAGE  # all of it; None: not added up since it has changed
        self._prompt_named = False  # by a frame of this turn: `frame_uuid` was in it
        self._queued = False  # the CLI has our prompt, and has not begun with it
        self._next = 0
        self._streaming: str | None = None  # the API message that is being streamed
        self._whole = False  # that message has a stop reason: only its `message_stop` is missing
        self._blocks: dict[int, int] = {}  # its blocks: index in the message -> index in the turn
        self._open: set[int] = set()  # open blocks, by index in the message
        self._streamed: set[str] = set()  # messages that were streamed at least in part
        self._last: object = None  # the last frame's uuid
        self._stopped_at: str | None = None  # a stop sequence, by the provider
        self._cache_miss: CacheMiss | None = None  # of the newest request
        self._truncated = False  # what follows is not part of the answer
        self._rate_limit: JSON | None = None
        self._spoke = False  # an assistant frame had text or calls
        self._texts: list[str] = []  # of assistant frames
        self._synthetic = False  # the CLI wrote a message in the model's place
        self._pieces: dict[int, list[Block]] = {}  # by block: streamed, and not yet in an assistant frame
        self._asked: set[str] = set()  # permission requests
        self.said_all = False
        self.call_without_frame = False

    def go_on(self, policy: ToolPolicy | None) -> None:
        """The results were sent: what follows is another turn of the client."""
        self._calls.policy = policy
        self._next = 0
        self._spoke = False
        self._texts.clear()

    @property
    def used(self) -> Usage:
        """Usage of the turn so far, from its streams."""
        if self._counted is None:
            self._counted = self._used.plus(_usage(self._using)).minus(self._reported)
        return self._counted

    def feed(self, frame: JSON | None) -> list[CliEvent]:
        """The events of one frame; None: a line that was no frame."""
        if frame is None:
            return [Activity("garbage")]
        name = frame.get("uuid")
        if name is not None and name == self._last:
            return [Activity("repeated")]
        self._last = name
        if self._uuid is not None and not self._prompt_named:
            self._prompt_named = self._uuid in _prompts_of(frame)
        kind = str(frame.get("type"))
        if kind in ("stream_event", "assistant"):
            self.names_first |= self._prompt_named
        if kind == "command_lifecycle" and self._uuid is not None and frame.get("command_uuid") == self._uuid:
            self._queued = frame.get("state") == "queued"
        if (self._named or self._queued) and not self._prompt_named:
            # A refusal before any turn names no prompt either, but has no origin.
            if kind in ANSWER_FRAMES or (kind == "result" and ("origin" in frame or not frame.get("is_error"))):
                return [Activity("of_another_prompt")]
            if _is_call(frame):
                return [CallRefused(called_in(frame), NO_CLIENT)]
        if frame.get("parent_tool_use_id") is not None:
            agent = _short(str(frame["parent_tool_use_id"]))
            return self._tools(_blocks(_dict(frame.get("message"))), agent) or [Activity("sub_agent")]
        match kind:
            case "stream_event":
                return self._stream(_dict(frame.get("event")), frame.get("abandoned_blocks")) or [Activity(kind)]
            case "assistant":
                return self._assistant(frame)
            case "user":
                return self._tools(_blocks(_dict(frame.get("message")))) or [Activity(kind)]
            case "control_request" if _is_call(frame):
                self.call_without_frame = self._calls.policy is not None and not self._calls.knows(called_in(frame))
                return (self._called() if self._streaming is None else []) or [Activity(kind)]
            case "control_request" if permissions.is_asked(frame):
                asked = permissions.read(frame)
                again = asked.request_id in self._asked
                self._asked.add(asked.request_id)
                return [Activity("repeated") if again else asked]
            case "control_cancel_request":
                return [PermissionWithdrawn(str(frame.get("request_id")))]
            case "result":
                return self._result(frame)
            case "system":
                subtype = str(frame.get("subtype"))
                match subtype:
                    case "api_retry":
                        return [Retried(_facts(frame))]
                    case "compact_boundary":
                        return [Compacted({"compact_metadata": _facts(_dict(frame.get("compact_metadata")))})]
                    case "init" | "conversation_reset":
                        return [_session_in(frame, subtype)]
                return [Activity(subtype)]
            case "conversation_reset":
                return [_session_in(frame, kind)]
            case "rate_limit_event":
                self._rate_limit = _dict(frame.get("rate_limit_info"))
                return [PlanTold(self._rate_limit)]
        return [Activity(kind)]

    def _stream(self, event: JSON, abandoned: object) -> list[CliEvent]:
        """`abandoned`: after a cut, CLI 2.1 says in the `message_stop` from which block on they are void."""
        at = count(event.get("index"))
        match event.get("type"):
            case "message_start":
                events = self._cut_short()
                message = _dict(event.get("message"))
                self._streaming = str(message.get("id"))
                self._whole = self.said_all = False
                self._blocks = {}
                self._calls.message(self._streaming)
                self._using, self._counted = dict(_dict(message.get("usage"))), None
                return events
            case "content_block_start":
                block = _dict(event.get("content_block"))
                if self._streaming is not None and block.get("type") == "redacted_thinking":
                    self._streamed.add(self._streaming)
                if not _is_sound(block) or block.get("type") not in ANSWER_BLOCKS:
                    return []
                index = self._blocks[at] = self._next
                self._next += 1
                self._open.add(at)
                if not self._spoke:
                    self._pieces[index] = [block]
                return [BlockStart(index, block)]
            case "content_block_delta" if at in self._open:
                delta, index = _dict(event.get("delta")), self._blocks[at]
                if not _is_sound(delta):
                    return []
                if index in self._pieces:
                    self._pieces[index].append(delta)
                if self._streaming is not None and not PIECES.isdisjoint(delta):
                    self._streamed.add(self._streaming)
                return [BlockDelta(index, delta)]
            case "content_block_stop" if at in self._open:
                self._open.remove(at)
                return [BlockStop(self._blocks[at])]
            case "message_delta":
                self._using.update(_dict(event.get("usage")))
                self._counted = None
                delta = _dict(event.get("delta"))
                self._whole = bool(delta.get("stop_reason"))
                self.said_all = delta.get("stop_reason") in ENDS
                self._stopped_at = _short(_text(delta.get("stop_sequence")))
                if "diagnostics" in delta:
                    self._cache_miss = _cache_miss(_dict(delta["diagnostics"]))
                if delta.get("stop_reason") == "max_tokens":
                    self._truncated = True
                    return [*self._close_all(), Truncated(self.used)]
                if delta.get("stop_reason") == REFUSAL and not self._truncated:
                    details = _dict(delta.get("stop_details"))
                    category, explanation = _text(details.get("category")), _text(details.get("explanation"))
                    return [*self._close_all(), Declined(_short(category), _short(explanation), self.used)]
            case "message_stop":
                has_begun, self._streaming = self._streaming is not None, None
                self._used, self._using, self._counted = self._used.plus(_usage(self._using)), {}, None
                if not isinstance(abandoned, dict) or not has_begun:  # a second end has no meaning
                    return self._called()
                first = count(abandoned.get("from_block_index"))
                return [*self._abandon(at for at in self._blocks if at >= first), *self._called()]
        return []

    def _cut_short(self) -> list[CliEvent]:
        """Another message begins. If a stream has not ended, it was cut: its open blocks stay unfinished.

        CLI 1.0.120 does not report a cut: it asks again without streaming, and sends that answer as another message.
        """
        was_cut = self._streaming is not None and not self._whole
        self._streaming = None
        return self._abandon(self._open) if was_cut else self._close_all()

    def _abandon(self, blocks: Iterable[int]) -> list[CliEvent]:
        void = frozenset(self._blocks[at] for at in blocks)
        for index in void:
            self._pieces.pop(index, None)
        return [*self._close_all(), Abandoned(void)]

    def _called(self) -> list[CliEvent]:
        """The end of a message that called the client's tools: the calls as blocks, then `Called`."""
        calls, self._calls.accepted = tuple(self._calls.accepted), []
        if not calls:
            return []
        used, self._reported, self._counted = self._used.minus(self._reported), self._used, None
        return [*self._as_streamed(calls), Called(calls, used)]

    def _close_all(self) -> list[CliEvent]:
        events: list[CliEvent] = [BlockStop(self._blocks[at]) for at in sorted(self._open)]
        self._open.clear()
        return events

    def _assistant(self, frame: JSON) -> list[CliEvent]:
        message = _dict(frame.get("message"))
        if "content" not in message:
            return [Activity("assistant")]
        model = message.get("model")
        if model == SYNTHETIC_MODEL or frame.get("is_api_error_message") or frame.get("isApiErrorMessage"):
            self._synthetic = True
            return [Activity("synthetic")]
        message_id = str(message.get("id"))
        cut = self._cut_short() if message_id != self._streaming else []
        self._calls.message(message_id)
        answer: list[Block] = []
        words: list[Block] = []
        refused: list[CallRefused] = []
        blocks = _blocks(message)
        for block in blocks:
            if block.get("type") in ANSWER_BLOCKS:
                answer.append(block)
                words.append(block)
                if block["type"] == "text":
                    self._texts.append(str(block.get("text", "")))
            elif block.get("type") == "tool_use":
                verdict = self._calls.decide(block)
                if isinstance(verdict, CallRefused):
                    refused.append(verdict)
                elif verdict is not None:
                    answer.append(verdict)
        if answer:
            self._pieces.clear()
            self._spoke = self._spoke or any(block.get("type") in WORDS for block in answer)
        events = [] if message_id in self._streamed else self._as_streamed(words)
        said = AssistantMessage(_text(frame.get("uuid")), _text(model), tuple(answer))
        return [*cut, *events, said, *refused, *self._tools(blocks)]

    def _tools(self, blocks: Iterable[Block], agent: str | None = None) -> list[CliEvent]:
        """Tool calls and results of the CLI or a sub-agent among the blocks of an assistant or user frame, without
        those of the client."""
        by = {} if agent is None else {"parent_tool_use_id": agent}
        for_client = self._calls.for_client if agent is None else ()
        return [
            ToolActivity({**block, **by})
            for block in blocks
            if str(block.get("type")).endswith(("tool_use", "tool_result"))
            and block.get("id", block.get("tool_use_id")) not in for_client
        ]

    def _as_streamed(self, blocks: Iterable[Block]) -> list[CliEvent]:
        """The block events of an answer that was not streamed."""
        events = self._close_all()
        for block in blocks:
            index, self._next = self._next, self._next + 1
            start, deltas = as_stream(block)
            events += [BlockStart(index, start), *(BlockDelta(index, delta) for delta in deltas), BlockStop(index)]
        return events

    def _result(self, frame: JSON) -> list[CliEvent]:
        if self._uuid is not None:
            # CLI 1.x, and a refusal before any turn, name no prompt. A CLI that named ours does so in its result, too.
            names_none = frame.get(_PROMPTS) is None
            if (names_none and self._prompt_named) or (not names_none and self._uuid not in _prompts_of(frame)):
                return [Activity("result_of_another_frame")]
        cut = self._cut_short()
        # 1.0.120 reports success if a block was finished before the cut, with that block as the answer.
        was_cut = any(isinstance(event, Abandoned) for event in cut)
        half_is_reported = was_cut and frame.get("subtype") == "success" and not frame.get("is_error")
        seen = _session_in(frame, "result")
        status = frame.get("api_error_status")
        text = _text(frame.get("result")) or ""
        declined = frame.get("stop_reason") == REFUSAL or _POLICY in text
        if frame.get("is_error") and declined and not self._truncated:  # else the answer had already ended
            return [*cut, Declined(None, None, _usage(_dict(frame.get("usage"))).minus(self._reported))]
        cost = frame.get("total_cost_usd")
        detail = {name: frame[name] for name in _RESULT_DETAIL if frame.get(name) not in (None, [], {})}
        if self._rate_limit is not None:
            detail["rate_limit"] = self._rate_limit
        result = Result(
            session_id=seen.session_id if isinstance(seen, SessionFrame) else "",
            # 1.0.120 reports a cut answer as `error_during_execution` with `is_error` false.
            is_error=half_is_reported or bool(frame.get("is_error")) or str(frame.get("subtype")).startswith("error"),
            subtype=_short(str(frame.get("subtype", ""))),
            text=HALF_AN_ANSWER if half_is_reported else text,
            stop_reason=_code(frame.get("stop_reason")),
            terminal_reason=_short(_text(frame.get("terminal_reason"))),
            api_error_status=status if isinstance(status, int) else None,
            usage=_usage(_dict(frame.get("usage"))).minus(self._reported),
            cost_total_usd=float(cost) if isinstance(cost, int | float) and 0 <= cost <= MOST_USD else None,
            detail=detail,
            stop_sequence=self._stopped_at,
            cache_miss=self._cache_miss,
            names_prompt=self._prompt_named,
        )
        said: list[CliEvent] = []
        if not (result.is_error or self._truncated or (self._texts and self._texts[-1] == text)):
            said = self._missing_parts(text)
            empty = not self._spoke and not said and self._stopped_at is None
            result = replace(result, empty=empty)
        return [*cut, *said, *([seen] if isinstance(seen, SessionFrame) else []), result]

    def _missing_parts(self, text: str) -> list[CliEvent]:
        """Parts of the answer that were in no assistant frame: streamed ones, and the result's text."""
        if len(text) + sum(map(len, self._texts)) > LONGEST_COMPARED:
            return []
        streamed = [_block_of(pieces) for pieces in self._pieces.values()]
        said = [str(block["text"]) for block in streamed if block.get("type") == "text"]
        if not any(map(str.strip, said)):
            streamed = []
        events: list[CliEvent] = [AssistantMessage(None, None, tuple(streamed))] if streamed else []
        bare = "".join(text.split())
        # Messages of the CLI in the model's place are no answer.
        if bare and not self._synthetic and bare not in "".join("".join([*self._texts, *said]).split()):
            block: Block = {"type": "text", "text": text}
            events += [*self._as_streamed([block]), AssistantMessage(None, None, (block,))]
        return events


def _session_in(frame: JSON, cause: str) -> SessionFrame | Activity:
    """The session in a frame. An invalid id is ignored, because ids become file names."""
    named = frame.get("session_id")
    return SessionFrame(named, cause) if is_session_id(named) else Activity(cause)


def _is_call(frame: JSON) -> bool:
    """Whether the CLI asks for a call of a client's tool."""
    return _dict(_dict(frame.get("request")).get("message")).get("method") == "tools/call"


def _prompts_of(frame: JSON) -> list[object]:
    """The uuids of the prompts to which a frame belongs."""
    named = frame.get(_PROMPTS)
    return named if isinstance(named, list) else [named]


def calls_in(frame: JSON | None) -> list[Block]:
    """The model's calls in this frame. `ToolPolicy.examine` gets them before the reader gets the frame."""
    if frame is None or frame.get("type") != "assistant" or frame.get("parent_tool_use_id") is not None:
        return []
    return [block for block in _blocks(_dict(frame.get("message"))) if block.get("type") == "tool_use"]


def told_in(frame: JSON | None) -> JSON | None:
    """The message in this frame that the model is shown later: its own words, the results of its calls, or
    what the CLI adds to a result (a skill, a document). None for anything else: a message of a sub-agent, a summary, or
    an error that the CLI writes as if it were the model."""
    if frame is None or frame.get("parent_tool_use_id") is not None or frame.get("type") not in ("assistant", "user"):
        return None
    message, by_cli = _dict(frame.get("message")), frame.get("isSynthetic") or frame.get("isMeta")
    # The provider would refuse a call without arguments, and all turns that follow.
    content = [one for one in _blocks(message) if one.get("type") != "tool_use" or isinstance(one.get("input"), dict)]
    is_words = frame["type"] == "assistant" and message.get("model") != SYNTHETIC_MODEL
    is_result = frame["type"] == "user" and any(block.get("type") == "tool_result" for block in content)
    is_summary = any(str(block.get("text", "")).startswith(_SUMMARY) for block in content)
    if not (is_words or is_result or (frame["type"] == "user" and by_cli and content and not is_summary)):
        return None
    return {**message, "role": frame["type"], "content": content}


def _dict(value: object) -> JSON:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _code(value: object) -> str | None:
    """A provider's code. Anything else was forged, and no import would take it."""
    return value if isinstance(value, str) and _CODE.fullmatch(value) else None


def _short(value: T) -> T:
    """The value; a text is cut to the length of a name, because watchers are shown it."""
    return value[:LONGEST_NAME] if isinstance(value, str) else value  # type: ignore[return-value]  # a text, too


def _facts(told: JSON) -> JSON:
    """The texts and numbers among the first of these, but for ids. They are kept and shown as they are, so none is
    longer than a name, or more than can be counted."""
    few = [(name, _short(value)) for name, value in islice(told.items(), FEW) if len(name) <= LONGEST_REASON]
    plain = [
        (name, value)
        for name, value in few
        if isinstance(value, str) or (isinstance(value, int | float) and abs(value) <= MOST_COUNTED)
    ]
    return {name: value for name, value in plain if name not in ("type", "subtype", "uuid", "session_id")}


def _blocks(message: JSON) -> list[Block]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = content if isinstance(content, list) else ()
    return [block for block in blocks if isinstance(block, dict) and _is_sound(block)]


def _is_sound(piece: JSON) -> bool:
    """Whether a block is valid: names are short texts, and text and thinking have their field. Frames may be forged,
    and later readers rely on this. A block with `cache_control` is invalid: no CLI prints one, and the provider refuses
    a request with more than four."""
    kind, inner = piece.get("type"), piece.get("content")
    marked = [piece, *inner] if isinstance(inner, list) else [piece]
    if any(isinstance(one, dict) and "cache_control" in one for one in marked):
        return False
    words = _WORDS_OF.get(kind) if isinstance(kind, str) else None
    if words is not None and words not in piece:
        return False
    for name, value in piece.items():
        if name not in _TEXTS:
            continue
        if isinstance(value, str):
            if name in _NAMES and len(value) > LONGEST_NAME:
                return False
        elif value is not None or name == words:
            return False
    return True


_NAMES = frozenset({"type", "id", "tool_use_id", "name"})
_TEXTS = _NAMES | {"text", "thinking", "signature", "partial_json", "data", "title"}
_WORDS_OF = {
    "text": "text", "thinking": "thinking", "text_delta": "text", "thinking_delta": "thinking",
    "signature_delta": "signature", "input_json_delta": "partial_json",
}  # fmt: skip


def _usage(usage: JSON) -> Usage:
    return Usage(
        input_tokens=count(usage.get("input_tokens")),
        output_tokens=count(usage.get("output_tokens")),
        cache_read_tokens=count(usage.get("cache_read_input_tokens")),
        cache_write_tokens=count(usage.get("cache_creation_input_tokens")),
        thinking_tokens=count(_dict(usage.get("output_tokens_details")).get("thinking_tokens")),
    )


def _block_of(pieces: Sequence[Block]) -> Block:
    """The complete block of its start and its deltas."""
    block = dict(pieces[0])
    for name in ("text", "thinking", "signature"):
        if said := [piece[name] for piece in pieces if isinstance(piece.get(name), str)]:
            block[name] = "".join(said)
    return block


def _cache_miss(diagnostics: JSON) -> CacheMiss | None:
    """Why the provider's cache missed; available if the CLI's account has cache diagnostics."""
    said = _dict(diagnostics.get("cache_miss_reason"))
    reason, tokens = _code(said.get("type")), said.get("cache_missed_input_tokens")
    return None if reason is None else CacheMiss(reason, count(tokens) or None)
