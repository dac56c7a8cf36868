"""Cuts the records of a transcript into exchanges, at each prompt of a person. Pure.

What belongs to nobody's prompt (the CLI's own notes and attachments, a compaction and its summary) goes with the
exchange that follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ....domain.client_tools import PREFIX
from ....domain.limits import count
from ....domain.models import JSON, Block, Message, Usage
from .. import transcript
from ..transcript import Entry

# How the CLI opens user records that nobody typed as a prompt (seen on 1.0.120 and 2.1.329).
_COMMAND = "<command-"
_STOPPED = "[Request interrupted by user"
_OUTPUT = ("<local-command-", "<bash-stdout>", "<bash-stderr>", _STOPPED)

# How the CLI marks the result of a call that nobody gave a result to, because its proxy was gone (run on 2.1.330).
_DENIAL = "toolDenialKind"
_INTERRUPTED = "interrupted"

# The model's name in records that the CLI wrote in the model's place.
_NO_MODEL = "<synthetic>"


@dataclass(frozen=True, slots=True)
class TranscriptExchange:
    """The records of one turn, in the order of the file, with everything of sub-agents and notes in between."""

    entries: tuple[Entry, ...]

    @property
    def path(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.on_path]

    @property
    def complete(self) -> bool:
        """It ends with an answer, and the CLI gave no call of a client's tool a result of its own."""
        path = self.path
        if not transcript.is_complete(path):
            return False
        names = _calls(path)
        marked = [entry for entry in path if entry.data.get(_DENIAL) == _INTERRUPTED]
        callers = (names.get(str(block.get("tool_use_id")), PREFIX) for block in _results(marked))
        return not any(name.startswith(PREFIX) for name in callers)

    @property
    def input(self) -> tuple[Message, ...]:
        """What was asked, without tools' results and the CLI's own words; a command only where nothing else was."""
        asking = [entry for entry in self.path if is_prompt(entry)] or [entry for entry in self.path if _asks(entry)]
        asked = tuple(block for entry in asking for block in entry.content if _is_words(block))
        return (Message("user", asked),) if asked else ()

    @property
    def output(self) -> tuple[Block, ...]:
        """All that was answered, without the calls of the CLI's own tools, as in a turn of ours."""
        said = (block for entry in self._answers() for block in entry.content)
        return tuple(block for block in said if block.get("type") != "tool_use")

    @property
    def tools(self) -> tuple[JSON, ...]:
        content = (block for entry in self.path for block in entry.content)
        return tuple(block for block in content if block.get("type") in ("tool_use", "tool_result"))

    @property
    def model(self) -> str | None:
        named = (str(entry.data["message"].get("model") or _NO_MODEL) for entry in self._answers())
        return next((name for name in named if name != _NO_MODEL), None)

    @property
    def usage(self) -> Usage:
        """Summed over the API's messages; the CLI repeats a message's usage in the record of each of its blocks."""
        per_message: dict[str, JSON] = {}
        for entry in self._answers():
            message = entry.data["message"]
            per_message[str(message.get("id") or entry.uuid)] = message.get("usage") or {}
        every = list(per_message.values())
        return Usage(
            input_tokens=_sum(every, "input_tokens"),
            output_tokens=_sum(every, "output_tokens"),
            cache_read_tokens=_sum(every, "cache_read_input_tokens"),
            cache_write_tokens=_sum(every, "cache_creation_input_tokens"),
        )

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
        """When it began, by its first record that has a time."""
        return next((at for entry in self.entries if (at := began(entry)) is not None), None)

    def _answers(self) -> list[Entry]:
        return [entry for entry in self.path if entry.kind == "assistant"]


def exchanges(entries: Iterable[Entry]) -> Iterator[TranscriptExchange]:
    """Cut records, in the order of the file, one exchange at a time: only one is held in memory.

    The last one may be open (`complete` is False).
    """
    current: list[Entry] = []
    waiting: list[Entry] = []
    answered = command = False
    for entry in entries:
        answers = entry.on_path and entry.kind == "assistant"
        if answered and (is_prompt(entry) or (answers and command)):
            yield TranscriptExchange(tuple(current))
            current, answered = [], False
        waiting.append(entry)
        # after an answer, what is not spoken waits for who speaks next
        if answered and not answers and not any(_results([entry])):
            command = command or (_typed(entry) and _opens_with(entry, (_COMMAND,)))
            continue
        current += waiting
        waiting, command = [], False
        answered = answered or answers
    if current or waiting:
        yield TranscriptExchange((*current, *waiting))


def invented(entries: Sequence[Entry], brought: Sequence[Block] = ()) -> bool:
    """Whether the CLI made up a result: one that is not in `brought`, for a client's tool or for an unknown call.

    An interrupted result is no result. A CLI whose proxy dies while calls wait makes up a result for each, asks the
    model to go on, and writes all of it down like any other exchange. So only results that we brought count, to the
    letter: every other one, and what the model said to it, is nobody's. A result to an earlier call is one of these:
    whoever else goes on in a session of ours begins with a prompt.
    """
    names = _calls(entries)
    for block in _results(entries):
        name = names.get(str(block.get("tool_use_id")))
        if (name is None or name.startswith(PREFIX)) and block not in brought:
            return True
    return False


def _calls(entries: Iterable[Entry]) -> dict[str, str]:
    """The names of the tools that are called in these records, by call."""
    blocks = (block for entry in entries if entry.on_path for block in entry.content)
    return {str(block.get("id")): str(block.get("name")) for block in blocks if block.get("type") == "tool_use"}


def _results(entries: Iterable[Entry]) -> Iterator[Block]:
    blocks = (block for entry in entries if entry.on_path for block in entry.content)
    return (block for block in blocks if block.get("type") == "tool_result")


def is_compaction(entry: Entry) -> bool:
    return entry.data.get("subtype") == "compact_boundary"


def _typed(entry: Entry) -> bool:
    """A user record that is not the CLI's own: no summary, no caveat, no notification, and not what it says to the
    model near a usage limit ("Checkpoint now: …")."""
    data = entry.data
    own = data.get("isMeta") or data.get("isCompactSummary") or data.get("promptSource") == "system"
    own = own or data.get("turnCompanion") or data.get("usageLimitNote")
    return entry.on_path and entry.kind == "user" and not own


def _asks(entry: Entry) -> bool:
    return _typed(entry) and not _opens_with(entry, _OUTPUT)


def is_prompt(entry: Entry) -> bool:
    return _asks(entry) and not _opens_with(entry, (_COMMAND,)) and any(map(_is_words, entry.content))


def says_stopped(entry: Entry) -> bool:
    """The CLI wrote that it was interrupted. (1.0.120 may write this in the place of the answer.)"""
    return _typed(entry) and _opens_with(entry, (_STOPPED,))


def _is_words(block: Block) -> bool:
    return block.get("type") != "tool_result"


def _opens_with(entry: Entry, starts: tuple[str, ...]) -> bool:
    first = next((block for block in entry.content if block.get("type") == "text"), {})
    return str(first.get("text", "")).lstrip().startswith(starts)


def _sum(every: list[JSON], name: str) -> int:
    return sum(count(usage.get(name)) for usage in every)


def began(entry: Entry) -> float | None:
    return transcript.seconds(str(entry.data.get("timestamp")))
