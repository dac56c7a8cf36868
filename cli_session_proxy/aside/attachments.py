"""Checks images and PDFs against the model's limits, and shrinks images. Runs in a helper process, because neither are
trusted."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
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

# The PDF header must be within the first bytes; readers accept some bytes before it.
_PDF_HEADER_WITHIN = 1024
# The most pages that the Messages API reads; for some models 100, which it reports itself.
MAX_PAGES = 600


class UnreadableImage(ValueError):
    """The model could not read this image. The message says why."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """An image within the limits, in base64. `was` and `now`: its width and height in pixels, before and after."""

    media_type: str
    data: str
    was: tuple[int, int]
    now: tuple[int, int]


def fitted_image(data: str) -> Fitted | None:
    """An image in base64 that the model accepts; None where `data` already is one. Raises `UnreadableImage`."""
    from PIL import Image, ImageOps  # noqa: PLC0415 - 10 MB that only the helper process needs

    Image.MAX_IMAGE_PIXELS = None  # checked below, before decoding
    try:
        raw = base64.b64decode(data, validate=True)
        with Image.open(io.BytesIO(raw), formats=list(FORMATS)) as image:
            was, file_format = image.size, image.format or ""
            if was[0] * was[1] > MAX_PIXELS:
                raise UnreadableImage(f"it has {was[0]} x {was[1]} pixels, more than {MAX_PIXELS:,}")
            if max(was) > MAX_SIDE:
                image.draft("RGB", (FIT_SIDE, FIT_SIDE))  # a JPEG is decoded at a smaller size
            image.load()
            if max(was) <= MAX_SIDE and len(data) <= MAX_BASE64:
                return None
            image.thumbnail((FIT_SIDE, FIT_SIDE))
            with contextlib.suppress(Exception):  # whatever Pillow raises for damaged EXIF data: it is left as it is
                ImageOps.exif_transpose(image, in_place=True)  # what is saved does not say how it is to be turned
            if file_format != "JPEG":  # try lossless first
                out = _saved(image.convert("RGBA"), "PNG")
                if len(out) <= FIT_BASE64:
                    return Fitted("image/png", out, was, image.size)
            plain = Image.new("RGB", image.size, "white")
            plain.paste(image, mask=image.convert("RGBA").getchannel("A"))
            for quality, scale in _STEPS:
                size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
                smaller = plain if scale == 1.0 else plain.resize(size)
                out = _saved(smaller, "JPEG", quality=quality)
                if len(out) <= FIT_BASE64:
                    return Fitted("image/jpeg", out, was, smaller.size)
            raise UnreadableImage("it cannot be made small enough")
    except UnreadableImage:
        raise
    except (OSError, SyntaxError, ValueError, EOFError) as exc:
        raise UnreadableImage("it cannot be decoded") from exc


def _saved(image: Image.Image, file_format: str, **options: int) -> str:
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return base64.b64encode(out.getvalue()).decode("ascii")


def document_fault(data: str) -> str | None:
    """Why the PDF in base64 cannot be read, as the end of a sentence that begins with "it"; None where it can."""
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # letters beyond ASCII, too
        return "it is not base64"
    if b"%PDF-" not in raw[:_PDF_HEADER_WITHIN]:
        return "it is not a PDF"

    from pypdf import PdfReader  # noqa: PLC0415 - only the helper process needs it
    from pypdf.errors import DependencyError  # noqa: PLC0415 - as above

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # no warnings for what it repairs itself
    try:
        reader = PdfReader(io.BytesIO(raw))
        if reader.is_encrypted and not reader.decrypt(""):
            return "it is protected by a password"
        pages = len(reader.pages)
    except DependencyError:
        return None  # an unsupported cipher: let the provider decide
    except Exception as exc:  # noqa: BLE001 - it raises nearly anything where the file is damaged
        return f"it is damaged ({type(exc).__name__})"
    if not pages:
        return "it has no pages"
    return f"it has {pages} pages, more than {MAX_PAGES}" if pages > MAX_PAGES else None
