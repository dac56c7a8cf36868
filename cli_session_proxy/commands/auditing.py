"""`audit`: who read, deleted, exported or changed what, from the file of `http.audit`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import get_args

from ..domain import times
from ..errors import ConfigError, did_you_mean, printable
from ..http.audit import Action, AuditLine, audit_of
from ..settings import Settings
from .listing import moment_of


def newest_lines(
    settings: Settings, type: str | None, since: str | None, owner: str | None, limit: int
) -> Sequence[AuditLine]:
    """The newest lines of the file, in its order. Raises `ConfigError`."""
    audit = audit_of(settings)
    if audit is None:
        raise ConfigError(
            'no audit is kept, because there are no keys: name owners in [keys], or set audit = "audit.jsonl"'
        )
    if type is not None and type not in get_args(Action):
        raise ConfigError(f"--type {type}: {did_you_mean(type, get_args(Action)) or ', '.join(get_args(Action))}")
    after = 0.0 if since is None else moment_of("--since", since)
    matches = (
        line for line in audit.lines() if line.at >= after and type in (None, line.type) and owner in (None, line.owner)
    )
    return deque(matches, maxlen=limit)


def as_text(lines: Sequence[AuditLine]) -> Iterator[str]:
    """For a person: one line each."""
    for line in lines:
        keys = {change: line.detail[change] for change in ("added", "removed", "changed") if line.detail.get(change)}
        changes = "; ".join(f"{change} {', '.join(map(str, names))}" for change, names in keys.items())
        who = f"{line.owner or '-'} from {line.address or '-'}"
        status = "" if line.status is None else f" {line.status}"
        suffix = f" ({changes})" if changes else ""
        yield printable(f"{times.written(line.at)}  {line.type:8} {who}: {line.what}{status}{suffix}")
    if not lines:
        yield "nothing was noted"
