"""Splits the records of a transcript into exchanges, at each prompt of a person. Pure.

Records without a prompt (the CLI's own notes and attachments, a compaction and its summary) belong to the next
exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ....domain.client_tools import PREFIX
from ....domain.limits import count
from ....domain.models import JSON, Block, Message, Usage
from .. import transcript
from ..process.turn_reader import SYNTHETIC_MODEL
from ..transcript import Entry, mending

# Beginnings of user records that are no prompts of a person (seen on 1.0.120 and 2.1.329).
_COMMAND = "<command-"
_INTERRUPTION = "[Request interrupted by user"
_COMMAND_OUTPUT = ("<local-command-", "<bash-stdout>", "<bash-stderr>", _INTERRUPTION)

# Marks the result that the CLI invents for a call without one, after its proxy had died (run on 2.1.330).
_DENIAL = "toolDenialKind"
_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class TranscriptExchange:
    """The records of one turn in the order of the file, including those of sub-agents and notes."""

    entries: tuple[Entry, ...]

    @property
    def path(self) -> list[Entry]:
        return transcript.conversation_of(self.entries)

    @property
    def complete(self) -> bool:
        """Whether the exchange ends with an answer, and the CLI invented no result for a client's tool in it."""
        path = self.path
        if not transcript.is_complete(path):
            return False
        names = _tools_by_call(path)
        interrupted = [entry for entry in path if entry.data.get(_DENIAL) == _INTERRUPTED]
        # An unknown call may be one of a client's tool: it counts as one.
        tools = (names.get(str(block.get("tool_use_id")), PREFIX) for block in _results(interrupted))
        return not any(name.startswith(PREFIX) for name in tools)

    @property
    def input(self) -> tuple[Message, ...]:
        """The prompt, without tool results and the CLI's own texts. A command (`/compact`) is the prompt only if there
        is no other."""
        entries = [entry for entry in self.path if is_prompt(entry)]
        entries = entries or [entry for entry in self.path if _is_request(entry)]
        prompt = tuple(block for entry in entries for block in entry.content if block.get("type") != "tool_result")
        return (Message("user", prompt),) if prompt else ()

    @property
    def output(self) -> tuple[Block, ...]:
        """The answer, without calls of the CLI's own tools, as in a turn of ours."""
        blocks = (block for entry in self._answers() for block in entry.content)
        return tuple(block for block in blocks if block.get("type") != "tool_use")

    @property
    def tools(self) -> tuple[JSON, ...]:
        content = (block for entry in self.path for block in entry.content)
        return tuple(block for block in content if block.get("type") in ("tool_use", "tool_result"))

    @property
    def model(self) -> str | None:
        names = (str(entry.data["message"].get("model") or SYNTHETIC_MODEL) for entry in self._answers())
        return next((name for name in names if name != SYNTHETIC_MODEL), None)

    @property
    def usage(self) -> Usage:
        """Summed over the API's messages; the CLI repeats a message's usage in the record of each of its blocks."""
        per_message: dict[str, JSON] = {}
        for entry in self._answers():
            message = entry.data["message"]
            per_message[str(message.get("id") or entry.uuid)] = message.get("usage") or {}
        fields = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return Usage(*(sum(count(usage.get(name)) for usage in per_message.values()) for name in fields))

    @property
    def compacted(self) -> JSON | None:
        """The last compaction before or in this exchange, as the CLI described it."""
        for entry in reversed(self.path):
            if is_compaction(entry):
                detail = entry.data.get("compactMetadata")
                return detail if isinstance(detail, dict) else {}
        return None

    @property
    def at(self) -> float | None:
        """The time of its first record that has one."""
        return next((at for entry in self.entries if (at := time_of(entry)) is not None), None)

    def _answers(self) -> list[Entry]:
        return [entry for entry in self.path if entry.kind == "assistant"]


def exchanges(entries: Iterable[Entry]) -> Iterator[TranscriptExchange]:
    """Split records in the order of the file. Only one exchange is in memory at a time.

    The last one may be incomplete.
    """
    current: list[Entry] = []
    waiting: list[Entry] = []
    answered = command = False
    for entry in entries:
        answers = entry.in_conversation and entry.kind == "assistant"
        if answered and (is_prompt(entry) or (answers and command)):
            yield TranscriptExchange(tuple(current))
            current, answered = [], False
        waiting.append(entry)
        # after an answer, records that are no messages belong to the next exchange
        if answered and not answers and not any(_results([entry])):
            command = command or (_is_persons(entry) and _opens_with(entry, (_COMMAND,)))
            continue
        current += waiting
        waiting, command = [], False
        answered = answered or answers
    if current or waiting:
        yield TranscriptExchange((*current, *waiting))


def has_invented_result(entries: Sequence[Entry], sent: Sequence[Block] = ()) -> bool:
    """Whether the CLI invented a result: one that is not in `sent`, for a client's tool or for an unknown call.

    An "interrupted" result is invented. If a proxy dies while calls wait, the CLI invents a result for each, asks the
    model to go on, and records all of it like any other exchange. So only results that we sent are valid, byte for
    byte; any other one and the model's answer to it are dropped. This includes results for earlier calls: a person
    continues a session with a prompt.
    """
    names = _tools_by_call(entries)
    for block in _results(entries):
        name = names.get(str(block.get("tool_use_id")))
        if (name is None or name.startswith(PREFIX)) and block not in sent:
            return True
    return False


def _tools_by_call(entries: Iterable[Entry]) -> dict[str, str]:
    """The names of the called tools, by call id."""
    blocks = (block for entry in entries if entry.in_conversation for block in entry.content)
    return {str(block.get("id")): str(block.get("name")) for block in blocks if block.get("type") == "tool_use"}


def _results(entries: Iterable[Entry]) -> Iterator[Block]:
    blocks = (block for entry in entries if entry.in_conversation for block in entry.content)
    return (block for block in blocks if block.get("type") == "tool_result")


def is_compaction(entry: Entry) -> bool:
    return entry.data.get("subtype") == "compact_boundary"


def _is_persons(entry: Entry) -> bool:
    """Whether a user record is a person's: no summary, caveat or notification of the CLI, nor its message to the model
    near a usage limit ("Checkpoint now: …")."""
    data = entry.data
    own = data.get("isMeta") or data.get("isCompactSummary") or data.get("promptSource") == "system"
    own = own or data.get("turnCompanion") or data.get("usageLimitNote")
    return entry.in_conversation and entry.kind == "user" and not own


def _is_request(entry: Entry) -> bool:
    """Whether it is a person's prompt or command, and not a command's output."""
    return _is_persons(entry) and not _opens_with(entry, _COMMAND_OUTPUT)


def is_prompt(entry: Entry) -> bool:
    has_words = any(block.get("type") != "tool_result" for block in entry.content)
    return has_words and _is_request(entry) and not _opens_with(entry, (_COMMAND, mending.RESULT))


def is_interruption(entry: Entry) -> bool:
    """Whether the CLI recorded an interruption. (1.0.120 may do this in place of the answer.)"""
    return _is_persons(entry) and _opens_with(entry, (_INTERRUPTION,))


def _opens_with(entry: Entry, starts: tuple[str, ...]) -> bool:
    first = next((block for block in entry.content if block.get("type") == "text"), {})
    return str(first.get("text", "")).lstrip().startswith(starts)


def time_of(entry: Entry) -> float | None:
    """The record's time in seconds; None if it has no valid one."""
    return transcript.seconds(str(entry.data.get("timestamp")))
