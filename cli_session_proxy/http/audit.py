"""Who read, deleted, exported, rewound, approved or changed keys: one JSON line each, only ever appended.

    <var>/audit.jsonl        where keys name owners; `audit` names another file. Without either there is none.

A line is written before the first byte of an answer, so that nothing is read without one. Before something is changed
there is one more, without a status: who is killed meanwhile has told what it was about to do. No line has words
of a conversation, a key or a token. The file may be moved away at any time (logrotate): the next one begins a new file.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .. import redact
from ..domain.forms import Recorded
from ..domain.models import JSON, Agent
from ..errors import SandboxError, StoreUnavailable
from ..sandbox import make_private
from ..settings import Settings, read_secret
from ..tasks import survived

Action = Literal[
    "read", "export", "import", "delete", "archive", "rewind", "cancel", "commit", "change", "approve", "keys"
]  # fmt: skip
# What acts here without a request.
Here = Literal["command", "serve"]

FILE = "audit.jsonl"
# By what the fingerprints of keys are made: whoever has the audit alone learns nothing of a key, not even by guessing.
SALT = "audit.salt"
# Routes that a page asks again and again: noted once in so many seconds for each owner and address.
POLLED = frozenset({"/v1/overview", "/v1/previews", "/v1/chains", "/v1/approvals"})
SELDOM = 300.0
MOST_REMEMBERED = 4096

# GET routes that show nothing of a conversation.
NOTHING_READ = re.compile(
    r"/|/healthz|/readyz|/metrics|/openapi\.json|/ui(/.*)?|/v1(beta)?/models(/.*)?|/api/(tags|ps|version)|"
    r"/v1/(assistants|threads).*"
)
# What a POST does that is no turn, by the end of its path. None: nothing of a conversation.
POSTS: Mapping[str, Action | None] = {
    "/rewind": "rewind", "/cancel": "cancel", "/commit": "commit", "/approve": "approve", "/items": "change",
    "/v1/conversations": "change", "/v1/conversations/{conversation_id}": "change",
    "/count_tokens": None, "/input_tokens": None, "/compact": None, "/api/show": None,
}  # fmt: skip
# What a command does that is run here, past the server.
COMMANDS: Mapping[str, Action] = {
    "chains": "read", "show": "read", "find": "read", "dump": "read", "verify": "read", "export": "export",
    "import": "import", "adopt": "import", "delete": "delete", "rewind": "rewind", "commit": "commit",
    "migrate": "export", "audit": "read", "memory": "read",
}  # fmt: skip


def action_of(method: str, path: str) -> Action | None:
    """What a route does, by its method and its path with the names of its parameters; None: nothing to note."""
    if method == "GET":
        return None if NOTHING_READ.fullmatch(path) else "read"
    if method == "DELETE":
        return "delete"
    ends = (action for end, action in POSTS.items() if path.endswith(end))
    return next(ends, None) if method == "POST" else None


@dataclass(frozen=True, slots=True)
class AuditLine(Recorded):
    """`at` is in UTC seconds. `by`: a request, or a command of a person at this machine, whose login is the `address`.

    `owner` is whose conversations they are, `key` the name of the key that was shown; `what` a method and a path, or a
    command. `status` is the answer's; None: it was about to be done.
    """

    type: Action
    at: float
    by: Here | Literal["http"]
    what: str
    owner: str | None = None
    key: str | None = None
    address: str | None = None
    request_id: str | None = None
    status: int | None = None
    detail: JSON = field(default_factory=dict)


class Audit:
    """One file of lines. Several processes may write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._read: dict[tuple[str, ...], float] = {}  # what was polled, and when it was noted last

    def write(self, line: AuditLine) -> None:
        """Raises `StoreUnavailable` where it cannot be written."""
        data = json.dumps(line.as_json(), separators=(",", ":")).encode() + b"\n"
        try:
            if os.write(self._opened(), data) != len(data):
                self.close()  # the next line looks what is there, and begins behind the torn one
                raise OSError(None, "the disk is full")
        except (OSError, SandboxError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise StoreUnavailable(f"the audit {self.path} cannot be written ({why}): nothing is done without") from exc

    def request(self, told: AuditLine) -> None:
        """The same, but for what a page asks again and again."""
        path = told.what.partition(" ")[2]
        if path in POLLED and (told.status or 0) < 400:
            of = told.owner or "", told.address or "", path
            if told.at - self._read.get(of, 0.0) < SELDOM:
                return
            if len(self._read) >= MOST_REMEMBERED:
                self._read.clear()
            self._read[of] = told.at
        self.write(told)

    def keys(self, var: Path, now: Mapping[str, str]) -> None:
        """Note which keys there are, by name, where it is not as it was noted last. `now`: the secrets."""
        salt = _salt(var / SALT)
        marks = {name: hmac.new(salt, secret.encode(), hashlib.sha256).hexdigest()[:16] for name, secret in now.items()}
        last = [one.detail.get("keys") for one in self.lines() if one.type == "keys"]
        before = last[-1] if last and isinstance(last[-1], dict) else {}
        if marks == before:
            return
        how: JSON = {
            "added": sorted(marks.keys() - before.keys()), "removed": sorted(before.keys() - marks.keys()),
            "changed": sorted(name for name in marks.keys() & before.keys() if marks[name] != before[name]),
            "keys": marks,
        }  # fmt: skip
        self.write(AuditLine("keys", time.time(), "serve", "keys", address=str(os.getuid()), detail=how))

    def lines(self) -> Iterator[AuditLine]:
        """All of them, the oldest first, from files that were moved aside too (`audit.jsonl.1`); no torn ones."""
        aside = [one for one in self.path.parent.glob(f"{self.path.name}.*") if not one.name.endswith((".gz", ".xz"))]
        for path in [*sorted(aside, key=lambda one: one.stat().st_mtime), self.path]:
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    yield from filter(None, map(_read, file))
            except (FileNotFoundError, IsADirectoryError):
                continue

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _opened(self) -> int:
        """The file that is there under the name now."""
        if self._fd is not None:
            try:
                there, mine = os.stat(self.path), os.fstat(self._fd)
                if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                    return self._fd
            except FileNotFoundError:
                pass
            self.close()
        if not self.path.parent.exists():
            make_private(self.path.parent)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        return self._fd


def audit_of(settings: Settings) -> Audit | None:
    """Where keys name owners, or a file is named; somebody alone has none."""
    if not settings.is_audited:
        return None
    return Audit(settings.var / FILE if settings.audit is None else settings.audit.expanduser())


@dataclass(slots=True)
class RequestAudit:
    """The lines of one request. `scope` as it came in, `state` as the gate made it; `detail` is the route's.

    A request that another proxy is to run is tried here first, and may be tried again: it is begun once.
    """

    audit: Audit
    scope: Mapping[str, Any]
    state: Mapping[str, Any]
    path: bytes
    has_keys: bool
    action: Action | None = None
    detail: JSON = field(default_factory=dict)

    def begins(self, path: str) -> None:
        """The route of this path is about to run. Raises `StoreUnavailable` where that cannot be noted."""
        if self.action is not None:
            return
        action = action_of(self.scope["method"], path)
        if action is not None and action != "read":
            self._write(action, None)
        self.action = action

    def answers(self, status: int) -> None:
        """Raises `StoreUnavailable` where it cannot be noted that something is read. What is done is done."""
        action, self.action = self.action, None
        if action == "read":
            self._write(action, status)
        elif action is not None:
            with survived("answer_not_audited"):
                self._write(action, status)

    def _write(self, action: Action, status: int | None) -> None:
        """A query is left out: it may hold a key."""
        client, owner = self.scope.get("client"), self.state["owner"]
        what = redact.text(f"{self.scope['method']} {self.path.decode('latin-1')}")
        self.audit.request(
            AuditLine(
                action, time.time(), "http", what, owner, owner if self.has_keys else None,
                client[0] if client else "unix", redact.text(self.state["request_id"]), status, self.detail,
            )
        )  # fmt: skip


def note(
    audit: Audit, action: Action, by: Literal["command", "serve"], what: str, owner: str, **detail: object
) -> None:
    """What a command or a service is about to do here. Raises `StoreUnavailable` where it cannot be noted."""
    login = getpass.getuser() if by == "command" else str(os.getuid())
    audit.write(AuditLine(action, time.time(), by, redact.text(what), owner, address=login, detail=dict(detail)))


def archives(audit: Audit, by: Here, agent: Agent, name: str) -> None:
    note(audit, "archive", by, f"archive {agent.agent_id}", agent.owner, object=name)


def expires(audit: Audit, agent: Agent) -> None:
    note(audit, "delete", "serve", f"retention_days {agent.agent_id}", agent.owner)


def of_command(audit: Audit, name: str, given: Mapping[str, object], login: Callable[[], str]) -> None:
    """A command of ours is about to run. Of what it was given, whose conversation it is."""
    if (action := COMMANDS.get(name)) is None:
        return
    named = next((str(given[one]) for one in ("agent_id", "wanted", "session") if given.get(one)), "")
    owner = given.get("owner")
    what = redact.text(f"{name} {named}".strip())
    audit.write(AuditLine(action, time.time(), "command", what, str(owner) if owner else None, address=login()))


def _read(line: str) -> AuditLine | None:
    try:
        told = json.loads(line)
        return AuditLine.from_json(told)
    except (ValueError, TypeError, AttributeError):
        return None


def _salt(path: Path) -> bytes:
    try:
        make_private(path.parent)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_secret(path, SALT)
    with open(handle, "wb") as file:
        file.write(secrets.token_bytes(32))
    return read_secret(path, SALT)
