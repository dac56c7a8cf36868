"""Ways to break a transcript, as crashes, disks, clean-ups and people do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def spoken(of: list[str]) -> list[int]:
    """Which lines somebody said."""
    return [at for at, line in enumerate(of) if json.loads(line).get("type") in ("user", "assistant")]


def delete(path: Path) -> None:
    path.unlink()


def remove_a_middle_line(path: Path) -> None:
    kept = lines(path)
    del kept[spoken(kept)[2]]
    path.write_text("".join(kept), encoding="utf-8")


def break_a_parent(path: Path) -> None:
    kept = lines(path)
    at = spoken(kept)[2]
    line = json.loads(kept[at])
    line["parentUuid"] = "00000000-0000-4000-8000-000000000000"
    kept[at] = json.dumps(line, separators=(",", ":")) + "\n"
    path.write_text("".join(kept), encoding="utf-8")


def cut_the_last_line(path: Path) -> None:
    all_of_it = lines(path)
    last = spoken(all_of_it)[-1]
    kept = "".join(all_of_it[:last]) + all_of_it[last][: len(all_of_it[last]) // 2]
    path.write_text(kept, encoding="utf-8")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def append_garbage(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'\x00\xff not a record\n{"type":"user"')


def wipe(path: Path) -> None:
    """The folder of all transcripts, which this one lies in."""
    shutil.rmtree(next(parent for parent in path.parents if parent.name == "projects"))
