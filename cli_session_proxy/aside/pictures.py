"""Shrinks images to the model's limits. Runs in a helper process, because images are not trusted."""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

# The Messages API refuses an image of more than 5 MiB in base64 and, in a request with many, of more than 2,000 pixels
# a side. Images within these limits stay unchanged: the CLI itself makes its images just below.
MAX_BASE64 = 5 * 1024**2
MAX_SIDE = 2000
# The size to which larger images are shrunk, about as the CLI does it.
FIT_BASE64 = 5_000_000
FIT_SIDE = 1950
# The most pixels that are decoded: 100 megapixels are 400 MB in memory.
MAX_PIXELS = 100_000_000
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
# JPEG quality and scale, tried in this order until the image has few enough bytes.
_STEPS = ((85, 1.0), (60, 1.0), (60, 0.5), (40, 0.25))


class UnreadableImage(ValueError):
    """The model could not read this image. The message says why."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """An image within the limits, in base64. `was` and `now`: its width and height in pixels, before and after."""

    media_type: str
    data: str
    was: tuple[int, int]
    now: tuple[int, int]


def fitted(data: str) -> Fitted | None:
    """An image in base64 that the model accepts; None where `data` already is one. Raises `UnreadableImage`."""
    from PIL import Image  # noqa: PLC0415 - 10 MB that only the helper process needs

    Image.MAX_IMAGE_PIXELS = None  # checked below, before decoding
    try:
        raw = base64.b64decode(data, validate=True)
        with Image.open(io.BytesIO(raw), formats=list(FORMATS)) as image:
            was, kind = image.size, image.format or ""
            if was[0] * was[1] > MAX_PIXELS:
                raise UnreadableImage(f"it has {was[0]} x {was[1]} pixels, more than {MAX_PIXELS:,}")
            if max(was) > MAX_SIDE:
                image.draft("RGB", (FIT_SIDE, FIT_SIDE))  # a JPEG is decoded at a smaller size
            image.load()
            if max(was) <= MAX_SIDE and len(data) <= MAX_BASE64:
                return None
            image.thumbnail((FIT_SIDE, FIT_SIDE))
            return _written(image, kind, was)
    except UnreadableImage:
        raise
    except (OSError, SyntaxError, ValueError, binascii.Error, EOFError) as exc:
        raise UnreadableImage("it cannot be decoded") from exc


def _written(image: Image.Image, kind: str, was: tuple[int, int]) -> Fitted:
    if kind != "JPEG":  # try lossless first
        out = _saved(image.convert("RGBA"), "PNG")
        if len(out) <= FIT_BASE64:
            return Fitted("image/png", out, was, image.size)
    from PIL import Image  # noqa: PLC0415 - as above

    plain = Image.new("RGB", image.size, "white")
    plain.paste(image, mask=image.convert("RGBA").getchannel("A"))
    for quality, scale in _STEPS:
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        smaller = plain if scale == 1.0 else plain.resize(size)
        out = _saved(smaller, "JPEG", quality=quality)
        if len(out) <= FIT_BASE64:
            return Fitted("image/jpeg", out, was, smaller.size)
    raise UnreadableImage("it cannot be made small enough")


def _saved(image: Image.Image, kind: str, **how: int) -> str:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return base64.b64encode(out.getvalue()).decode("ascii")
