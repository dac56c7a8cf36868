"""Summarises a path in pieces that is too long for one request and that the CLI could not compact.

The model is asked in temporary sessions, each time with the summary so far and the next piece. The newest exchanges
stay unchanged, up to half a piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from ....domain.models import Record
from ....errors import ContextTooLong, RequestTooLarge
from ... import summarising
from .. import transcript
from .exchanges import TranscriptExchange, exchanges, is_compaction

# Asks the model one question. Raises `ProxyError`.
Ask = Callable[[str], Awaitable[str]]

# The most questions to the model; of a longer path the oldest pieces are left out.
MOST_CALLS = 12
# Characters of a piece: first a quarter of the path; a piece that is too long is halved.
FIRST_SHARE = 4
SMALLEST = 1000

SYSTEM = "You summarise conversations so that another assistant can go on with them."
ASK = (
    "Summarise this part of a conversation between a user and an assistant. Keep every fact, decision, name, number "
    "and open task that somebody may come back to, in the order in which they came up. Answer with the summary only."
)


@dataclass(frozen=True, slots=True)
class PathSummary:
    """A summary in place of a path's first exchanges."""

    text: str
    kept_from: str | None  # the uuid of the first record that stays; None: none does
    exchanges: int  # how many are replaced
    left_out: int  # how many of these the summary does not cover


async def summarised(path: Sequence[Record], ask: Ask, *, open_calls: bool) -> PathSummary | None:
    """Summarise the path except for its end; None if there is nothing to summarise.

    `open_calls`: the last exchange ends with calls that wait for results. These calls stay; what the exchange has
    before them may be summarised, too. Raises `ProxyError`.
    """
    parts, count, texts = await asyncio.to_thread(_read, path, open_calls=open_calls)
    size = max(SMALLEST, sum(map(len, texts)) // FIRST_SHARE)
    calls, text = 0, ""
    while True:
        # The first exchange never stays unchanged: it may begin with a compaction, at which a CLI stops reading.
        unchanged = min(_fitting(texts, size // 2, at_least=int(open_calls)), len(texts) - 1)
        pieces = list(summarising.pieces(texts[: len(texts) - unchanged], size))
        if not pieces or unchanged < int(open_calls):
            return None
        left_out = 0
        if (surplus := len(pieces) - (MOST_CALLS - calls)) > 0:
            if calls == MOST_CALLS:
                raise ContextTooLong("the conversation is too long, and so are its summaries: start a new chain")
            left_out, pieces = pieces[surplus][0], pieces[surplus:]  # a piece is (index of its first text, text)
        text = ""
        try:
            for _, piece in pieces:
                calls += 1
                text = (await ask(summarising.prompt(ASK, text, piece)))[: size // 2]
        except (ContextTooLong, RequestTooLarge):
            size //= 2
            continue
        first = next((entry.uuid for entry in parts[len(parts) - unchanged].path), None) if unchanged else None
        return PathSummary(text, first, min(len(parts) - unchanged, count), min(left_out, count))


def _read(path: Sequence[Record], *, open_calls: bool) -> tuple[list[TranscriptExchange], int, list[str]]:
    """The parts of the path that the model is shown, the number of its exchanges, and the text of each part. A part is
    an exchange; if the last one has open calls, it is split into its rounds."""
    entries = transcript.parse_records(path).path
    # From the CLI's last compaction on, with the records that it kept.
    at = next((at for at in range(len(entries) - 1, -1, -1) if is_compaction(entries[at])), 0)
    preserved = (entries[at].data.get("compactMetadata") or {}).get("preservedSegment") if entries else None
    head = preserved.get("headUuid") if isinstance(preserved, dict) else None
    parts = list(exchanges(entries[next((n for n, entry in enumerate(entries) if head and entry.uuid == head), at) :]))
    count = len(parts)
    if open_calls and parts:
        parts[-1:] = _rounds(parts[-1])
    texts = []
    for exchange in parts:
        message_blocks = [entry for entry in exchange.path if entry.kind in ("user", "assistant")]
        blocks = [(entry.kind, block) for entry in message_blocks for block in entry.content]
        lines = [f"{kind}: {words}" for kind, block in blocks if (words := summarising.text_of(block))]
        texts.append("\n\n".join(lines))
    return parts, count, texts


def _rounds(exchange: TranscriptExchange) -> Iterator[TranscriptExchange]:
    """Split before each message of the model that answers results."""
    start, message, answered = 0, None, False
    for at, entry in enumerate(exchange.entries):
        if not entry.in_conversation:
            continue
        if entry.kind == "user":
            answered = any(block.get("type") == "tool_result" for block in entry.content)
        elif entry.kind == "assistant":
            said = entry.data.get("message", {}).get("id")
            if answered and said != message:
                yield TranscriptExchange(exchange.entries[start:at])
                start = at
            message, answered = said, False
    yield TranscriptExchange(exchange.entries[start:])


def _fitting(texts: Sequence[str], room: int, *, at_least: int) -> int:
    """How many of the last exchanges fit."""
    number = 0
    for text in reversed(texts):
        room -= len(text)
        if room < 0 and number >= at_least:
            break
        number += 1
    return number
