"""A conversation as text for a model to summarise, in pieces that fit one request. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ..domain.models import Block
from ..domain.sizes import contents

SO_FAR = "This is the summary of what came before. Begin your summary with what it says:"


def prompt(ask: str, so_far: str, piece: str) -> str:
    """`ask`: the instruction. `so_far`: the summary of the earlier pieces, "" for the first one."""
    before = f"{SO_FAR}\n\n{so_far}\n\n" if so_far else ""
    return f"{ask}\n\n{before}The conversation:\n\n{piece}"


def pieces(texts: Sequence[str], size: int) -> Iterator[tuple[int, str]]:
    """Pieces of at most this size, each with the index of the text in which it begins."""
    piece, first = "", 0
    for number, text in enumerate(texts):
        for at in range(0, len(text), size):
            part = text[at : at + size]
            if piece and len(piece) + len(part) > size:
                yield first, piece
                piece = ""
            if not piece:
                first = number
            piece = f"{piece}\n\n{part}" if piece else part
    if piece:
        yield first, piece


def words(block: Block) -> str:
    """A block as text; "" if it has none for the summary, such as thinking."""
    match block.get("type"):
        case "text":
            return str(block.get("text", ""))
        case "tool_use":
            return f"[calls {block.get('name')}: {json.dumps(block.get('input'), ensure_ascii=False)}]"
        case "tool_result":
            return f"[result: {' '.join(map(words, contents(block)))}]"
        case "image" | "document" as kind:
            return f"[{kind}]"
    return ""
