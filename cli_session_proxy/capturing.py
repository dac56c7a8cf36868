"""What a turn added to a transcript: which of its lines are the turn's own, and whether they are all there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import client_tools, transcript
from .models import Block, Record


@dataclass(frozen=True, slots=True)
class Said:
    """How the CLI's side of a turn ended, as far as it concerns the session.

    `calls` are the client's that wait for results; `stopped`: the answer was cut at a stop sequence.
    """

    frame_uuid: str
    output: tuple[Block, ...]
    session_id: str
    cost_total: float | None = None
    calls: frozenset[str] = frozenset()
    stopped: bool = False


def after(entries: Sequence[transcript.Entry], leaf: str | None) -> list[transcript.Entry]:
    """The lines behind the path's last record; all of them when it is not among these lines."""
    if leaf is not None:
        for at, entry in enumerate(entries):
            if entry.uuid == leaf:
                return list(entries[at + 1 :])
    return list(entries)


def sound(entries: Sequence[transcript.Entry], leaf: str | None, said: Said, *, quiet: bool) -> list[Record]:
    """These lines as records, if they are this turn's whole exchange hanging on the path; else none."""
    path = [entry for entry in entries if entry.on_path]
    ours = [entry for entry in path if entry.kind == "user"]
    if not is_whole(path, said) or not transcript.unbroken(path, leaf):
        return []
    tagged = any(entry.uuid == said.frame_uuid for entry in ours)
    if not quiet and (not ours or (not tagged and any(entry.data.get("promptSource") for entry in ours))):
        return []
    return [entry.record() for entry in entries]


def is_whole(path: Sequence[transcript.Entry], said: Said) -> bool:
    """Does it hold all that was said: the calls that wait, or an exchange with its end?"""
    if said.calls:
        return said.calls <= set(client_tools.calls_of(block for entry in path for block in entry.content))
    return transcript.is_complete(path)


def read_after(path: Path, leaf: str | None) -> list[transcript.Entry]:
    try:
        return after(transcript.parse(path.read_bytes()).entries, leaf)
    except OSError:
        return []
