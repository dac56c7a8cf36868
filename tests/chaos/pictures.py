"""Small pictures of which no two are alike, and the mark by which the journal names one."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib

SHOWN = "[image "
# How a picture stands in the words of a prompt, in the journal: before them.
_MARK = re.compile(r"\[image ([0-9a-f]{16})\] ")
_made: dict[str, bytes] = {}


def mark(data: bytes) -> str:
    """What names a picture: by its bytes, so that one that was changed on its way has another name."""
    return f"{SHOWN}{hashlib.sha256(data).hexdigest()[:16]}]"


def with_picture(number: int, words: str) -> str:
    """A prompt that shows the picture of this number before its words."""
    data = _png(number)
    _made[mark(data)] = data
    return f"{mark(data)} {words}"


def split(asked: str) -> tuple[bytes | None, str]:
    """(the picture or None, the words) of a prompt that `with_picture` may have made."""
    found = _MARK.match(asked)
    if found is None:
        return None, asked
    return _made[found[0].rstrip()], asked[found.end() :]


def bare(asked: str) -> str:
    """A prompt without the pictures before its words."""
    while (found := _MARK.match(asked)) is not None:
        asked = asked[found.end() :]
    return asked


def _png(number: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + hashlib.sha256(f"{number} {row}".encode()).digest()[:24] for row in range(8))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
