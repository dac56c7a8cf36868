"""The forms of ids and names that come from elsewhere: from files, another program, or a client.

They become file names, arguments of a command line, parts of a page. They are checked where they enter, and session
ids again where a path is made of one.
"""

from __future__ import annotations

import re
from typing import TypeGuard

# A session's id is the UUID that the CLI handed out.
UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
TURN_ID = r"turn_[0-9A-Za-z]{1,64}"
# A model's name becomes an argument of the CLI: it must not look like a flag.
MODEL = r"[A-Za-z0-9][A-Za-z0-9._:/@\[\]-]{0,255}"
VERSION = r"[0-9A-Za-z.+-]{0,64}"

_SESSION_ID, _MODEL, _VERSION = map(re.compile, (UUID, MODEL, VERSION))


def is_session_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _SESSION_ID.fullmatch(value) is not None


def is_model(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _MODEL.fullmatch(value) is not None


def is_version(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None
