"""Images and PDFs, whole and damaged."""

from __future__ import annotations

import base64
import io

from PIL import Image
from pypdf import PdfWriter

from cli_session_proxy.domain.models import Block


def picture(width: int, height: int, kind: str = "PNG", *, noise: bool = False) -> str:
    """In base64. With `noise` it cannot be packed."""
    image = Image.effect_noise((width, height), 90.0).convert("RGB") if noise else Image.new("RGB", (width, height))
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 100} if kind == "JPEG" else {}))
    return base64.b64encode(out.getvalue()).decode()


def image(data: str, kind: str = "image/png") -> Block:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def paper(pages: int = 1, password: str | None = None) -> bytes:
    """A PDF of so many empty pages."""
    writer = PdfWriter()
    for _ in range(pages):
        writer.add_blank_page(100, 100)
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def document(data: bytes) -> Block:
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(data).decode()}
    return {"type": "document", "source": source}
