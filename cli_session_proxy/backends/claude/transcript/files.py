"""Where the CLI keeps a session's file, and what lies beside it.

    <config>/projects/<folder of the working directory>/<session id>.jsonl      the transcript
                                                        /<session id>/…         large tool results, sub-agents

A path is only ever made of a session id (`domain.limits`), and nothing is written through a link below a folder
of a session: what an import or a stored chain says can neither leave this layout nor be led out of it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from ....domain.limits import is_session_id
from ....domain.models import Record
from ....errors import SandboxError

SUFFIX = ".jsonl"
MEMORY = "memory"  # beside the sessions: what the model wrote down for later ones (2.1.329)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def project_dir(config_dir: Path, cwd: Path) -> Path:
    """The folder in which the CLI keeps the sessions of this working directory."""
    return config_dir / "projects" / re.sub(r"[^a-zA-Z0-9]", "-", os.path.realpath(cwd))


def path_of(config_dir: Path, cwd: Path, session_id: str) -> Path:
    return in_folder(project_dir(config_dir, cwd), session_id)


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
    return sorted(path for path in found if path != expected and _is_plain(path))


def beside(path: Path) -> Path:
    """The folder of the session's name beside its transcript: large tool results, sub-agents' own transcripts."""
    return path.with_suffix("")


def files_beside(path: Path) -> Iterator[Path]:
    """The regular files in that folder, in order; no link is followed."""
    folder = beside(path)
    if folder.is_symlink():
        return
    for above, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = Path(above, name)
            if _is_plain(file):
                yield file


def _is_plain(path: Path) -> bool:
    """A regular file itself, and no link to one; False where it is gone."""
    return path.is_file() and not path.is_symlink()


def copy_beside(source: Path, target: Path) -> int:
    """Copy the files beside one transcript to beside another. Returns how many."""
    copied = 0
    for file in files_beside(source):
        place = beside(checked(target)) / file.relative_to(beside(source))
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy2(file, place, follow_symlinks=False)
        copied += 1
    return copied


def move(path: Path, target: Path) -> None:
    """Move a transcript and what lies beside it to where the CLI looks."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if copy_beside(path, target):
        shutil.rmtree(beside(path))
    os.replace(path, target)


def remove(path: Path) -> None:
    """Remove a transcript and the folder beside it."""
    checked(path).unlink(missing_ok=True)
    shutil.rmtree(beside(path), ignore_errors=True)


def remove_project(project: Path) -> None:
    """Remove what the CLI itself noted for an agent's working directory, and the folder where nothing else is in it."""
    shutil.rmtree(project / MEMORY, ignore_errors=True)
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
    *folders, last = PurePosixPath(name).parts
    project.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = [os.open(project, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for folder in folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=held[-1])
            try:
                held.append(os.open(folder, _DIRECTORY, dir_fd=held[-1]))
            except OSError as exc:
                raise SandboxError(
                    f"{project / name}: {folder!r} is a link or a file where a folder belongs: move it away"
                ) from exc
        return _write_in(held[-1], last, data)
    finally:
        for fd in held:
            os.close(fd)


def _write_in(folder: int, name: str, data: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError):
        there = os.lstat(name, dir_fd=folder)
        if stat.S_ISREG(there.st_mode) and there.st_size == len(data):
            return False
    fresh = f".{os.getpid()}-{os.urandom(8).hex()}"
    created = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(created, "wb") as file:
            file.write(data)
        os.replace(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(fresh, dir_fd=folder)
        raise
    return True


# --- What lies beside a transcript (large tool results, sub-agents' own transcripts), kept as records of the turn

# Such a record is no line of the transcript: it has no uuid, and is written back as the file it was, where the
# model was told that it is.

KIND = "cli-session-proxy/file"
_OPENING = f'{{"type":"{KIND}"'

# A larger one stays on disk only; a tool's output of this size is no reading matter.
MAX_FILE = 64 * 1024 * 1024


def gather(path: Path, after: int | None) -> list[Record]:
    """The files beside this transcript that were written after that time (ns; None: all of them), as records.

    A file that vanishes or cannot be read while we look is left out: it is the CLI's to remove.
    """
    records: list[Record] = []
    for file in files_beside(path):
        try:
            opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(opened, "rb") as source:
                state = os.fstat(opened)
                new = after is None or state.st_mtime_ns > after
                if not stat.S_ISREG(state.st_mode) or not new or state.st_size > MAX_FILE:
                    continue
                data = base64.b64encode(source.read(MAX_FILE)).decode("ascii")
        except OSError:
            continue
        name = file.relative_to(path.parent).as_posix()
        records.append(Record(json.dumps({"type": KIND, "name": name, "data": data}, separators=(",", ":"))))
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
