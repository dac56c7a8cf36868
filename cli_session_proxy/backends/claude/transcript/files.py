"""Places of the CLI's files of a session: its transcript and the files beside it.

    <config>/projects/<folder of the working directory>/<session id>.jsonl      the transcript
                                                        /<session id>/…         large tool results, sub-agents

A path is only made of a valid session id (`domain.limits`), and nothing is written through a link below a session's
folder: so data of an import or a stored chain cannot lead out of this layout.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from .... import logs
from ....domain.limits import is_session_id
from ....domain.models import Record
from ....errors import SandboxError
from ....sandbox import NotAFolder, folder_below, remove_any, restore_access

log = logs.get(__name__)

SUFFIX = ".jsonl"
ASIDE = ".aside-"  # after the session's id in the name of a backup that could not be moved to `var`
DEEPEST = 16  # nested folders beside a transcript; the CLI makes two
# The most names that are read of one folder: a shell can create millions, and each turn reads them.
MOST_NAMES = 100_000
LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
REMOVED_MEANWHILE = 20  # tries to make an agent's folder while CLIs remove empty ones
MEMORY = "memory"  # the folder beside the sessions with the model's notes for later ones (2.1.329)


def in_folder(project: Path, session_id: str) -> Path:
    """The path of the session's transcript in this folder. Raises `SandboxError` for an invalid session id."""
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


def find_elsewhere(config_dir: Path, session_id: str, but: Collection[Path]) -> list[Path]:
    """The transcripts with this session's id, in every project folder except those in `but`."""
    name, found = in_folder(config_dir, session_id).name, []
    with contextlib.suppress(FileNotFoundError), os.scandir(config_dir / "projects") as folders:
        for path in (Path(folder.path, name) for folder in folders):
            with contextlib.suppress(OSError):
                # Not `glob`, which follows a link: it may lead to a file system that does not answer.
                if path.parent not in but and stat.S_ISREG(os.lstat(path).st_mode):
                    found.append(path)
    return sorted(found)


def sessions_in(folder: Path) -> list[Path]:
    """The transcripts among the first `MOST_NAMES` names of a folder, without links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = [
            Path(entry.path)
            for entry in islice(entries, MOST_NAMES)
            if entry.name.endswith(SUFFIX)
            and is_session_id(entry.name.removesuffix(SUFFIX))
            and entry.is_file(follow_symlinks=False)
        ]
        if next(entries, None) is not None:
            log.warning("names_left_out", folder=str(folder), read=MOST_NAMES)
        return found
    return []


def beside(path: Path) -> Path:
    """The folder of the session's name beside its transcript: large tool results, sub-agents' own transcripts."""
    return path.with_suffix("")


def has_beside(path: str) -> bool:
    """Whether there may be such files. One system call."""
    return os.path.lexists(path.removesuffix(SUFFIX))


def temporary(session_id: str) -> str:
    """The beginning of the temporary name of a transcript that is being written."""
    return f".{session_id[:8]}-"


def _opened_beside(path: Path, left_out: list[str]) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    """Open the regular files in that folder and below, in order. Yields each path relative to the transcript's folder.

    Each folder is opened relative to its parent, so no link is followed even if names change meanwhile. Files that
    vanish are skipped, because the CLI may remove them. Added to `left_out`: paths that this user may not read, folders
    below `DEEPEST`, and folders with names beyond `MOST_NAMES`.
    """
    top = beside(path)
    try:
        folder = os.open(top, LOOK | os.O_DIRECTORY)
    except OSError as exc:  # an agent may have closed its folder, or put a link there, which macOS calls a loop
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP):
            raise
        if isinstance(exc, PermissionError):
            left_out.append(top.name)
        return
    try:
        yield from _opened_in(folder, PurePosixPath(top.name), iter(range(MOST_NAMES)), left_out)
    finally:
        os.close(folder)


def _opened_in(
    folder: int, below: PurePosixPath, left: Iterator[int], left_out: list[str]
) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if next(left, None) is None:
                left_out.append(f"{below}/")
                break
            names.append(entry.name)
    for name in sorted(names):
        try:
            opened = os.open(name, LOOK, dir_fd=folder)
        except OSError as exc:
            if isinstance(exc, PermissionError):
                left_out.append(str(below / name))
            continue
        mode = os.fstat(opened).st_mode
        if stat.S_ISREG(mode):
            with open(opened, "rb") as file:
                yield below / name, file
            continue
        try:
            if stat.S_ISDIR(mode) and len(below.parts) >= DEEPEST:
                left_out.append(str(below / name))
            elif stat.S_ISDIR(mode):
                yield from _opened_in(opened, below / name, left, left_out)
        finally:
            os.close(opened)


def copy_beside(source: Path, target: Path) -> tuple[int, list[str]]:
    """Copy the files that belong to one transcript to those of another. Returns how many, and what was left out: see
    `_opened_beside`, and what is too large. A file may claim any size without a disk that has it.

    Raises `SandboxError` for a link on the way, OSError.
    """
    copied = total = 0
    left_out: list[str] = []
    for name, opened in _opened_beside(source, left_out):
        data = opened.read(MAX_FILE + 1)
        if len(data) > MAX_FILE or total + len(data) > MOST_COPIED:
            left_out.append(str(name))
            continue
        total += len(data)
        place = PurePosixPath(checked(target).stem, *name.parts[1:])
        with folder_below(target.parent, place) as folder:
            _write_in(folder, place.name, data)
            state = os.fstat(opened.fileno())
            os.utime(place.name, ns=(state.st_atime_ns, state.st_mtime_ns), dir_fd=folder, follow_symlinks=False)
        copied += 1
    return copied, left_out


def move(path: Path, target: Path) -> None:
    """Move a transcript and the files beside it to where the CLI looks. If some are left out, all of these stay, too.
    Raises `SandboxError`, OSError."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    copied, left_out = copy_beside(path, target)
    if copied and not left_out:
        remove_any(beside(path))
    os.replace(path, target)


def remove(path: Path) -> None:
    """Remove a transcript, its backups, the files beside it, and temporary files of a killed proxy.

    Raises `SandboxError`.
    """
    restore_access(checked(path).parent)
    remove_any(path)
    remove_any(beside(path))
    ours = f"{path.stem}{ASIDE}", temporary(path.stem)
    with contextlib.suppress(FileNotFoundError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(ours):
                remove_any(Path(entry.path))


def make_project(project: Path) -> None:
    """Create an agent's folder of sessions with something in it.

    Every CLI removes empty folders of sessions some seconds after its start (2.1.332). If it does so after another CLI
    has created its folder and before that writes there, those records are lost.
    """
    for _ in range(REMOVED_MEANWHILE):
        project.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(FileExistsError):
                (project / MEMORY).mkdir(mode=0o700)
            return


def remove_project(project: Path, *, whole: bool) -> None:
    """Remove the CLI's own notes for an agent's working directory, and the folder if it is empty then, or in any case
    (`whole`). Raises `SandboxError`."""
    remove_any(project if whole else project / MEMORY)
    with contextlib.suppress(OSError):  # not empty, or no folder
        project.rmdir()


def is_place(name: object) -> bool:
    """Whether a stored file's name is below a session's own folder: `<session id>/…`, with plain names only."""
    if not isinstance(name, str) or "\0" in name:
        return False
    parts = name.split("/")
    return len(parts) > 1 and is_session_id(parts[0]) and not {"", ".", ".."} & set(parts)


def write_below(project: Path, name: str, data: bytes) -> bool:
    """Write a stored file to its place, unless there is one of its size (then False).

    Raises `SandboxError` for a link on the way: each folder is opened relative to its parent.
    """
    if not is_place(name):
        raise SandboxError(f"{name[:200]!r} is no file's place below a session's folder: nothing is written there")
    place = PurePosixPath(name)
    with folder_below(project, place) as folder:
        with contextlib.suppress(FileNotFoundError):
            existing = os.lstat(place.name, dir_fd=folder)
            if stat.S_ISREG(existing.st_mode) and existing.st_size == len(data):
                return False
        _write_in(folder, place.name, data)
        return True


def _write_in(folder: int, name: str, data: bytes) -> None:
    fresh = f".{os.getpid()}-{os.urandom(8).hex()}"
    created = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(created, "wb") as file:
            file.write(data)
        os.replace(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(fresh, dir_fd=folder)
        raise


# --- Files beside a transcript (large tool results, sub-agents' transcripts), stored as records of the turn

# Such a record is no line of the transcript: it has no uuid, and is restored as a file at its original path, which the
# model knows.

KIND = "cli-session-proxy/file"
_OPENING = f'{{"type":"{KIND}"'

# Larger files are neither stored nor copied: the model does not read outputs of that size. The other limits are per
# turn: files and bytes. And bytes that are copied at once.
MAX_FILE = 64 * 1024 * 1024
MAX_FILES, MAX_TOTAL = 10_000, 4 * MAX_FILE
MOST_COPIED = 16 * MAX_TOTAL


def gather(path: Path, after: int | None, kept: int = 0) -> list[Record]:
    """The files beside this transcript that were written after that time (ns; None: all), as records. `kept`: bytes
    already stored, which count for the limit."""
    records: list[Record] = []
    total, left_out = kept, list[str]()  # an agent may close a folder of its own
    for name, file in _opened_beside(path, left_out):
        state = os.fstat(file.fileno())
        if (after is not None and state.st_mtime_ns <= after) or state.st_size > MAX_FILE:
            continue
        total += state.st_size
        if len(records) == MAX_FILES or total > MAX_TOTAL:
            left_out.append(str(name))
            break
        try:
            data = base64.b64encode(file.read(state.st_size)).decode("ascii")
        except OSError:
            continue
        records.append(Record(json.dumps({"type": KIND, "name": str(name), "data": data}, separators=(",", ":"))))
    if left_out:
        log.warning("files_not_kept", folder=str(beside(path)), kept=len(records), left_out=left_out[:3])
    return records


def is_file(record: Record) -> bool:
    return record.line.startswith(_OPENING)


def is_sound(record: Record) -> bool:
    """Whether an imported stored file is valid, by place and content."""
    try:
        stored = json.loads(record.line)
        base64.b64decode(stored["data"], validate=True)
        return is_place(stored["name"]) and bool(os.fsencode(stored["name"]))  # raises for half a surrogate pair
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


# Something else is in a file's place, or there can be no such name here: of an import, or of another system.
_LEFT_OUT = frozenset({errno.EACCES, errno.EILSEQ, errno.EISDIR, errno.ENAMETOOLONG, errno.EPERM})


def put_back(project: Path, records: Iterable[Record]) -> int:
    """Restore missing stored files. Returns how many. Raises `SandboxError` for an invalid name, OSError.

    A file is left out if something else is in its place, which an agent may have put there, or if there can be no file
    of its name: its conversation continues without the file. Of a file and a folder with one name, which were there one
    after the other, the newer one counts.
    """
    latest: dict[str, str] = {}
    for record in filter(is_file, records):
        file = json.loads(record.line)
        latest.pop(file["name"], None)
        latest[file["name"]] = file["data"]
    placed: set[str] = set()
    folders: set[str] = set()
    restored = 0
    for name in reversed(latest):
        above = set(map(str, PurePosixPath(name).parents))
        if name in folders or not above.isdisjoint(placed):
            continue
        placed.add(name)
        folders |= above
        try:
            restored += write_below(project, name, base64.b64decode(latest[name]))
        except (NotAFolder, OSError, UnicodeEncodeError) as exc:
            if isinstance(exc, OSError) and exc.errno not in _LEFT_OUT:
                raise
            log.warning("file_not_restored", file=str(project / name), error=str(exc))
    return restored
