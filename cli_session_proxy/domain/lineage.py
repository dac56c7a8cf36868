"""What continues what: pure. A request's messages and the known turns decide the parent and what is new.

A turn's `path_hash` is a rolling hash over the conversation from the root to its answer, in a normal form
that survives what clients change on the way back: whitespace trimmed at the ends of a text, content as a
string or as parts, messages of one role merged or split, thinking dropped, names added, ids missing.
Consecutive messages of one role are one *run*; only the end of an assistant's run can be a turn's end.

| the client says | rule | parent | new |
|---|---|---|---|
| an id of ours (`continues`) | `id` | that turn | all it sent |
| `X-Chain: new` | `fresh` | none: a new root | after the last answer; what is before it is imported |
| a name, no answers | `head` | the head when it runs | all it sent |
| no name, no answers | `new` | none: a new agent | all it sent |
| answers, some known | `history` | the deepest known turn | after the last answer; unknown ones are imported |
| answers, none known | `unknown` | none: a new root | after the last answer; the rest is imported |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

from .models import Block, Message, Placed, Rule, Turn
from .notes import Note

# Between two text blocks of one answer, on every wire that has one string for it.
TEXT_JOIN = "\n\n"


# --- the normal form --------------------------------------------------------------------------------------


class TextJoin:
    """The texts of an answer as one string, piece by piece as they come.

    Between two texts stands `TEXT_JOIN`, whatever white space they end and begin with; a blank text says nothing.
    So the string has the same normal form as the blocks. White space is held back until something follows it.
    """

    def __init__(self) -> None:
        self._held = ""
        self._said = False
        self._joining = False

    def next_text(self) -> None:
        """Begin the next text."""
        self._joining = self._said

    def feed(self, piece: str) -> str:
        """The part of the answer that can be sent now."""
        lead = ""
        if self._joining:
            piece = piece.lstrip()
            if not piece:
                return ""
            self._joining, self._held, lead = False, "", TEXT_JOIN
        body = piece.rstrip()
        if not body:
            self._held += piece
            return ""
        out = f"{self._held}{lead}{body}"
        self._held, self._said = piece[len(body) :], True
        return out

    def end(self) -> str:
        """The rest that was held back."""
        held, self._held = self._held, ""
        return held


def answer_text(blocks: Iterable[Block], kind: str = "text") -> str:
    """The text of an answer as one string, as clients see it (streamed or not) and send it back; or its thinking."""
    texts = [str(block.get(kind, "")) for block in blocks if block.get("type") == kind]
    if len(texts) < 2 or kind == "thinking":  # nearly every answer has one text
        return "".join(texts)
    join = TextJoin()
    said: list[str] = []
    for text in texts:
        join.next_text()
        said.append(join.feed(text))
    return "".join([*said, join.end()])


def _item(block: Block) -> tuple[str, str] | None:
    """(kind, what it says) of a block; None where it says nothing that a client gives back."""
    kind = block.get("type")
    if kind == "text":
        text = str(block.get("text", "")).strip()
        return ("text", text) if text else None
    if kind in ("image", "document"):
        source = block.get("source", {})
        data = source.get("data") or source.get("url") or json.dumps(source, sort_keys=True)
        return kind, hashlib.sha256(str(data).encode("utf-8", "surrogatepass")).hexdigest()
    if kind == "tool_use":
        return "call", json.dumps([block.get("name"), block.get("input") or {}], sort_keys=True)
    if kind == "tool_result":
        content = block.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        return "result", _normal("user", parts)
    if kind in ("thinking", "redacted_thinking"):
        return None
    return "other", json.dumps(block, sort_keys=True)


def _normal(role: str, blocks: Sequence[Block]) -> str:
    """A run's content: neighbouring texts are one text, however a client cut them.

    Of an assistant's run the texts come first, as on the wires that keep text and calls in two fields.
    """
    if len(blocks) == 1 and blocks[0].get("type") == "text":  # nearly every message
        text = str(blocks[0].get("text", "")).strip()
        return f"text {len(text)}:{text}" if text else ""
    items = list(filter(None, map(_item, blocks)))
    if role == "assistant":
        items.sort(key=lambda item: item[0] != "text")
    merged: list[tuple[str, str]] = []
    for kind, some in groupby(items, itemgetter(0)):
        if kind == "text":
            merged.append(("text", TEXT_JOIN.join(says for _, says in some)))
        else:
            merged += some
    # with lengths, so that no text can pass for two items
    return "".join([f"{kind} {len(says)}:{says}" for kind, says in merged])


def runs(messages: Sequence[Message]) -> Iterator[tuple[str, tuple[Block, ...], int]]:
    """(role, blocks, end) of consecutive messages of one role; `end` is the index after the last of them."""
    at, count = 0, len(messages)
    while at < count:
        role, start = messages[at].role, at
        at += 1
        while at < count and messages[at].role == role:
            at += 1
        said = messages[start].content
        if at > start + 1:
            said = tuple(chain.from_iterable(message.content for message in messages[start:at]))
        yield role, said, at


class HistoryEnding(NamedTuple):
    """An answer in a client's history: the turn that ends here would have this hash. `end` counts messages."""

    hash: str
    end: int


def endings(messages: Sequence[Message], start: str | None = None) -> list[HistoryEnding]:
    """Every answer in the history, front to back, each message hashed once. `start` is the path before it."""
    out: list[HistoryEnding] = []
    said = [start or ""]
    for role, blocks, end in runs(messages):
        said += ["\n", role, "\n", _normal(role, blocks)]
        if role == "assistant":
            above = hashlib.sha256("".join(said).encode("utf-8", "surrogatepass")).hexdigest()
            out.append(HistoryEnding(above, end))
            said = [above]
    return out


def path_hash(parent: str | None, new: Sequence[Message], output: Sequence[Block]) -> str:
    """The hash of a turn: its parent's path, its input, its answer."""
    return endings([*new, Message("assistant", tuple(output))], parent)[-1].hash


def answered(turn: Turn, before: Turn | None, output: tuple[Block, ...]) -> Turn:
    """The turn with this answer, at its place on the path behind `before`."""
    above, depth = (before.path_hash, before.depth) if before else (None, 0)
    return replace(turn, output=output, path_hash=path_hash(above, turn.input, output), depth=depth + 1)


# --- the decision -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """`parent` is a turn's id, None for a root; with `placed.at_head`, it is the head at the time the turn runs.

    `imported` are exchanges that the chain did not know, to be stored as turns before `new`.
    """

    parent: str | None
    imported: tuple[Message, ...]
    new: tuple[Message, ...]
    placed: Placed


def decide(
    messages: Sequence[Message],
    *,
    named: bool,
    fresh: bool,
    continues: str | None,
    match: tuple[Turn, HistoryEnding] | None,
    head: str | None = None,
    keep_system: bool = True,
) -> Decision:
    """Apply the table above. `match` is the deepest known turn of the history, where one was looked for.

    `head` is the agent's as it is now: what continues another turn has left its path, and `placed` says where.
    `keep_system` is False where a client that sends only what is new wants nothing else to hold on.
    """
    last = next((at for at in range(len(messages), 0, -1) if messages[at - 1].role == "assistant"), 0)
    rule: Rule
    parent: str | None = None
    start = 0
    if continues is not None:
        parent, rule = continues, "id"
    elif match is not None and not fresh:
        start, parent, rule = match[1].end, match[0].id, "history"
    else:
        rule = "fresh" if fresh else "unknown" if last else "head" if named else "new"
    at = max(start, last)
    imported, new = tuple(messages[start:at]), tuple(messages[at:])
    left_path = rule in ("history", "unknown") and bool(imported or parent != head)
    placed = Placed(
        rule,
        messages=len(messages),
        matched=start,
        imported=len(imported),
        diverged_at=start if left_path else None,
        delta=rule in ("head", "id") and keep_system,
    )
    return Decision(parent, imported, new, placed)


@dataclass(frozen=True, slots=True)
class Past:
    """Messages of the user and the answer to them, from a client's history: what an imported turn consists of.

    `notes`: what of it the model is not shown as it came.
    """

    input: tuple[Message, ...]
    output: tuple[Block, ...]
    notes: tuple[Note, ...] = ()


def past(messages: Sequence[Message]) -> list[Past]:
    """Cut a history into turns. One that opens with the assistant gets an empty input."""
    out: list[Past] = []
    waiting: list[Message] = []
    for role, blocks, _ in runs(messages):
        if role == "user":
            waiting = [Message("user", blocks)]
        else:
            out.append(Past(tuple(waiting), blocks))
            waiting = []
    return out
