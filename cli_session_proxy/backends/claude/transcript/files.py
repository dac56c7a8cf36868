"""Where the CLI keeps a session's file, and what lies beside it.

    <config>/projects/<folder of the working directory>/<session id>.jsonl      the transcript
                                                        /<session id>/…         large tool results, sub-agents

A path is only ever made of a session id (`domain.limits`), and nothing is written through a link below a folder
of a session: what an import or a stored chain says can neither leave this layout nor be led out of it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from .... import logs
from ....domain.limits import is_session_id
from ....domain.models import Record
from ....errors import SandboxError
from ....sandbox import folder_below, remove_any

log = logs.get(__name__)

SUFFIX = ".jsonl"
ASIDE = ".aside-"  # behind the session's id: what was moved away from its place, and could not be moved further
DEEPEST = 16  # folders in each other beside a transcript; the CLI makes two
# Names of one folder that are looked at: a shell can make millions, and each turn looks at all of them.
MOST_NAMES = 100_000
LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
REMOVED_MEANWHILE = 20  # tries to make an agent's folder while CLIs remove empty ones
MEMORY = "memory"  # beside the sessions: what the model wrote down for later ones (2.1.329)


def in_folder(project: Path, session_id: str) -> Path:
    """The session's transcript in this folder. Raises `SandboxError` for what is no session id."""
    if not is_session_id(session_id):
        raise SandboxError(
            f"{session_id[:80]!r} is no session id: no path is made of it; `delete` the agent that has it"
        )
    return project / f"{session_id}{SUFFIX}"


def checked(path: Path) -> Path:
    """The path, if it is a transcript's. Raises `SandboxError`."""
    if path != in_folder(path.parent, path.name.removesuffix(SUFFIX)):
        raise SandboxError(f"{path} is no session's transcript: left alone")
    return path


def find_elsewhere(config_dir: Path, session_id: str, expected: Path) -> list[Path]:
    """The same session's file under other working directories' folders (moved sandbox, doubled prefix)."""
    found = (config_dir / "projects").glob(f"*/{in_folder(config_dir, session_id).name}")
    return sorted(path for path in found if path != expected and path.is_file() and not path.is_symlink())


def sessions_in(folder: Path) -> list[Path]:
    """The transcripts among the first `MOST_NAMES` names of a folder. A link is none."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            Path(entry.path)
            for entry in islice(entries, MOST_NAMES)
            if entry.name.endswith(SUFFIX)
            and is_session_id(entry.name.removesuffix(SUFFIX))
            and entry.is_file(follow_symlinks=False)
        ]
    return []


def beside(path: Path) -> Path:
    """The folder of the session's name beside its transcript: large tool results, sub-agents' own transcripts."""
    return path.with_suffix("")


def temporary(session_id: str) -> str:
    """How the name of a transcript that is being written begins."""
    return f".{session_id[:8]}-"


def _opened_beside(path: Path) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    """The regular files in that folder, opened, in order, by their names below the transcript's folder.

    Each folder is opened from the one above it, and no link is followed, whatever happens meanwhile. What vanishes or
    cannot be read is left out: it is the CLI's to remove. So is what is beyond `MOST_NAMES`.
    """
    top = beside(path)
    try:
        folder = os.open(top, LOOK | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        yield from _opened_in(folder, PurePosixPath(top.name), iter(range(MOST_NAMES)))
    finally:
        os.close(folder)


def _opened_in(folder: int, below: PurePosixPath, left: Iterator[int]) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry, _ in zip(entries, left, strict=False))
    for name in names:
        try:
            opened = os.open(name, LOOK, dir_fd=folder)
        except OSError:
            continue
        mode = os.fstat(opened).st_mode
        if stat.S_ISREG(mode):
            with open(opened, "rb") as file:
                yield below / name, file
            continue
        try:
            if stat.S_ISDIR(mode) and len(below.parts) < DEEPEST:
                yield from _opened_in(opened, below / name, left)
        finally:
            os.close(opened)


def copy_beside(source: Path, target: Path) -> int:
    """Copy the files beside one transcript to beside another. Returns how many.

    Raises `SandboxError` where a link lies in the way, OSError.
    """
    copied = 0
    for name, opened in _opened_beside(source):
        place = PurePosixPath(checked(target).stem, *name.parts[1:])
        with folder_below(target.parent, place) as folder:
            _write_in(folder, place.name, opened)
            state = os.fstat(opened.fileno())
            os.utime(place.name, ns=(state.st_atime_ns, state.st_mtime_ns), dir_fd=folder, follow_symlinks=False)
        copied += 1
    return copied


def move(path: Path, target: Path) -> None:
    """Move a transcript and what lies beside it to where the CLI looks. Raises `SandboxError`, OSError."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if copy_beside(path, target):
        remove_any(beside(path))
    os.replace(path, target)


def remove(path: Path) -> None:
    """Remove a transcript, what was kept beside it, and what a proxy that was killed as it wrote it left of it.

    Raises `SandboxError`.
    """
    remove_any(checked(path))
    remove_any(beside(path))
    ours = f"{path.stem}{ASIDE}", temporary(path.stem)
    with contextlib.suppress(FileNotFoundError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(ours):
                remove_any(Path(entry.path))


def make_project(project: Path) -> None:
    """Make an agent's folder of sessions, and something in it.

    Every CLI removes empty folders of sessions some seconds after its start (2.1.332). Where that is between the moment
    in which another CLI makes its folder and the one in which it writes there, that one loses these records.
    """
    for _ in range(REMOVED_MEANWHILE):
        project.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(FileExistsError):
                (project / MEMORY).mkdir(mode=0o700)
            return


def remove_project(project: Path, *, whole: bool) -> None:
    """Remove what the CLI itself noted for an agent's working directory, and the folder where nothing else is in it, or
    in any case (`whole`). Raises `SandboxError`."""
    remove_any(project if whole else project / MEMORY)
    with contextlib.suppress(OSError):  # another session of somebody's is there, or no folder
        project.rmdir()


def is_place(name: object) -> bool:
    """Whether a kept file's name is one below a session's own folder: `<session id>/…`, each part a plain name."""
    if not isinstance(name, str) or "\0" in name:
        return False
    parts = name.split("/")
    return len(parts) > 1 and is_session_id(parts[0]) and not {"", ".", ".."} & set(parts)


def write_below(project: Path, name: str, data: bytes) -> bool:
    """Write a kept file where its name says, unless one of its size is there. False when it is there.

    Raises `SandboxError` where a link lies in the way: each folder is opened from the one above it.
    """
    if not is_place(name):
        raise SandboxError(f"{name[:200]!r} is no file's place below a session's folder: nothing is written there")
    place = PurePosixPath(name)
    with folder_below(project, place) as folder:
        with contextlib.suppress(FileNotFoundError):
            there = os.lstat(place.name, dir_fd=folder)
            if stat.S_ISREG(there.st_mode) and there.st_size == len(data):
                return False
        _write_in(folder, place.name, io.BytesIO(data))
        return True


def _write_in(folder: int, name: str, source: BinaryIO) -> None:
    fresh = f".{os.getpid()}-{os.urandom(8).hex()}"
    created = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(created, "wb") as file:
            shutil.copyfileobj(source, file)
        os.replace(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(fresh, dir_fd=folder)
        raise


# --- What lies beside a transcript (large tool results, sub-agents' own transcripts), kept as records of the turn

# Such a record is no line of the transcript: it has no uuid, and is written back as the file it was, where the
# model was told that it is.

KIND = "cli-session-proxy/file"
_OPENING = f'{{"type":"{KIND}"'

# A larger one stays on disk only; a tool's output of this size is no reading matter. So do those beyond so many, or so
# many bytes: of one turn.
MAX_FILE = 64 * 1024 * 1024
MAX_FILES, MAX_TOTAL = 10_000, 4 * MAX_FILE


def gather(path: Path, after: int | None, kept: int = 0) -> list[Record]:
    """The files beside this transcript that were written after that time (ns; None: all of them), as records. `kept`:
    bytes of others that count, too."""
    records: list[Record] = []
    total = kept
    for name, file in _opened_beside(path):
        state = os.fstat(file.fileno())
        if (after is not None and state.st_mtime_ns <= after) or state.st_size > MAX_FILE:
            continue
        total += state.st_size
        if len(records) == MAX_FILES or total > MAX_TOTAL:
            log.warning("files_not_kept", folder=str(beside(path)), kept=len(records))
            break
        try:
            data = base64.b64encode(file.read(state.st_size)).decode("ascii")
        except OSError:
            continue
        records.append(Record(json.dumps({"type": KIND, "name": str(name), "data": data}, separators=(",", ":"))))
    return records


def is_file(record: Record) -> bool:
    return record.line.startswith(_OPENING)


def is_sound(record: Record) -> bool:
    """Whether a kept file of a stranger's is one that we could have kept: its place, and its content."""
    try:
        kept = json.loads(record.line)
        base64.b64decode(kept["data"], validate=True)
        return is_place(kept["name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def put_back(project: Path, records: Iterable[Record]) -> int:
    """Write the kept files that are not there as they were. Returns how many. Raises `SandboxError`, OSError."""
    kept = (json.loads(record.line) for record in records if is_file(record))
    latest = {file["name"]: file["data"] for file in kept}
    return sum(write_below(project, name, base64.b64decode(data)) for name, data in latest.items())
