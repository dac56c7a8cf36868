"""What a client's history shows reaches the model within its limits; the chain keeps and knows the original."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from cli_session_proxy.aside.pictures import MAX_BASE64, MAX_SIDE, Unreadable, fitted
from cli_session_proxy.backends.memory import MemoryBackend
from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.domain.notes import Note
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export.explain import turn as told
from cli_session_proxy.settings import Settings
from cli_session_proxy.testing.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..talking import ask, running
from .test_core import settings

__all__ = ["settings"]


def picture(width: int, height: int, kind: str = "PNG", *, noise: bool = False) -> str:
    image = Image.effect_noise((width, height), 90.0).convert("RGB") if noise else Image.new("RGB", (width, height))
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 100} if kind == "JPEG" else {}))
    return base64.b64encode(out.getvalue()).decode()


def image(data: str, kind: str = "image/png") -> Block:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def bomb() -> str:
    """A PNG of a few bytes that says it has 10^10 pixels."""
    size = struct.pack("!IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = (
        struct.pack("!I", len(data)) + name + data + struct.pack("!I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_what_is_too_wide_is_made_smaller_and_the_rest_is_left_as_it_is(kind: str) -> None:
    small, large = picture(64, 32, kind), picture(4000, 1000, kind)
    assert fitted(small) is None
    found = fitted(large)
    assert found is not None
    assert (found.was, found.now[0]) == ((4000, 1000), MAX_SIDE)
    assert fitted(found.data) is None


def test_what_is_too_many_bytes_is_made_smaller() -> None:
    data = picture(1900, 1900, noise=True)
    assert len(data) > MAX_BASE64
    found = fitted(data)
    assert found is not None
    assert len(found.data) <= MAX_BASE64


@pytest.mark.parametrize(
    "data", [bomb(), base64.b64encode(b"no image").decode(), picture(64, 64, noise=True)[:400], "?", ""]
)
def test_what_cannot_be_decoded_or_is_a_bomb_is_unreadable(data: str) -> None:
    with pytest.raises(Unreadable):
        fitted(data)


async def test_an_image_of_a_history_is_kept_as_it_came_and_shown_as_the_model_takes_it(settings: Settings) -> None:
    large = picture(4000, 1000)
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    try:
        said: list[Message | str] = [
            Message("user", (image(large), image(bomb()), {"type": "text", "text": "look"})), "I see", "and now?",
        ]  # fmt: skip
        turn = await ask(engine, *said)
        assert turn.parent_id is not None
        before = await engine.store.turn(turn.parent_id)
        assert before is not None
        assert before.input[0].content[0] == image(large)
        [record] = await engine.store.own_records(before.id)
        shown = json.loads(record.line)[0]["content"]
        assert shown[0]["source"]["data"] != large
        assert fitted(shown[0]["source"]["data"]) is None
        assert shown[1]["text"].startswith("[An image was left out here: it has 100000 x 100000 pixels")
        again = await ask(engine, *said, "You said: and now? (4)", "third")
        assert (again.parent_id, again.placed.imported) == (turn.id, 0)
    finally:
        await engine.stop()


@old_cli_in_full
async def test_an_oversized_image_of_a_history_does_not_poison_the_agent(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    large = picture(4000, 1000)
    broken: Block = {
        "type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "bm8gcGRm" * 20},
    }  # fmt: skip
    async with running(make_settings(claude_bin=claude)) as engine:
        said = Message("user", (image(large), broken, {"type": "text", "text": "look"}))
        first = await ask(engine, said, "I see", "and now?")
        assert first.evidence.notes == (Note("images_made_smaller", 1), Note("unreadable_documents_left_out", 1))
        [sentence] = told(first.evidence, ())
        assert "1 image in the client's history would have been too large" in sentence
        assert "1 document in the client's history was no PDF" in sentence
        sent = upstream.requests[-1].raw.decode()
        assert large not in sent
        assert "bm8gcGRm" not in sent
        blocks = [block for one in upstream.requests[-1].body["messages"] for block in one["content"]]
        [shown] = [block for block in blocks if isinstance(block, dict) and block["type"] == "image"]
        assert fitted(shown["source"]["data"]) is None
        turn = await ask(engine, "third")
        assert turn.continuity in ("warm", "resumed")
        assert turn.evidence.notes == ()
        assert upstream.requests[-1].raw.decode().count(shown["source"]["data"]) == 1
