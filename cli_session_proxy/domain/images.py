"""Cuts images out of JSON texts, so that each is stored once, and puts them back. Pure.

It works on the text, not on parsed values, so a line comes back byte-identical whatever its spacing, escapes or key
order. Places are offsets into the shortened text, so there are no placeholders that a text could imitate.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# `data`: a base64 source of the Messages API; `base64`: a file in results of the CLI's own tools. Texts shorter than a
# hash (64 characters) are not cut.
_BASE64 = re.compile(r'"(?:data|base64)"\s*:\s*"([A-Za-z0-9+/]{64,}={0,2})"')

ImagePlace = tuple[int, str]
"""Where an image was: offset in characters of the shortened text, and the sha256 of what stood there."""


@dataclass(slots=True)
class ImageCutter:
    """Shortens the texts of one transaction and collects what it cut: sha256 → base64 text."""

    images: dict[str, str] = field(default_factory=dict)

    def cut(self, text: str) -> tuple[str, list[ImagePlace]]:
        if '"data"' not in text and '"base64"' not in text:
            return text, []
        pieces: list[str] = []
        places: list[ImagePlace] = []
        end = offset = 0
        for found in _BASE64.finditer(text):
            piece = text[end : found.start(1)]
            pieces.append(piece)
            offset += len(piece)
            data = found.group(1)
            sha256 = hashlib.sha256(data.encode("ascii")).hexdigest()
            self.images[sha256] = data
            places.append((offset, sha256))
            end = found.end(1)
        pieces.append(text[end:])
        return "".join(pieces), places


def restore(text: str, places: Iterable[ImagePlace], known: Mapping[str, str]) -> str:
    """The inverse of `ImageCutter.cut`."""
    pieces: list[str] = []
    end = 0
    for offset, sha256 in places:
        pieces += (text[end:offset], known[sha256])
        end = offset
    pieces.append(text[end:])
    return "".join(pieces)
