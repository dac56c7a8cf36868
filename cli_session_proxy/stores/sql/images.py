"""Images are kept once: cut out of a text by place, put back to the same text, character for character.

The cut works on JSON text, not on its values, so a line comes back byte-identical whatever its spacing,
escapes or key order. Places are offsets into the shortened text: nothing in a text can be taken for a mark.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, select

from .prepared import InsertNew, Prepared
from .tables import image_refs, images

# `data` is the Messages API's base64 source; `base64` is where the CLI's own tool results carry a file's.
# Shorter than its own hash (64 characters) a text is not worth a row.
_BASE64 = re.compile(r'"(?:data|base64)"\s*:\s*"([A-Za-z0-9+/]{64,}={0,2})"')

# SQLite takes at least 999 variables in a statement, PostgreSQL 32,767.
CHUNK = 500

_INSERT_IMAGE = Prepared(InsertNew(images))
_INSERT_REF = Prepared(InsertNew(image_refs))

Place = tuple[int, str]
"""Where an image was: offset in characters of the shortened text, and the sha256 of what stood there."""


@dataclass(slots=True)
class Cutter:
    """Shortens the texts of one transaction and collects what it cut: sha256 → base64 text."""

    images: dict[str, str] = field(default_factory=dict)

    def cut(self, text: str) -> tuple[str, list[Place]]:
        if '"data"' not in text and '"base64"' not in text:
            return text, []
        pieces: list[str] = []
        places: list[Place] = []
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


def restore(text: str, places: Iterable[Place], known: Mapping[str, str]) -> str:
    """The inverse of `Cutter.cut`."""
    pieces: list[str] = []
    end = 0
    for offset, sha256 in places:
        pieces += (text[end:offset], known[sha256])
        end = offset
    pieces.append(text[end:])
    return "".join(pieces)


def save(conn: Connection, agent_key: int, new: Mapping[str, str]) -> None:
    """Keep these images, each once, and note that the agent refers to them."""
    for shas in chunks(list(new)):
        there = set(conn.scalars(select(images.c.sha256).where(images.c.sha256.in_(shas))))
        missing = [{"sha256": sha, "size": len(new[sha]), "data": new[sha]} for sha in shas if sha not in there]
        _INSERT_IMAGE.run_each(conn, missing)
        _INSERT_REF.run_each(conn, [{"agent_key": agent_key, "sha256": sha} for sha in shas])


def load(conn: Connection, shas: Iterable[str]) -> dict[str, str]:
    known: dict[str, str] = {}
    for part in chunks(sorted(set(shas))):
        for sha256, data in conn.execute(select(images.c.sha256, images.c.data).where(images.c.sha256.in_(part))):
            known[sha256] = data
    return known


def forget(conn: Connection, agent_key: int) -> None:
    """Drop the agent's references, and the images that nobody else refers to."""
    other = image_refs.alias()
    shared = select(other.c.sha256).where(other.c.sha256 == image_refs.c.sha256, other.c.agent_key != agent_key)
    own = select(image_refs.c.sha256).where(image_refs.c.agent_key == agent_key, ~shared.exists())
    unshared = list(conn.scalars(own))
    conn.execute(image_refs.delete().where(image_refs.c.agent_key == agent_key))
    for part in chunks(unshared):
        conn.execute(images.delete().where(images.c.sha256.in_(part)))


def chunks(values: list[str]) -> Iterable[list[str]]:
    return (values[at : at + CHUNK] for at in range(0, len(values), CHUNK))
