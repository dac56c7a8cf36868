"""A conversation as text for a model to summarise, in pieces that fit one request. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ..domain.blocks import contents
from ..domain.models import Block

SO_FAR = "This is the summary of what came before. Begin your summary with what it says:"


def prompt(ask: str, so_far: str, piece: str) -> str:
    """The prompt that has one piece summarised. `ask`: the instruction. `so_far`: the summary of the earlier pieces, ""
    for the first one."""
    earlier = f"{SO_FAR}\n\n{so_far}\n\n" if so_far else ""
    return f"{ask}\n\n{earlier}The conversation:\n\n{piece}"


def pieces(texts: Sequence[str], size: int) -> Iterator[tuple[int, str]]:
    """Joins the texts to pieces of about `size` characters, each with the index of the text in which it begins."""
    piece, first_index = "", 0
    for index, text in enumerate(texts):
        for start in range(0, len(text), size):  # a text that is too long for one piece is cut
            part = text[start : start + size]
            if piece and len(piece) + len(part) > size:
                yield first_index, piece
                piece = ""
            if not piece:
                first_index = index
            piece = f"{piece}\n\n{part}" if piece else part
    if piece:
        yield first_index, piece


def text_of(block: Block) -> str:
    """A block as text for the summary; "" if it has none, such as thinking."""
    match block.get("type"):
        case "text":
            return str(block.get("text", ""))
        case "tool_use":
            return f"[calls {block.get('name')}: {json.dumps(block.get('input'), ensure_ascii=False)}]"
        case "tool_result":
            return f"[result: {' '.join(map(text_of, contents(block)))}]"
        case "image" | "document" as kind:
            return f"[{kind}]"
    return ""
