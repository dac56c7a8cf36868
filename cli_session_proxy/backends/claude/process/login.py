"""The CLI's login for confined agents: each CLI has a copy; only a renewal of the same login is copied back.

<config dir>/.credentials.json            the user's own; not writable in the sandbox
<private>/.credentials.json               the copy in the sandbox, in which the CLI renews its tokens as usual
<var>/confined/~logins/<agent>            the user's own at the time of the copy; agents cannot see it

Before each start and each turn of a confined agent, changed copies are checked, and after a turn its agent's. A copy
that differs only in its tokens (of the same kinds) and a later expiry is a renewal: it replaces the user's own if that
is unchanged since the copy, because a renewal invalidates the old tokens and would log the user out. If it cannot be
stored, that is tried again. Any other change is dropped, and the agent gets the user's own again.

Not covered: a token does not show its account, or whether it is valid. A shell in the sandbox could put another login
of the same kind and plan in its place, or fake tokens: the user would be logged out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from .... import logs
from ....sandbox import LOGINS, make_private, restore_access
from ....tasks import in_thread_at
from ..transcript.entries import contents
from . import descriptors

log = logs.get(__name__)

FILE = ".credentials.json"
# The fields of a login that a renewal changes (2.1.329).
LOGIN, TOKENS, EXPIRES = "claudeAiOauth", ("accessToken", "refreshToken"), "expiresAt"
# The largest file in bytes (usually a few hundred), and the longest validity of a renewed login in seconds (usually
# hours).
LONGEST, LONGEST_LIFE = 64 * 1024, 400 * 86400
# Seconds for which the agents' copies are waited for, and one copy that is in use. Usually milliseconds.
WAIT, WAIT_FOR_ONE = 2.0, 0.2
# Seconds in which other agents do not look at a copy that made them wait: at first, and at most after several times. If
# it made nobody wait for the longest of them, the next time is a first one: also a slow machine makes others wait.
LEFT_ALONE, LONGEST_LEFT_ALONE = 60.0, 3600.0


class Logins:
    """The copies for the CLIs of one proxy.

    Each agent's programs can hold up whoever looks at its copy, for as long as they live: nothing that others need is
    locked meanwhile. Only the user's own login and the originals are read and written by one at a time.
    """

    def __init__(self, config_dir: Path, var: Path) -> None:
        self._own = Path(os.path.realpath(config_dir / FILE))  # the user's own login
        self._originals = var / "confined" / LOGINS  # what each agent was given
        self._copies: dict[Path, tuple[int, ...] | None] = {}  # by private folder: the state of its copy when last seen
        self._in_use: defaultdict[Path, Lock] = defaultdict(Lock)  # by private folder
        # By private folder that made others wait: until when they leave it alone, and for how long.
        self._left_alone: dict[Path, tuple[float, float]] = {}
        self._ours = Lock()  # of the user's own login and the originals
        # The key of the thread that looks at all copies. Another one after that thread was left behind.
        self._scan = Path(secrets.token_hex(8))

    async def exchange(self, private: Path, *others: Path, give: bool) -> None:
        """Copy renewed logins back, then give this agent's CLI a copy of the user's own. `give` False: remove its copy,
        because its environment has another login. First the folder is created, and access to it and `others`
        restored."""
        scan = self._scan
        try:
            async with asyncio.timeout(WAIT):
                await in_thread_at(scan, self._take_back_changed, list(self._copies))
        except TimeoutError:
            if self._scan == scan:
                self._scan = Path(secrets.token_hex(8))
        await in_thread_at(private, self._exchange_own, private, others, give)

    async def take_back(self, private: Path) -> None:
        """Copy this agent's login back if its CLI has renewed it in the turn that has just ended: the user's own is
        invalid from then on."""
        if private in self._copies:
            await in_thread_at(private, self._take_back_changed, (private,))

    def _take_back_changed(self, copies: Iterable[Path]) -> None:
        for private in copies:
            began = time.monotonic()
            if began < self._left_alone.get(private, (0.0, 0.0))[0]:
                continue
            in_use = self._in_use[private]
            if in_use.acquire(timeout=WAIT_FOR_ONE):
                try:
                    self._take_back(private)
                except OSError as exc:  # tried again; before, this agent gets no other login
                    log.warning("login_not_stored", dir=private.name, error=exc.strerror)
                finally:
                    in_use.release()
            until, lasted = self._left_alone.get(private, (0.0, 0.0))
            if (now := time.monotonic()) - began >= WAIT_FOR_ONE and until < now:
                longer = 4 * lasted if began - until < LONGEST_LEFT_ALONE else 0.0
                lasts = min(max(longer, LEFT_ALONE), LONGEST_LEFT_ALONE)
                self._left_alone[private] = now + lasts, lasts

    def _exchange_own(self, private: Path, others: Sequence[Path], give: bool) -> None:
        make_private(private)
        for folder in (private, *others):
            restore_access(folder)
        with self._in_use[private]:
            if self._own.is_file():
                self._copies.setdefault(private, None)
            self._take_back(private)
            if give:
                self._give(private)
                return
            self._copies.pop(private, None)
            for copy in (private / FILE, self._originals / private.name):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # the agent made a folder there
                    copy.unlink()

    def _give(self, private: Path) -> None:
        """Replace this agent's copy by the user's own login, if it is another one."""
        if private not in self._copies:
            return
        copy = _read(private / FILE)
        with self._ours:
            own = _read(self._own)
            is_other = own is not None and own != copy
            if own is not None and is_other:
                make_private(self._originals)
                write_private(self._originals / private.name, own)
        if own is not None and is_other:
            write_private(private / FILE, own)
        self._copies[private] = _state(private / FILE)

    def _take_back(self, private: Path) -> None:
        """Replace the user's own login by this copy if that has changed, and is a renewal of it."""
        state = _state(private / FILE)
        if private not in self._copies or self._copies[private] == state:
            return
        copy = _read(private / FILE)
        with self._ours:
            self._renew(private, copy)
        self._copies[private] = state  # a renewal that cannot be read or stored now is not given up

    def _renew(self, private: Path, copy: bytes | None) -> None:
        original, own = _read(self._originals / private.name), _read(self._own)
        if None in (original, copy, own) or copy == original:
            return
        assert original is not None
        assert copy is not None
        if own != original or not is_renewal(original, copy):
            log.warning("login_not_taken_back", dir=private.name, renewed_elsewhere=own != original)
            return
        # The old login with the new tokens, written by us: the agent's own bytes may be JSON for Python and not for the
        # CLI (NaN, UTF-16), and would log the user out.
        login, tokens = _parsed(original), _parsed(copy)[LOGIN]
        login[LOGIN] |= {name: tokens[name] for name in (*TOKENS, EXPIRES)}
        renewed = json.dumps(login, separators=(",", ":")).encode()
        write_private(self._own, renewed)
        write_private(self._originals / private.name, renewed)
        log.info("login_renewed", dir=private.name)


def is_renewal(before: bytes, after: bytes) -> bool:
    """Whether it is the same login with other tokens of the same kinds, and a later expiry."""
    old_file, new_file = _parsed(before), _parsed(after)
    old, new = (parsed.get(LOGIN) for parsed in (old_file, new_file))
    if not isinstance(old, dict) or not isinstance(new, dict):
        return False
    if {**old_file, LOGIN: None} != {**new_file, LOGIN: None} or old.keys() != new.keys():
        return False
    if any(old[name] != new[name] for name in old if name not in (*TOKENS, EXPIRES)):
        return False
    old_end, new_end = old.get(EXPIRES), new.get(EXPIRES)
    if type(old_end) is not int or type(new_end) is not int:
        return False
    later = old_end < new_end < (time.time() + LONGEST_LIFE) * 1000
    return later and all(_kind(old.get(name)) == _kind(new.get(name)) != "" for name in TOKENS)


def _kind(token: Any) -> str:
    """A token's prefix: its kind and version."""
    return token.rpartition("-")[0][:12] if isinstance(token, str) and token.isascii() and token.isprintable() else ""


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> bytes | None:
    """The content; None for a file that is missing, not regular or too large."""
    try:
        return contents(path, most=LONGEST)
    except OSError as exc:
        if exc.errno in descriptors.NONE_FREE:  # that says nothing about the file
            raise
    return None


def _state(path: Path) -> tuple[int, ...] | None:
    """What changes with the file's content; None if there is no file."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
    return None


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, with mode 0600. Replaces a link that an agent put there, and no folder (OSError)."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".login-")
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
