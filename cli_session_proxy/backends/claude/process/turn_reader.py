"""What the CLI's frames mean: one turn's, in order, to events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ....domain.client_tools import ToolPolicy
from ....domain.evidence import CacheMiss
from ....domain.limits import MOST_USD, count, is_session_id
from ....domain.models import JSON, Block, BlockDelta, BlockStart, BlockStop, Usage
from ...base import Abandoned, Activity, Called, Compacted, PermissionWithdrawn, PlanTold, Retried, ToolActivity
from . import permissions
from .events import AssistantMessage, CallRefused, CliEvent, Declined, Result, SessionFrame, Truncated
from .tool_server import called_in

T = TypeVar("T")

# What of an answer reaches a client; every other block belongs to the CLI's own tools.
ANSWER_BLOCKS = frozenset({"text", "thinking", "redacted_thinking"})
PIECES = frozenset({"text", "thinking", "signature"})  # what a delta of these brings
WORDS = frozenset({"text", "tool_use"})  # without one of these an answer says nothing
LONGEST_REASON, LONGEST_NAME = 64, 4096  # characters of a provider's code; of a tool, a call or a reason
# Of an answer and its result's text, without blanks. Longer ones are a shell's, in the CLI's place: 60 MB take 10 s.
LONGEST_COMPARED = 4 * 1024 * 1024
HALF_AN_ANSWER = "the provider's stream was cut, and the CLI took what it had for the whole answer: send it again"
ENDS = ("end_turn", "stop_sequence")  # the reasons to stop behind which the CLI asks the model nothing more
SYNTHETIC_MODEL = "<synthetic>"  # messages the CLI makes itself: API errors, "No response requested."
_TAG = "user_message_uuids"
REFUSAL = "refusal"
# How a CLI without partial messages says it: 1.0 has no other mark (its result of a refusal, 1.0.120).
_POLICY = "appears to violate our Usage Policy"
_RESULT_DETAIL = (
    "api_error_type", "api_error", "errors", "permission_denials", "structured_output", "modelUsage", "duration_ms",
    "duration_api_ms", "ttft_ms", "startup_failure_reason",
)  # fmt: skip


@dataclass(slots=True)
class CallReader:
    """Decides each call once, when its arguments are known. The judge has examined a call before it is decided here."""

    judge: ToolPolicy | None  # the rules from here on
    _message: str | None = None
    _decided: dict[str, Block | CallRefused | None] = field(default_factory=dict)
    accepted: list[Block] = field(default_factory=list)  # of the present message
    ours: set[str] = field(default_factory=set)  # every call that came out

    def message(self, message_id: str | None) -> None:
        """What follows belongs to this message of the model."""
        if message_id != self._message:
            self._message = message_id
            self.accepted = []

    def decide(self, block: Block) -> Block | CallRefused | None:
        """The call under the client's name, or why it is refused; None for a tool that is not the client's."""
        call = str(block.get("id"))
        if call not in self._decided:
            verdict = self._decided[call] = self._verdict(block, call)
            if isinstance(verdict, dict):
                self.accepted.append(verdict)
                self.ours.add(call)
        return self._decided[call]

    def knows(self, call: str | None) -> bool:
        return call in self._decided

    def _verdict(self, block: Block, call: str) -> Block | CallRefused | None:
        tool = self.judge.tool(str(block.get("name"))) if self.judge else None
        if self.judge is None or tool is None:
            return None
        why = self.judge.refusal(tool, len(self.accepted)) or self.judge.fault(tool, call)
        if why is not None:
            return CallRefused(call, why)
        return {**block, "name": tool.name}


class TurnReader:
    """Reads the frames of one turn, in order, and says what they mean.

    - Blocks are numbered over the whole turn, however many API calls it takes; the CLI's own tools and its
      sub-agents are `ToolActivity`, never blocks.
    - A stream that the provider cut is `Abandoned`, with the blocks that the CLI gave up. Blocks that it finished
      before the cut have their `AssistantMessage`, and stay.
    - With `frame_uuid`, a result of another frame is ignored: where the CLI tags (2.1.x), only the result that
      lists ours ends the turn.
    - Without partial messages (1.0.17) the block events are made from the assistant frames.
    - With `judge`, calls of the client's tools are blocks too, under the client's names. They come when their
      message is complete, and it ends with `Called`. The reader is kept for what follows the results (`go_on`).
    - A message that ends at `max_tokens` is `Truncated` before the CLI asks for more.
    - A refusal is `Declined`, at the first word of it: what the CLI makes of it comes later, and is not read.
    - A CLI whose frames or blocks have other names than we know: where no assistant frame brought words, the answer is
      what was streamed. Where the result's text is not among the words, it follows them. Without any the result is
      `silent`.
    - `said_all`: the model has ended its answer by itself, and only the result is missing.
    - `untold_call`: it makes a call of the client's that stood in no frame before.
    - `garbage` counts what was no frame at all.
    """

    def __init__(self, frame_uuid: str | None = None, judge: ToolPolicy | None = None) -> None:
        self._uuid = frame_uuid
        self._calls = CallReader(judge)
        self._used = Usage()  # by the messages that are complete
        self._told = Usage()  # of it, what earlier turns of the client were told
        self._using: JSON = {}
        self._tagged = False
        self._next = 0
        self._streaming: str | None = None  # the API message whose stream has begun and not ended
        self._whole = False  # that message has a reason to stop: only its `message_stop` is missing
        self._blocks: dict[int, int] = {}  # of that message: index within it -> index within the turn
        self._open: set[int] = set()  # of these, by index within the message
        self._streamed: set[str] = set()  # messages of which a piece has come
        self._last: object = None  # the uuid of the frame before
        self._stopped_at: str | None = None  # a stop sequence, by the provider
        self._cache_miss: CacheMiss | None = None  # of the newest request
        self._truncated = False  # what the CLI asks for behind that is nobody's
        self._rate_limit: JSON | None = None
        self._spoke = False  # an assistant frame brought words or calls
        self._texts: list[str] = []  # of these frames
        self._synthetic = False  # the CLI spoke in the model's place
        self._pieces: dict[int, list[Block]] = {}  # until it spoke: what was streamed and not heard whole, by block
        self._asked: set[str] = set()  # its questions whether a tool may run
        self.said_all = False
        self.untold_call = False
        self.garbage = 0

    def go_on(self, judge: ToolPolicy | None) -> None:
        """The results are on their way: what follows is another turn of the client's."""
        self._calls.judge = judge
        self._next = 0
        self._spoke = False
        self._texts.clear()

    @property
    def used(self) -> Usage:
        """What the turn has used until now, where its streams told it."""
        return self._used.plus(_usage(self._using)).minus(self._told)

    def feed(self, frame: JSON | None) -> list[CliEvent]:
        """The events of one frame; None stands for a line that was no frame."""
        if frame is None:
            self.garbage += 1
            return [Activity("garbage")]
        name = frame.get("uuid")
        if name is not None and name == self._last:
            return [Activity("repeated")]
        self._last = name
        if self._uuid is not None and self._uuid in _tags(frame):
            self._tagged = True
        kind = str(frame.get("type"))
        if frame.get("parent_tool_use_id") is not None:
            return self._tools(frame, agent=str(frame["parent_tool_use_id"])) or [Activity("sub_agent")]
        match kind:
            case "stream_event":
                return self._stream(_dict(frame.get("event")), frame.get("abandoned_blocks")) or [Activity(kind)]
            case "assistant":
                return self._assistant(frame)
            case "user":
                return self._tools(frame) or [Activity(kind)]
            case "control_request" if _dict(_dict(frame.get("request")).get("message")).get("method") == "tools/call":
                self.untold_call = self._calls.judge is not None and not self._calls.knows(called_in(frame))
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
                        told = _without_ids(frame).items()
                        return [Retried({name: _short(value) for name, value in told if not _is_nested(value)})]
                    case "compact_boundary":
                        return [Compacted(_without_ids(frame))]
                    case "init" | "conversation_reset":
                        return [_seen(frame, subtype)]
                return [Activity(subtype)]
            case "conversation_reset":
                return [_seen(frame, kind)]
            case "rate_limit_event":
                self._rate_limit = _dict(frame.get("rate_limit_info"))
                return [PlanTold(self._rate_limit)]
        return [Activity(kind)]

    def _stream(self, event: JSON, abandoned: object) -> list[CliEvent]:
        """`abandoned` stands at the `message_stop` that CLI 2.1 makes of a cut: from which block on they are void."""
        at = count(event.get("index"))
        match event.get("type"):
            case "message_start":
                events = self._cut_short()
                message = _dict(event.get("message"))
                self._streaming = str(message.get("id"))
                self._whole = self.said_all = False
                self._blocks = {}
                self._calls.message(self._streaming)
                self._using = dict(_dict(message.get("usage")))
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
                    return [*self._close_all(), Declined(category, explanation, self.used)]
            case "message_stop":
                has_begun, self._streaming = self._streaming is not None, None
                self._used = self._used.plus(_usage(self._using))
                self._using = {}
                if not isinstance(abandoned, dict) or not has_begun:  # a second end says no more
                    return self._called()
                first = count(abandoned.get("from_block_index"))
                return [*self._abandon(at for at in self._blocks if at >= first), *self._called()]
        return []

    def _cut_short(self) -> list[CliEvent]:
        """Something else begins. A stream that is still without its end was cut: what it left open stays so.

        CLI 1.0.120 says nothing at a cut, asks without a stream and gives that answer as another message.
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
        """The message is complete: its calls, if it makes any of the client's."""
        calls, self._calls.accepted = tuple(self._calls.accepted), []
        if not calls:
            return []
        used, self._told = self._used.minus(self._told), self._used
        return [*self._made(calls), Called(calls, used)]

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
        for block in _blocks(message):
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
        events = [] if message_id in self._streamed else self._made(words)
        said = AssistantMessage(_text(frame.get("uuid")), _text(model), tuple(answer))
        return [*cut, *events, said, *refused, *self._tools(frame)]

    def _tools(self, frame: JSON, agent: str | None = None) -> list[CliEvent]:
        """What the CLI (or a sub-agent of it) does with tools by itself, in an assistant or user frame.

        The client's calls and their results are the client's business.
        """
        by = {} if agent is None else {"parent_tool_use_id": agent}
        ours = self._calls.ours if agent is None else ()
        return [
            ToolActivity({**block, **by})
            for block in _blocks(_dict(frame.get("message")))
            if str(block.get("type")).endswith(("tool_use", "tool_result"))
            and block.get("id", block.get("tool_use_id")) not in ours
        ]

    def _made(self, blocks: Iterable[Block]) -> list[CliEvent]:
        """The block events of an answer that came whole."""
        events = self._close_all()
        for block in blocks:
            index, self._next = self._next, self._next + 1
            start, deltas = _as_stream(block)
            events += [BlockStart(index, start), *(BlockDelta(index, delta) for delta in deltas), BlockStop(index)]
        return events

    def _result(self, frame: JSON) -> list[CliEvent]:
        if self._uuid is not None and (self._tagged if frame.get(_TAG) is None else self._uuid not in _tags(frame)):
            return [Activity("result_of_another_frame")]
        cut = self._cut_short()
        # 1.0.120 calls it a success where a block was finished before the cut, and gives that block as the answer.
        was_cut = any(isinstance(event, Abandoned) for event in cut)
        half = was_cut and frame.get("subtype") == "success" and not frame.get("is_error")
        seen = _seen(frame, "result")
        status = frame.get("api_error_status")
        text = _text(frame.get("result")) or ""
        declined = frame.get("stop_reason") == REFUSAL or _POLICY in text
        if frame.get("is_error") and declined and not self._truncated:  # else the answer had ended before
            return [*cut, Declined(None, None, _usage(_dict(frame.get("usage"))).minus(self._told))]
        cost = frame.get("total_cost_usd")
        detail = {name: frame[name] for name in _RESULT_DETAIL if frame.get(name) not in (None, [], {})}
        if self._rate_limit is not None:
            detail["rate_limit"] = self._rate_limit
        result = Result(
            session_id=seen.session_id if isinstance(seen, SessionFrame) else "",
            # 1.0.120 calls an answer that broke off `error_during_execution`, and `is_error` false.
            is_error=half or bool(frame.get("is_error")) or str(frame.get("subtype")).startswith("error"),
            subtype=_short(str(frame.get("subtype", ""))),
            text=HALF_AN_ANSWER if half else text,
            stop_reason=_short(_text(frame.get("stop_reason"))),
            terminal_reason=_short(_text(frame.get("terminal_reason"))),
            api_error_status=status if isinstance(status, int) else None,
            usage=_usage(_dict(frame.get("usage"))).minus(self._told),
            cost_total_usd=float(cost) if isinstance(cost, int | float) and 0 <= cost <= MOST_USD else None,
            num_turns=count(frame.get("num_turns")),
            detail=detail,
            stop_sequence=self._stopped_at,
            cache_miss=self._cache_miss,
            tagged=self._tagged,
        )
        said: list[CliEvent] = []
        if not (result.is_error or self._truncated or (self._texts and self._texts[-1] == text)):
            said = self._unheard(text)
            silent = not self._spoke and not said and self._stopped_at is None
            result = replace(result, silent=silent)
        return [*cut, *said, *([seen] if isinstance(seen, SessionFrame) else []), result]

    def _unheard(self, text: str) -> list[CliEvent]:
        """What of the answer no assistant frame brought: what was streamed of it, and the text of the result."""
        if len(text) + sum(map(len, self._texts)) > LONGEST_COMPARED:
            return []
        streamed = [_whole(pieces) for pieces in self._pieces.values()]
        said = [str(block["text"]) for block in streamed if block.get("type") == "text"]
        if not any(map(str.strip, said)):
            streamed = []
        events: list[CliEvent] = [AssistantMessage(None, None, tuple(streamed))] if streamed else []
        bare = "".join(text.split())
        # What the CLI says in the model's place is no answer.
        if bare and not self._synthetic and bare not in "".join("".join([*self._texts, *said]).split()):
            block: Block = {"type": "text", "text": text}
            events += [*self._made([block]), AssistantMessage(None, None, (block,))]
        return events


def _seen(frame: JSON, cause: str) -> SessionFrame | Activity:
    """The session that a frame names. What is no session id is as good as none: it would become a path."""
    named = frame.get("session_id")
    return SessionFrame(named, cause) if is_session_id(named) else Activity(cause)


def _tags(frame: JSON) -> list[object]:
    """The prompts that a frame belongs to."""
    named = frame.get(_TAG)
    return named if isinstance(named, list) else [named]


def calls_in(frame: JSON | None) -> list[Block]:
    """The calls that the model makes in this frame: the judge examines them before the frame is fed."""
    if frame is None or frame.get("type") != "assistant" or frame.get("parent_tool_use_id") is not None:
        return []
    return [block for block in _blocks(_dict(frame.get("message"))) if block.get("type") == "tool_use"]


def _dict(value: object) -> JSON:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _is_nested(value: object) -> bool:
    return isinstance(value, dict | list)


def _short(value: T) -> T:
    """The same; of a text, no more than a name has. It is shown to everybody who looks what a turn does."""
    return value[:LONGEST_NAME] if isinstance(value, str) else value  # type: ignore[return-value]  # a text, too


def _without_ids(frame: JSON) -> JSON:
    return {name: value for name, value in frame.items() if name not in {"type", "subtype", "uuid", "session_id"}}


def _blocks(message: JSON) -> list[Block]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = content if isinstance(content, list) else ()
    return [block for block in blocks if isinstance(block, dict) and _is_sound(block)]


def _is_sound(piece: JSON) -> bool:
    """Names and words are texts, names short ones, and no text or thought lacks its words: a shell in its CLI's place
    may send anything, and later readers rely on that, the overview of all agents too."""
    words = _WORDS_OF.get(str(piece.get("type")))
    whole = words is None or isinstance(piece.get(words), str)
    named = all(isinstance(piece.get(name), str | None) for name in _TEXTS)
    return whole and named and all(len(piece.get(name) or "") <= LONGEST_NAME for name in _NAMES)


_NAMES = ("type", "id", "tool_use_id", "name")
_TEXTS = (*_NAMES, "text", "thinking", "signature", "partial_json", "data")
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


def _whole(pieces: Sequence[Block]) -> Block:
    """A block that was streamed: its start, then its deltas."""
    block = dict(pieces[0])
    for name in ("text", "thinking", "signature"):
        if said := [piece[name] for piece in pieces if isinstance(piece.get(name), str)]:
            block[name] = "".join(said)
    return block


def _cache_miss(diagnostics: JSON) -> CacheMiss | None:
    """Why the provider's cache missed. The CLI asks for it where its account has cache diagnostics."""
    said = _dict(diagnostics.get("cache_miss_reason"))
    reason, tokens = _text(said.get("type")), said.get("cache_missed_input_tokens")
    return CacheMiss(reason[:LONGEST_REASON], tokens if isinstance(tokens, int) else None) if reason else None


def _as_stream(block: Block) -> tuple[Block, list[Block]]:
    if block.get("type") == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text", "")}]
    if block.get("type") == "thinking":
        deltas: list[Block] = [{"type": "thinking_delta", "thinking": block.get("thinking", "")}]
        if block.get("signature"):
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    if block.get("type") == "tool_use":
        arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return dict(block), []
