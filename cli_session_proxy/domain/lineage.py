"""Decides which turn a request continues, from its messages and the known turns, and whether it is a side call. Pure.

A turn's `path_hash` is a rolling hash over the conversation from the root to its answer, in a normal form
that survives what clients change on the way back: whitespace trimmed at the ends of a text, content as a
string or as parts, messages of one role merged or split, thinking dropped, names added, ids missing.
Consecutive messages of one role are one *run*; only the end of an assistant's run can be a turn's end.

*Imported*: exchanges of the client's history that are stored as turns before the new one.

| the client sends | rule | parent | the new turn's own messages |
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
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

from .blocks import contents
from .evidence import Note
from .forms import replace
from .models import Block, Message, Placed, Rule, Turn, TurnRequest
from .system_prompts import is_another

# Joins the text blocks of an answer, on wires that have one string for them.
TEXT_JOIN = "\n\n"


# --- the normal form --------------------------------------------------------------------------------------


class TextJoin:
    """Joins the texts of a streamed answer to one string, piece by piece.

    Texts are separated by `TEXT_JOIN` and nothing else: white space around it and blank texts are dropped, so that the
    string has the same normal form as the blocks. White space is held back until something follows it.
    """

    def __init__(self) -> None:
        self._held = ""  # white space that is not sent yet
        self._has_text = False  # text that is not blank was sent
        self._joining = False  # the separator has to be sent before the next text

    def next_text(self) -> None:
        """Begin the next text."""
        self._joining = self._has_text

    def feed(self, piece: str) -> str:
        """Add a piece. Returns the part that can be sent now."""
        separator = ""
        if self._joining:
            piece = piece.lstrip()
            if not piece:
                return ""
            self._joining, self._held, separator = False, "", TEXT_JOIN
        body = piece.rstrip()
        if not body:
            self._held += piece
            return ""
        out = f"{self._held}{separator}{body}"
        self._held, self._has_text = piece[len(body) :], True
        return out

    def end(self) -> str:
        """The white space that is still held back."""
        held, self._held = self._held, ""
        return held


def answer_text(blocks: Iterable[Block], kind: str = "text") -> str:
    """The texts of an answer as one string, in the form that clients get and send back. With `kind` "thinking": its
    thinking, joined without a separator."""
    texts = [str(block.get(kind, "")) for block in blocks if block.get("type") == kind]
    if len(texts) < 2 or kind == "thinking":  # the usual case
        return "".join(texts)
    join = TextJoin()
    pieces: list[str] = []
    for text in texts:
        join.next_text()
        pieces.append(join.feed(text))
    return "".join([*pieces, join.end()])


def _item(block: Block) -> tuple[str, str] | None:
    """(kind, content) of a block for hashing; None if it does not count: a blank text, and thinking, which clients do
    not send back. Ids of calls do not count, either."""
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
        return "result", _normal("user", contents(block))
    if kind in ("thinking", "redacted_thinking"):
        return None
    return "other", json.dumps(block, sort_keys=True)


def _normal(role: str, blocks: Sequence[Block]) -> str:
    """A run's content in normal form: adjacent texts are joined.

    In an assistant's run texts come first, because some wires have text and calls in two fields.
    """
    if len(blocks) == 1 and blocks[0].get("type") == "text":  # the usual case
        text = str(blocks[0].get("text", "")).strip()
        return f"text {len(text)}:{text}" if text else ""
    items = list(filter(None, map(_item, blocks)))
    if role == "assistant":
        items.sort(key=lambda item: item[0] != "text")
    merged: list[tuple[str, str]] = []
    for kind, group in groupby(items, itemgetter(0)):
        if kind == "text":
            merged.append(("text", TEXT_JOIN.join(text for _, text in group)))
        else:
            merged += group
    # with lengths, so that no text can pass for two items
    return "".join([f"{kind} {len(content)}:{content}" for kind, content in merged])


def runs(messages: Sequence[Message]) -> Iterator[tuple[str, tuple[Block, ...], int]]:
    """(role, blocks, end) of consecutive messages of one role; `end` is the index after the last of them."""
    at, count = 0, len(messages)
    while at < count:
        role, start = messages[at].role, at
        at += 1
        while at < count and messages[at].role == role:
            at += 1
        blocks = messages[start].content
        if at > start + 1:
            blocks = tuple(chain.from_iterable(message.content for message in messages[start:at]))
        yield role, blocks, at


class HistoryEnding(NamedTuple):
    """An answer in a client's history: the hash of the turn that would end here, and how many messages come before."""

    hash: str
    end: int


def endings(messages: Sequence[Message], start: str | None = None) -> list[HistoryEnding]:
    """All answers in the history, in order; each message is hashed once. `start`: the hash of the path before the
    history."""
    out: list[HistoryEnding] = []
    hashed = [start or ""]
    for role, blocks, end in runs(messages):
        hashed += ["\n", role, "\n", _normal(role, blocks)]
        if role == "assistant":
            digest = hashlib.sha256("".join(hashed).encode("utf-8", "surrogatepass")).hexdigest()
            out.append(HistoryEnding(digest, end))
            hashed = [digest]
    return out


def path_hash(parent: str | None, new: Sequence[Message], output: Sequence[Block]) -> str:
    """The hash of a turn: of its parent's path, its input and its answer."""
    return endings([*new, Message("assistant", tuple(output))], parent)[-1].hash


def answered(turn: Turn, before: Turn | None, output: tuple[Block, ...], **ended: Any) -> Turn:
    """The turn with this answer, its `path_hash` after `before`, and these other fields of its end."""
    start, depth = (before.path_hash, before.depth) if before else (None, 0)
    return replace(turn, output=output, path_hash=path_hash(start, turn.input, output), depth=depth + 1, **ended)


# --- the decision -----------------------------------------------------------------------------------------


def decide(
    messages: Sequence[Message],
    *,
    named: bool,
    fresh: bool,
    continues: str | None,
    match: tuple[Turn, HistoryEnding] | None,
    head: str | None = None,
    keep_system: bool = True,
) -> tuple[str | None, Placed]:
    """Apply the table above. Returns the parent's id, None for a root or, at the head, for the head when the turn runs.

    `match` is the deepest known turn of the history; None if there is none, or the history was not compared.
    `head` is the agent's present head: a turn that continues another turn leaves the path, at `Placed.diverged_at`.
    `keep_system`: a request with only new messages keeps the system prompt and tools of the turn that it continues.
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
    left_path = rule in ("history", "unknown") and (at > start or parent != head)
    return parent, Placed(
        rule,
        messages=len(messages),
        matched=start,
        imported=at - start,
        diverged_at=start if left_path else None,
        delta=rule in ("head", "id") and keep_system,
    )


@dataclass(frozen=True, slots=True)
class Past:
    """Messages of the user and their answer, from a client's history: the content of an imported turn.

    `notes`: how the model's copy differs.
    """

    input: tuple[Message, ...]
    output: tuple[Block, ...]
    notes: tuple[Note, ...] = ()


def past(messages: Sequence[Message]) -> list[Past]:
    """Split a history into turns. If it begins with an answer, the first turn's input is empty."""
    exchanges: list[Past] = []
    question: tuple[Message, ...] = ()
    for role, blocks, _ in runs(messages):
        if role == "user":
            question = (Message("user", blocks),)
        else:
            exchanges.append(Past(question, blocks))
            question = ()
    return exchanges


# --- side calls: a title, tags, a suggestion, a routing question or a ping, which nobody continues

# A side call is only suspected: a hand-off, or a change between planning and building, looks the same. So the turn is
# stored as usual, but runs beside the conversation's own process. It counts as an ordinary turn once another turn
# continues it. A request at the head of its agent is never suspected, because the next turn continues it.

# Beginnings of programs' prompts: of a user message, or a paragraph of the system prompt.
_PROMPTS = re.compile(
    r"(?:\A|\n\n)\s{0,64}(?:"
    # Open WebUI: titles, tags, follow-ups, queries, pictures, completions
    r"### Task:\s+(?:Generate a concise, 3-5 word title|Generate 1-3 broad tags|Suggest 3-5 relevant follow-up"
    r"|Analyze the chat history to determine the necessity|Generate a detailed prompt for|You are an autocompletion)"
    # LibreChat: titles
    r"|(?:Provide|Please generate) a concise, 5-word-or-less title|Analyze this conversation and provide:\s+1\. The"
    # Claude Code and qwen-code: titles, topics, what the user may say next
    r"|Please write a 5-10 word title|Generate a concise, sentence-case title|You are naming a coding session"
    r"|Analyze if this message indicates a new conversation topic|\[SUGGESTION MODE:"
    # Gemini CLI and qwen-code: who speaks next, which model
    r"|Analyze \*only\* the content and structure of your immediately preceding|You are a specialized Task Routing AI"
    # gptme: titles
    r"|Your task: Create a 2-4 word title for this conversation"
    # opencode: titles
    r"|You are a title generator|Generate a title for this conversation"
    r")"
)


def is_side_call(request: TurnRequest, rule: Rule | None, parent: Turn | None) -> bool:
    """Whether the request looks like a side call. `rule` and `parent` are where `lineage` placed it; `parent` is None
    if no turn of its history is known."""
    last = request.messages[-1].content
    if any(block.get("type") == "tool_result" for block in last):
        return False  # it answers a call
    if rule == "history" and parent is not None:
        tools = {tool.name for tool in parent.options.tools}
        without = bool(tools) and tools.isdisjoint(tool.name for tool in request.options.tools)
        other = without or is_another(parent.system, request.system)
        return _is_programs_prompt(request) or (other and not parent.placed.side)
    if rule in ("new", "unknown") and request.agent_id is None:
        ping = rule == "new" and request.options.parameters.max_tokens == 1
        return ping or _is_programs_prompt(request)
    return False


def _is_programs_prompt(request: TurnRequest) -> bool:
    texts = (str(block["text"]) for block in request.messages[-1].content if block.get("type") == "text")
    return any(_PROMPTS.match(text) for text in texts) or bool(request.system and _PROMPTS.search(request.system))
