"""What no model can read of a PDF. Runs in a helper process: what a PDF holds is a stranger's."""

from __future__ import annotations

import base64
import io
import logging

# A PDF says what it is among its first bytes; readers allow for some before it.
_HEAD = 1024
# The Messages API reads no more pages, of some models only 100: that one it says itself.
MAX_PAGES = 600


def fault(data: str) -> str | None:
    """Why the PDF in base64 cannot be read, as the end of a sentence that begins with "it"; None where it can."""
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # letters beyond ASCII, too
        return "it is not base64"
    if b"%PDF-" not in raw[:_HEAD]:
        return "it is no PDF"

    from pypdf import PdfReader  # noqa: PLC0415 - only the helper process needs it
    from pypdf.errors import DependencyError  # noqa: PLC0415 - as above

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what it mends itself is no news
    try:
        reader = PdfReader(io.BytesIO(raw))
        if reader.is_encrypted and not reader.decrypt(""):
            return "it is protected by a password"
        pages = len(reader.pages)
    except DependencyError:
        return None  # a cipher that is not at hand here: the provider decides
    except Exception as exc:  # noqa: BLE001 - it raises nearly anything where the file is damaged
        return f"it is damaged ({type(exc).__name__})"
    if not pages:
        return "it has no pages"
    return f"it has {pages} pages, more than {MAX_PAGES}" if pages > MAX_PAGES else None
