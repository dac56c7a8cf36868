"""Checks whether a model can read a PDF. Runs in a helper process, because PDFs are not trusted."""

from __future__ import annotations

import base64
import io
import logging

# The PDF header must be within the first bytes; readers accept some bytes before it.
_HEAD = 1024
# The most pages that the Messages API reads; for some models 100, which it reports itself.
MAX_PAGES = 600


def fault(data: str) -> str | None:
    """Why the PDF in base64 cannot be read, as the end of a sentence that begins with "it"; None where it can."""
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # letters beyond ASCII, too
        return "it is not base64"
    if b"%PDF-" not in raw[:_HEAD]:
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
