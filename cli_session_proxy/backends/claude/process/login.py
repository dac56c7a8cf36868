"""The CLI's login for confined agents: each CLI has a copy, and a copy comes back only as a renewal of the same login.

    <config dir>/.credentials.json            the user's own; nothing inside the boundary can write it
    <private>/.credentials.json               what the CLI finds inside; it renews its tokens there, as it always does
    <var>/confined/~logins/<agent>            the user's own as it was copied, which no agent sees

Before each start, and before each turn of a confined agent, copies that were written to are looked at. One that differs
from what was copied in nothing but its tokens, of the same kinds, and in a later expiry, replaces the user's own, where
that is still the one that was copied: a renewal ends the tokens before it, and the user would be logged out. Everything
else is dropped, and the agent gets the user's own again.

A token does not show whose account it is of, or whether it works. A shell behind the boundary could put a login of its
own, of the same kind and plan, in its place, or words that look like tokens: the user would be logged out.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from .... import logs
from ....sandbox import LOGINS, make_private

log = logs.get(__name__)

FILE = ".credentials.json"
# What changes at a renewal, within the one entry that is a login (2.1.329).
LOGIN, TOKENS, EXPIRES = "claudeAiOauth", ("accessToken", "refreshToken"), "expiresAt"
# Bytes of the file: a few hundred in the field. And for how many seconds a renewed login may be good: it is hours.
LONGEST, LONGEST_LIFE = 64 * 1024, 400 * 86400


class Logins:
    """The copies that the CLIs of one proxy were given. Its calls block; no two at once."""

    def __init__(self, config_dir: Path, var: Path) -> None:
        self._own = Path(os.path.realpath(config_dir / FILE))
        self._bases = var / "confined" / LOGINS
        self._lent: dict[Path, tuple[int, ...] | None] = {}  # private directories, and the state of their copies

    def exchange(self, private: Path, *, lend: bool) -> None:
        """Take renewed logins back, then give this agent's CLI the user's own as it is now. `lend` False: none, because
        its environment holds another one."""
        if self._own.is_file():
            self._lent.setdefault(private, None)
        for there in list(self._lent):
            if self._lent[there] != _state(there / FILE):
                self._take_back(there)
        if not lend:
            self._lent.pop(private, None)
            for copy in (private / FILE, self._bases / private.name):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder is the agent's own
                    copy.unlink()
        elif private in self._lent:
            self._lend(private)

    def _lend(self, private: Path) -> None:
        own = _read(self._own)
        if own is not None and own != _read(private / FILE):
            make_private(self._bases)
            write_private(self._bases / private.name, own)
            write_private(private / FILE, own)
        self._lent[private] = _state(private / FILE)

    def _take_back(self, private: Path) -> None:
        base, copy, own = (_read(at) for at in (self._bases / private.name, private / FILE, self._own))
        self._lent[private] = _state(private / FILE)
        if None in (base, copy, own) or copy == base:
            return
        assert base is not None
        assert copy is not None
        if own != base or not is_renewal(base, copy):
            log.warning("login_not_taken_back", agent=private.name, renewed_elsewhere=own != base)
            return
        renewed = _with_tokens(base, copy)
        write_private(self._own, renewed)
        write_private(self._bases / private.name, renewed)
        log.info("login_renewed", agent=private.name)


def is_renewal(before: bytes, after: bytes) -> bool:
    """The same login with other tokens of the same kinds, good for longer."""
    old, new = _parsed(before), _parsed(after)
    was, now = (told.get(LOGIN) for told in (old, new))
    if not isinstance(was, dict) or not isinstance(now, dict):
        return False
    if {**old, LOGIN: None} != {**new, LOGIN: None} or was.keys() != now.keys():
        return False
    if any(was[name] != now[name] for name in was if name not in (*TOKENS, EXPIRES)):
        return False
    ends, ended = now.get(EXPIRES), was.get(EXPIRES)
    later = type(ends) is int and type(ended) is int and ended < ends < (time.time() + LONGEST_LIFE) * 1000
    return later and all(_kind(was.get(name)) == _kind(now.get(name)) != "" for name in TOKENS)


def _with_tokens(before: bytes, after: bytes) -> bytes:
    """The login before its renewal with the tokens after it. Not the bytes that an agent wrote: Python reads texts that
    are none to the CLI (NaN, UTF-16), and the user would be logged out."""
    login = _parsed(before)
    now = _parsed(after)[LOGIN]
    login[LOGIN] |= {name: now[name] for name in (*TOKENS, EXPIRES)}
    return json.dumps(login, separators=(",", ":")).encode()


def _kind(token: Any) -> str:
    """A token's prefix: its kind and version."""
    return token.rpartition("-")[0][:12] if isinstance(token, str) and token.isascii() and token.isprintable() else ""


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _read(path: Path) -> bytes | None:
    """None for what is no regular file, or too large for one."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return text if len(text := file.read(LONGEST + 1)) <= LONGEST else None
    except OSError:
        return None


def _state(path: Path) -> tuple[int, ...] | None:
    with contextlib.suppress(OSError):
        told = os.lstat(path)
        return told.st_ino, told.st_mtime_ns, told.st_size, told.st_mode
    return None


def write_private(path: Path, text: bytes) -> None:
    """Write atomically, with mode 0600. Replaces whatever an agent put there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".login-")
    try:
        with open(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
