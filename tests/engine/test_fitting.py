"""What a client's history shows reaches the model within its limits; the chain keeps and knows the original."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path

import pytest
from PIL import ExifTags, Image

from cli_session_proxy.aside.attachments import (
    FIT_BASE64,
    FIT_SIDE,
    MAX_BASE64,
    MAX_PAGES,
    UnreadableImage,
    document_fault,
    fitted_image,
)
from cli_session_proxy.domain.evidence import Note
from cli_session_proxy.domain.models import Message
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.export.explain import turn as told
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..media import document, image, paper, picture
from ..memory_backend import MemoryBackend
from ..talking import ask, running
from .test_core import settings

__all__ = ["settings"]


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
    assert fitted_image(small) is None
    found = fitted_image(large)
    assert found is not None
    assert (found.was, found.now[0]) == ((4000, 1000), FIT_SIDE)
    assert fitted_image(found.data) is None


@pytest.mark.parametrize(
    ("sound", "damaged", "upright"),
    [
        (b"", b"", True),
        (b"Exif\0\0M", b"Exif\0\0?", False),
        (b"\x01\x1a\0\x05", b"\x01\0\0\x05", True),  # Pillow reads a width that is a fraction, and cannot write it
    ],
)
def test_a_photo_that_is_made_smaller_stays_upright(sound: bytes, damaged: bytes, upright: bool) -> None:
    """A camera that was turned says so in the EXIF data, which a smaller image does not have."""
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6  # a quarter turn
    turned[ExifTags.Base.XResolution] = 72.5
    photo = io.BytesIO()
    Image.new("RGB", (4000, 1000)).save(photo, "JPEG", exif=turned.tobytes().replace(sound, damaged))
    found = fitted_image(base64.b64encode(photo.getvalue()).decode())
    assert found is not None
    assert (found.now[0] < found.now[1]) is upright


def test_what_is_too_many_bytes_is_made_smaller() -> None:
    data = picture(1300, 1300, noise=True)
    assert len(data) > MAX_BASE64
    found = fitted_image(data)
    assert found is not None
    assert len(found.data) <= FIT_BASE64


@pytest.mark.parametrize(
    "data", [bomb(), base64.b64encode(b"no image").decode(), picture(64, 64, noise=True)[:400], "?", ""]
)
def test_what_cannot_be_decoded_or_is_a_bomb_is_unreadable(data: str) -> None:
    with pytest.raises(UnreadableImage):
        fitted_image(data)


def test_a_pdf_that_can_be_read_has_no_fault() -> None:
    assert document_fault(base64.b64encode(paper()).decode()) is None
    assert document_fault(base64.b64encode(paper(MAX_PAGES)).decode()) is None
    assert document_fault(base64.b64encode(paper(password="")).decode()) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no PDF", "it is not a PDF"),
        (b"%PDF-1.4 nothing follows", "it is damaged"),
        (paper()[:300], "it is damaged"),
        (paper(0), "it has no pages"),
        (paper(password="secret"), "it is protected by a password"),
        (paper(MAX_PAGES + 1), f"it has {MAX_PAGES + 1} pages"),
    ],
    ids=["no PDF", "only its head", "cut", "empty", "encrypted", "too long"],
)
def test_a_pdf_that_no_model_can_read_says_why(data: bytes, why: str) -> None:
    assert str(document_fault(base64.b64encode(data).decode())).startswith(why)
    assert document_fault("?") == "it is not base64"


async def test_an_unreadable_pdf_fails_its_turn_in_words_and_no_later_one(settings: Settings) -> None:
    """Nothing is sent to the model; a client that keeps the message in its history is answered without the PDF."""
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    try:
        broken = Message("user", (document(paper(password="secret")), {"type": "text", "text": "read"}))
        one = await ask(engine, "one")
        with pytest.raises(InvalidRequest, match=r"cannot be read: it is protected by a password") as refused:
            await ask(engine, broken)
        assert refused.value.param == "messages"
        assert (await ask(engine, "two")).parent_id == one.id
        kept = await ask(engine, broken, "I cannot.", "three", agent="b")
        assert kept.parent_id is not None
        before = await engine.store.turn(kept.parent_id)
        assert before is not None
        assert before.input == (broken,)
    finally:
        await engine.stop()


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
        shown = json.loads(record.line)["content"]
        assert shown[0]["source"]["data"] != large
        assert fitted_image(shown[0]["source"]["data"]) is None
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
    broken = document(b"no pdf" * 20)
    async with running(make_settings(claude_bin=claude)) as engine:
        said = Message("user", (image(large), broken, {"type": "text", "text": "look"}))
        first = await ask(engine, said, "I see", "and now?")
        assert first.evidence.notes == (Note("images_made_smaller", 1), Note("unreadable_documents_left_out", 1))
        smaller, unreadable = told(first.evidence, ())
        assert "1 image of the prompt or the history would have been too large" in smaller.says
        assert "1 document of the prompt or the history could not be read" in unreadable.says
        sent = upstream.requests[-1].raw.decode()
        assert large not in sent
        assert "bm8gcGRm" not in sent
        blocks = [block for one in upstream.requests[-1].body["messages"] for block in one["content"]]
        [shown] = [block for block in blocks if isinstance(block, dict) and block["type"] == "image"]
        assert fitted_image(shown["source"]["data"]) is None
        turn = await ask(engine, "third")
        assert turn.continuity in ("warm", "resumed")
        assert turn.evidence.notes == ()
        assert upstream.requests[-1].raw.decode().count(shown["source"]["data"]) == 1
