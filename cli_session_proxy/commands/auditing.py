"""`audit`: who read, deleted, exported or changed what, from the file of `http.audit`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import get_args

from ..domain import times
from ..errors import ConfigError, did_you_mean, printable
from ..http.audit import Action, AuditLine, audit_of
from ..settings import Settings
from .listing import moment_of


def found(
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
    fits = (
        line for line in audit.lines() if line.at >= after and type in (None, line.type) and owner in (None, line.owner)
    )
    return deque(fits, maxlen=limit)


def as_json(found: Sequence[AuditLine]) -> Iterator[str]:
    """As they are in the file, one a line."""
    return (json.dumps(line.as_json(), separators=(",", ":")) for line in found)


def lines(found: Sequence[AuditLine]) -> Iterator[str]:
    for one in found:
        changed = {name: one.detail[name] for name in ("added", "removed", "changed") if one.detail.get(name)}
        how = "; ".join(f"{name} {', '.join(map(str, names))}" for name, names in changed.items())
        who = f"{one.owner or '-'} from {one.address or '-'}"
        status = "" if one.status is None else f" {one.status}"
        yield printable(f"{times.written(one.at)}  {one.type:8} {who}: {one.what}{status}{f' ({how})' if how else ''}")
    if not found:
        yield "nothing was noted"
