"""A journal of `tests.chaos` as JSON and back, so that another day's conversation can be judged as one history."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..chaos.client import Client, Known, Request, Speaker
from ..chaos.doors import Call, Got, Wire
from ..chaos.journal import Answer, Asked, Asking, Entry, Heard, Result, Said, Sent, Told
from ..chaos.pictures import with_picture

SPEAKERS = (
    Speaker("ada", "name", "chat", stream=True),
    Speaker("bob", "history", "chat", stream=False),
    Speaker("cy", "ids", "responses", stream=True),
    Speaker("dee", "name", "messages", stream=False, tools=True),
    Speaker("eve", "both", "messages", stream=True),
    Speaker("fay", "name", "messages", stream=True, tools=True),
)
TURNS = 4
_CHAINS = Path(__file__).parent / "chains-0.1.0.tar.gz"
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Sent, Heard, Asked, Told)}


def restored(folder: Path) -> tuple[list[Client], list[Entry]]:
    """The files that 0.1.0 wrote, in this folder; its clients and the journal as they were."""
    with tarfile.open(_CHAINS) as archive:
        archive.extractall(folder, filter="data")
    told: dict[str, list[dict[str, Any]]] = json.loads((folder / "clients.json").read_text())
    clients = [Client(speaker) for speaker in SPEAKERS]
    for client in clients:
        for known in map(known_read, told[client.speaker.name]):
            client.requests[known.request.turn] = known.request
            client.acknowledged(known.request.turn, known.got)
    journal = read((folder / "journal.jsonl").read_text())
    last = max(entry.at for entry in journal if isinstance(entry, Heard))
    # Before all that is told from now on: the clock of that machine had another beginning.
    earlier = [replace(one, at=one.at - last) if isinstance(one, Sent | Heard | Asked) else one for one in journal]
    return clients, earlier


def written(journal: Iterable[Entry]) -> str:
    return "\n".join(json.dumps({"kind": type(entry).__name__, **asdict(entry)}) for entry in journal)


def read(text: str) -> list[Entry]:
    return [_entry(json.loads(line)) for line in text.splitlines()]


def _entry(data: dict[str, Any]) -> Entry:
    kind = data.pop("kind")
    if data.get("answer") is not None:
        data["answer"] = _answer(data["answer"])
    if "asked" in data:
        data["asked"] = _asking(data["asked"])
    if data.get("path") is not None:
        data["path"] = tuple(Said(said["turn"], _answer(said["answer"])) for said in data["path"])
    entry: Entry = _KINDS[kind](**data)
    return entry


def known_written(known: Known) -> dict[str, Any]:
    """What a client has to know of an acknowledged turn to go on from it."""
    request = known.request
    asked = request.asked if isinstance(request.asked, str) else [asdict(one) for one in request.asked]
    place = {"turn": request.turn, "wire": request.wire, "before": request.before}
    return {**place, "asked": asked, "got": asdict(known.got)}


def known_read(data: dict[str, Any]) -> Known:
    wire: Wire = data["wire"]
    with_picture(data["turn"], "")  # made again: a client that brings its history shows it again
    got = data["got"]
    calls = tuple(Call(**call) for call in got["calls"])
    request = Request(data["turn"], _asking(data["asked"]), wire, "", {}, {}, None, tuple(data["before"]))
    return Known(request, Got(_answer(got["answer"]), calls, got["id"]))


def _asking(asked: Any) -> Asking:
    return asked if isinstance(asked, str) else tuple(Result(**one) for one in asked)


def _answer(data: dict[str, Any]) -> Answer:
    return Answer(data["text"], tuple(data["calls"]))
