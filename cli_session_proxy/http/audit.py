"""The audit log: who read, deleted, exported, rewound, approved or changed keys; one JSON line each, append-only.

    <var>/audit.jsonl        where keys name owners; `audit` names another file. Without either there is none.

A line is written before the first byte of an answer, so that nothing is read without one. Before a change there is
another one, without a status: if the process is killed meanwhile, the log shows the intent. No line has content of a
conversation, a key or a token. The file may be moved away at any time (logrotate): the next line begins a new one.
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
from ..tasks import failures_logged

Action = Literal[
    "read", "export", "import", "delete", "archive", "rewind", "cancel", "commit", "change", "approve", "keys"
]  # fmt: skip
# Actors without a request.
Here = Literal["command", "serve"]

FILE = "audit.jsonl"
# The secret for fingerprints of keys: without it, the audit log does not even allow guessing a key.
SALT = "audit.salt"
# Routes that the page polls: logged once in so many seconds for each owner and address.
POLLED = frozenset({"/v1/overview", "/v1/previews", "/v1/chains", "/v1/approvals"})
SELDOM = 300.0
MOST_REMEMBERED = 4096

# GET routes without content of conversations.
NOTHING_READ = re.compile(
    r"/|/healthz|/readyz|/metrics|/openapi\.json|/ui(/.*)?|/v1(beta)?/models(/.*)?|/api/(tags|ps|version)|"
    r"/v1/(assistants|threads).*"
)
# The actions of POST routes that are no turns, by the end of the path. None: not logged.
POSTS: Mapping[str, Action | None] = {
    "/rewind": "rewind", "/cancel": "cancel", "/commit": "commit", "/approve": "approve", "/items": "change",
    "/v1/conversations": "change", "/v1/conversations/{conversation_id}": "change",
    "/count_tokens": None, "/input_tokens": None, "/compact": None, "/api/show": None,
}  # fmt: skip
# The actions of commands that run without the server.
COMMANDS: Mapping[str, Action] = {
    "chains": "read", "show": "read", "find": "read", "dump": "read", "verify": "read", "export": "export",
    "import": "import", "adopt": "import", "delete": "delete", "rewind": "rewind", "commit": "commit",
    "migrate": "export", "audit": "read", "memory": "read",
}  # fmt: skip


def action_of(method: str, path: str) -> Action | None:
    """The action of a route, by its method and path template; None: not logged."""
    if method == "GET":
        return None if NOTHING_READ.fullmatch(path) else "read"
    if method == "DELETE":
        return "delete"
    ends = (action for end, action in POSTS.items() if path.endswith(end))
    return next(ends, None) if method == "POST" else None


@dataclass(frozen=True, slots=True)
class AuditLine(Recorded):
    """`at`: UTC seconds. `by`: a request, the server, or a command, whose user's login is the `address`.

    `owner`: of the conversations; `key`: the name of the key that was used; `what`: method and path, or a command.
    `status`: of the answer; None: written before the action.
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
        self._read: dict[tuple[str, ...], float] = {}  # polled routes, and when each was last logged

    def write(self, line: AuditLine) -> None:
        """Raises `StoreUnavailable` if it cannot be written."""
        data = json.dumps(line.as_json(), separators=(",", ":")).encode() + b"\n"
        try:
            if os.write(self._opened(), data) != len(data):
                self.close()  # the next line opens the file again, after the torn line
                raise OSError(None, "the disk is full")
        except (OSError, SandboxError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise StoreUnavailable(
                f"the audit {self.path} cannot be written ({why}): nothing is done without it"
            ) from exc

    def request(self, line: AuditLine) -> None:
        """Write it, but polled routes only now and then."""
        path = line.what.partition(" ")[2]
        if path in POLLED and (line.status or 0) < 400:
            reader = line.owner or "", line.address or "", path
            if line.at - self._read.get(reader, 0.0) < SELDOM:
                return
            if len(self._read) >= MOST_REMEMBERED:
                self._read.clear()
            self._read[reader] = line.at
        self.write(line)

    def keys(self, var: Path, now: Mapping[str, str]) -> None:
        """Log the names of the keys if they have changed since the last entry. `now`: the secrets by name."""
        try:
            make_private(var)
            handle = os.open(var / SALT, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pass
        else:
            with open(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
        salt = read_secret(var / SALT, SALT)
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
        """All lines, oldest first, including rotated files (`audit.jsonl.1`), without torn ones."""
        rotated = [one for one in self.path.parent.glob(f"{self.path.name}.*") if not one.name.endswith((".gz", ".xz"))]
        for path in [*sorted(rotated, key=lambda one: one.stat().st_mtime), self.path]:
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
        """The present file of this name."""
        if self._fd is not None:
            try:
                current, mine = os.stat(self.path), os.fstat(self._fd)
                if (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino):
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
    """The audit log; None without named keys and a configured file."""
    if not settings.is_audited:
        return None
    return Audit(settings.var / FILE if settings.audit is None else settings.audit.expanduser())


@dataclass(slots=True)
class RequestAudit:
    """The lines of one request. `scope`: the original; `state`: the gate's; `detail`: from the route.

    A request that is forwarded may run here twice: its first line is written once.
    """

    audit: Audit
    scope: Mapping[str, Any]
    state: Mapping[str, Any]
    path: bytes
    has_keys: bool
    action: Action | None = None
    detail: JSON = field(default_factory=dict)

    def begins(self, path: str) -> None:
        """Called before the route runs. Raises `StoreUnavailable` if it cannot be logged."""
        if self.action is not None:
            return
        action = action_of(self.scope["method"], path)
        if action is not None and action != "read":
            self._write(action, None)
        self.action = action

    def answers(self, status: int) -> None:
        """Called before the answer. Raises `StoreUnavailable` if a read cannot be logged; not after a change."""
        action, self.action = self.action, None
        if action == "read":
            self._write(action, status)
        elif action is not None:
            with failures_logged("answer_not_audited"):
                self._write(action, status)

    def _write(self, action: Action, status: int | None) -> None:
        """The query is left out: it may have a key."""
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
    """Log what a command or service is about to do. Raises `StoreUnavailable` if it cannot."""
    login = getpass.getuser() if by == "command" else str(os.getuid())
    audit.write(AuditLine(action, time.time(), by, redact.text(what), owner, address=login, detail=dict(detail)))


def archives(audit: Audit, by: Here, agent: Agent, name: str) -> None:
    note(audit, "archive", by, f"archive {agent.agent_id}", agent.owner, object=name)


def expires(audit: Audit, agent: Agent) -> None:
    note(audit, "delete", "serve", f"retention_days {agent.agent_id}", agent.owner)


def of_command(audit: Audit, name: str, arguments: Mapping[str, object], login: Callable[[], str]) -> None:
    """Log a command of ours before it runs. Of its arguments only owner and agent are logged."""
    if (action := COMMANDS.get(name)) is None:
        return
    subject = next((str(arguments[one]) for one in ("agent_id", "name", "session") if arguments.get(one)), "")
    owner = arguments.get("owner")
    what = redact.text(f"{name} {subject}".strip())
    audit.write(AuditLine(action, time.time(), "command", what, str(owner) if owner else None, address=login()))


def _read(line: str) -> AuditLine | None:
    try:
        value = json.loads(line)
        return AuditLine.from_json(value)
    except (ValueError, TypeError, AttributeError):
        return None
