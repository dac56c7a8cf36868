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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .models import JSON, Block, Message, Turn

# Between two text blocks of one answer, on every wire that has one string for it.
TEXT_JOIN = "\n\n"

Rule = Literal["id", "fresh", "head", "new", "history", "unknown"]


# --- the normal form --------------------------------------------------------------------------------------


def answer_text(blocks: Iterable[Block]) -> str:
    """The text of an answer as one string, as clients see it and send it back."""
    return TEXT_JOIN.join(block["text"] for block in blocks if block.get("type") == "text" and block["text"])


def _image(source: Mapping[str, Any]) -> list[str]:
    data = source.get("data") or source.get("url") or json.dumps(source, sort_keys=True)
    return ["image", hashlib.sha256(str(data).encode("utf-8", "surrogatepass")).hexdigest()]


def _item(block: Block) -> list[str] | None:
    kind = block.get("type")
    if kind == "text":
        text = str(block.get("text", "")).strip()
        return ["text", text] if text else None
    if kind == "image":
        return _image(block.get("source", {}))
    if kind == "tool_use":
        return ["call", str(block.get("name")), json.dumps(block.get("input") or {}, sort_keys=True)]
    if kind == "tool_result":
        content = block.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else (content or [])
        return ["result", *(json.dumps(item) for item in _items(parts))]
    if kind in ("thinking", "redacted_thinking"):
        return None
    return ["other", json.dumps(block, sort_keys=True)]


def _items(blocks: Iterable[Block]) -> list[list[str]]:
    """Normal items of a run; neighbouring texts are one text, however a client cut them."""
    items: list[list[str]] = []
    for item in filter(None, map(_item, blocks)):
        if item[0] == "text" and items and items[-1][0] == "text":
            items[-1] = ["text", f"{items[-1][1]}{TEXT_JOIN}{item[1]}"]
        else:
            items.append(item)
    return items


def roll(start: str | None, role: str, blocks: Iterable[Block]) -> str:
    """The hash after one more run. `start` is the hash before it, None at the root."""
    text = json.dumps([start, role, _items(blocks)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive messages of one role. `end` is the index after its last message."""

    role: str
    blocks: tuple[Block, ...]
    end: int


def runs(messages: Sequence[Message]) -> list[Run]:
    out: list[Run] = []
    for at, message in enumerate(messages):
        if out and out[-1].role == message.role:
            out[-1] = Run(message.role, out[-1].blocks + message.content, at + 1)
        else:
            out.append(Run(message.role, message.content, at + 1))
    return out


def path_hash(parent: str | None, new: Sequence[Message], output: Sequence[Block]) -> str:
    """The hash of a turn: its parent's path, its input, its answer."""
    for run in runs([*new, Message("assistant", tuple(output))]):
        parent = roll(parent, run.role, run.blocks)
    assert parent is not None
    return parent


@dataclass(frozen=True, slots=True)
class Ending:
    """An answer in a client's history: the turn that ends here would have this hash."""

    hash: str
    end: int


def endings(messages: Sequence[Message], start: str | None = None) -> list[Ending]:
    """Every answer in the history, front to back, each message hashed once."""
    out: list[Ending] = []
    for run in runs(messages):
        start = roll(start, run.role, run.blocks)
        if run.role == "assistant":
            out.append(Ending(start, run.end))
    return out


# --- the decision -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """`parent` is a turn's id, None for a root; with `at_head`, it is the head at the time the turn runs.

    `imported` are exchanges that the chain did not know, to be stored as turns before `new`.
    """

    rule: Rule
    parent: str | None
    at_head: bool
    imported: tuple[Message, ...]
    new: tuple[Message, ...]
    reason: JSON = field(default_factory=dict)

    @property
    def delta(self) -> bool:
        """The client sent only what is new: what it does not repeat (its system prompt) still holds."""
        return self.rule in ("head", "id")


def decide(
    messages: Sequence[Message], *, named: bool, fresh: bool, continues: str | None, match: tuple[Turn, Ending] | None
) -> Decision:
    """Apply the table above. `match` is the deepest known turn of the history, where one was looked for."""
    answers = [at + 1 for at, message in enumerate(messages) if message.role == "assistant"]
    last = answers[-1] if answers else 0
    if continues is not None:
        start, parent, rule = 0, continues, "id"
    elif match is not None and not fresh:
        start, parent, rule = match[1].end, match[0].id, "history"
    else:
        start, parent = 0, None
        rule = "fresh" if fresh else "unknown" if answers else "head" if named else "new"
    at = max(start, last)
    imported, new = tuple(messages[start:at]), tuple(messages[at:])
    reason: JSON = {"rule": rule, "messages": len(messages), "matched": start, "imported": len(imported)}
    if rule in ("history", "unknown") and imported:
        reason["diverged_at"] = start
    return Decision(rule, parent, rule == "head", imported, new, reason)  # type: ignore[arg-type]


def deepest(found: Sequence[Turn], known: Sequence[Ending], heads: frozenset[str]) -> tuple[Turn, Ending] | None:
    """The deepest known turn; among equals a head, then the one whose answer arrived, then the newest."""
    by_hash = {ending.hash: ending for ending in known}
    best: tuple[Turn, Ending] | None = None
    rank: tuple[int, bool, bool, int] | None = None
    for turn in found:
        ending = by_hash.get(turn.path_hash or "")
        if ending is None:
            continue
        mine = (ending.end, turn.id in heads, turn.delivery != "undelivered", turn.seq)
        if rank is None or mine > rank:
            best, rank = (turn, ending), mine
    return best


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of the user and the answer to them: what an imported turn consists of."""

    input: tuple[Message, ...]
    output: tuple[Block, ...]


def exchanges(messages: Sequence[Message]) -> list[Exchange]:
    """Cut a history into turns. One that opens with the assistant gets an empty input."""
    out: list[Exchange] = []
    waiting: list[Message] = []
    for run in runs(messages):
        if run.role == "user":
            waiting = [Message("user", run.blocks)]
        else:
            out.append(Exchange(tuple(waiting), run.blocks))
            waiting = []
    return out
