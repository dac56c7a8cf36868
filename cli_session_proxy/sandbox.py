"""The agents' directories: `<var>/sandbox/agents/<dir>`, or `<sandbox_root>/agents/<dir>` if the settings have a root.

`directory_name` gives the directory's name, and `Sandboxes.path` is the only place that builds the path: it takes a
name, never a path, so the prefix is added once and no path leads out of it.
All functions are synchronous; call them through `tasks.in_thread_at` from the event loop.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from .errors import InvalidRequest, SandboxError
from .settings import Settings

AGENT_ID_LIMIT = 256  # characters, part of the contract
LOCAL_OWNER = "local"
READABLE_LIMIT = 40  # a safe name up to here is its own directory; keeps the CLI's project path under 200 characters
READABLE_PART = 24  # characters before the hash of a name that needs one
HASH_CHARACTERS = 26  # 130 bits of base32: no two names collide by chance
# sun_path is 104 bytes on macOS, 108 on Linux; the CLI opens `$TMPDIR/cc-socks/<pid>.sock` (up to 25 more)
TMPDIR_LIMIT = 75
LONGEST_REMOVAL = 600.0  # seconds for one folder
LEVELS = 5  # of folders below one that is removed, before folders are moved; each takes two descriptors
ACL_OF_NEW = "system.posix_acl_default"  # a folder's attribute with the rights of what is made there
MOST_FOLDERS = 10_000  # entries after which `has_files` takes a folder for a file
# The folder of the logins that confined CLIs got as copies (see `backends.claude.process.login`).
LOGINS = "~logins"
# Directories of CLIs that have no agent: those started ahead of time, and those that several agents share.
AgentlessUse = Literal["ahead", "shared"]

# No upper case (a case-insensitive disk), no `~` (it marks hashed names), no dots.
_SAFE = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
# The CLI's project folder turns every other character into "-": a safe name must not look like a hashed one there.
_LIKE_HASHED = re.compile(r"-[a-z2-7]{26}$")
_HASHED = re.compile(r"[a-z0-9-]{1,24}~[a-z2-7]{26}")


def directory_name(owner: str, agent_id: str) -> str:
    """The name of an agent's directory: injective over (owner, agent_id), even if the file system ignores case.

    A safe name of the local owner is used as it is; others become a readable part, `~` and a hash.
    Raises `InvalidRequest` (param `agent_id`) for an empty id or one over 256 characters.
    """
    if not agent_id:
        raise InvalidRequest("agent_id is empty: name the agent with 1 to 256 characters", param="agent_id")
    if len(agent_id) > AGENT_ID_LIMIT:
        raise InvalidRequest(f"agent_id has {len(agent_id)} characters: use at most {AGENT_ID_LIMIT}", param="agent_id")
    if owner == LOCAL_OWNER and _is_safe(agent_id):
        return agent_id
    readable = re.sub("[^a-z0-9]+", "-", agent_id.lower()).strip("-")[:READABLE_PART].strip("-") or "agent"
    # the owner's length keeps ("a\0b", "c") and ("a", "b\0c") apart
    key = f"{len(owner)}\0{owner}\0{agent_id}".encode("utf-8", "surrogatepass")
    digest = base64.b32encode(hashlib.sha256(key).digest()).decode().lower()[:HASH_CHARACTERS]
    return f"{readable}~{digest}"


class Sandboxes:
    """The agents' directories, with the links of `[sandbox.links]` inside each.

    `agent_dir` is always a result of `directory_name`; anything else is a `SandboxError`.
    """

    def __init__(self, settings: Settings) -> None:
        root = settings.sandbox_root
        self._prefix = (root or settings.var / "sandbox") / "agents"
        # A CLI with tools tells the model its TMPDIR: so it must be equal on all hosts, like the sandbox's path.
        self._tmp = (root or settings.var) / "tmp"
        self._private = settings.var / "confined"
        self._confined = self._prefix.with_name("was-confined")
        self._links = dict(settings.sandbox.links)
        self._prepared: dict[str, tuple[Path, Path]] = {}  # by agent: the sandbox and TMPDIR that `prepare` created

    @property
    def prefix(self) -> Path:
        """The directory that all agents' directories lie in."""
        return self._prefix

    def path(self, agent_dir: str) -> Path:
        """The agent's directory; nothing is created."""
        if not _is_safe(agent_dir) and _HASHED.fullmatch(agent_dir) is None:
            raise SandboxError(f"{agent_dir!r} is not an agent's directory name: it is made by directory_name()")
        return self._prefix / agent_dir

    def prepare(self, agent_dir: str, check: Callable[[Path], None] | None = None) -> Path:
        """Create the sandbox, its links and the agent's TMPDIR, if they are missing. Returns the sandbox's path.

        `check` is called with that path; if it fails, the sandbox is not `prepared`. Safe to call again and by several
        processes.
        """
        path, tmpdir = self.path(agent_dir), self.tmpdir(agent_dir)
        for directory in (path, tmpdir):
            make_private(directory.parent)
            _make(directory)
            restore_access(directory)
        for name, target in self._links.items():
            _link(path, name, target)
        if check is not None:
            check(path)
        self._prepared[agent_dir] = path, tmpdir
        return path

    def prepared(self, agent_dir: str) -> tuple[Path, Path] | None:
        """The sandbox and the TMPDIR. None if one is missing, if this user lacks a right to one, or if there are links
        to check: call `prepare`."""
        paths = None if self._links else self._prepared.get(agent_dir)
        try:
            modes = [os.lstat(path).st_mode for path in paths or ()]
        except OSError:
            return None
        return paths if modes and all(map(_is_accessible, modes)) else None

    def has(self, agent_dir: str) -> bool:
        return self.path(agent_dir).is_dir()

    def has_files(self, agent_dir: str) -> bool:
        """Whether the sandbox has more than folders and the links of the settings. True if that cannot be told."""
        sandbox = self.path(agent_dir)
        links = {sandbox.joinpath(*PurePosixPath(name).parts) for name in self._links}
        unread, entries_read = [sandbox], 0
        while unread:
            try:
                with os.scandir(unread.pop()) as entries:
                    for entry in entries:
                        entries_read += 1
                        if entry.is_symlink() and Path(entry.path) in links:
                            continue
                        if not entry.is_dir(follow_symlinks=False) or entries_read >= MOST_FOLDERS:
                            return True
                        unread.append(Path(entry.path))
            except FileNotFoundError:
                continue
            except OSError:
                return True
        return False

    def tmpdir(self, agent_dir: str) -> Path:
        """The agent's own TMPDIR, outside its sandbox and short enough for the CLI's sockets; nothing is created."""
        return self._short(self._tmp / self.path(agent_dir).name)

    def private(self, agent_dir: str, *, shows_settings: bool = False) -> Path:
        """The directory of a confined agent's CLI, which the agent cannot rename; nothing is created.

        `shows_settings`: the second such directory, for profiles that mount the user's settings in it. In the first one
        the agent can write under their names, and a mount would follow its link.
        """
        return self._private / f"{self.path(agent_dir).name}{'~user' if shows_settings else ''}"

    def note_confined(self, agent_dir: str) -> None:
        """Note that the agent's CLI runs confined from now on. The mark lies beside its directory, for all hosts."""
        mark = self._confined / self.path(agent_dir).name
        if not os.access(mark, os.F_OK):
            make_private(self._confined)
            with _explained(f"cannot make {mark}"):
                mark.touch(0o600)

    def was_confined(self, agent_dir: str) -> bool:
        return any(os.access(f"{folder}/{agent_dir}", os.F_OK) for folder in (self._confined, self._private))

    def all_confined(self) -> set[str]:
        """The names of the directories of all agents that were confined."""
        names: set[str] = set()
        for folder in (self._confined, self._private):
            with contextlib.suppress(FileNotFoundError):
                names.update(os.listdir(folder))
        return names

    def agentless(self, use: AgentlessUse) -> tuple[Path, Path]:
        """Directory and TMPDIR of CLIs that have no agent. Both are created; nothing is written there."""
        cwd, tmpdir = self._prefix.with_name(use), self._short(self._tmp / f"~{use}")
        for path in (cwd, tmpdir):
            make_private(path.parent)
            _make(path)
        return cwd, tmpdir

    def remove(self, agent_dir: str) -> None:
        """Delete all directories of the agent, if they exist. Targets of links stay."""
        self._prepared.pop(agent_dir, None)
        private = [self.private(agent_dir, shows_settings=shows) for shows in (False, True)]
        logins = [one.with_name(LOGINS) / one.name for one in private]
        mark = self._confined / self.path(agent_dir).name
        for path in (self.path(agent_dir), self.tmpdir(agent_dir), *private, *logins, mark):
            if path.is_symlink():
                raise SandboxError(
                    f"{path} is a symbolic link, not an agent's directory: left alone, remove it yourself"
                )
            remove_any(path)

    @staticmethod
    def _short(path: Path) -> Path:
        if len(os.fsencode(path)) <= TMPDIR_LIMIT:
            return path
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return short_tmpdirs() / digest


def short_tmpdirs() -> Path:
    """The folder of TMPDIRs of agents whose own path would be too long."""
    return Path(tempfile.gettempdir()) / f"cli-session-proxy-{os.getuid()}"


def remove_any(path: Path) -> None:
    """Remove a file, a link (not its target) or a whole folder, also with folders that are not writable. Does nothing
    if there is nothing. Raises `SandboxError`."""
    with _explained(f"cannot remove {path}"), contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            _remove_folder(path)
        else:
            path.unlink()


def _remove_folder(top: Path) -> None:
    """Remove a folder of any depth and width with a few descriptors (see `_remove_entry`). No link is followed, even if
    the agent's programs create it meanwhile. Raises `SandboxError` if they keep writing."""
    deadline = time.monotonic() + LONGEST_REMOVAL
    may_have_entries = True
    with _open_folder(top) as top_fd:
        while may_have_entries:
            may_have_entries = False
            with os.scandir(top_fd) as entries:
                for entry in entries:
                    may_have_entries = True
                    if time.monotonic() > deadline:
                        raise SandboxError(f"{top} is written to while it is removed: try again")
                    with contextlib.suppress(FileNotFoundError):
                        _remove_entry(entry.name, top_fd, top_fd)
    os.rmdir(top)


def _remove_entry(name: str, parent_fd: int, top_fd: int, levels: int = LEVELS) -> None:
    """Remove an entry of a folder. A folder more than `levels` below is moved to the top under a random name, and is
    removed later. Others are not moved: a move may need room on a full disk. It also needs the file system's one lock
    for moves, which a confined agent's program can hold for minutes."""
    if not _is_folder(name, parent_fd):
        os.unlink(name, dir_fd=parent_fd)
        return
    with _open_folder(name, parent_fd) as fd, os.scandir(fd) as entries:
        for inner in entries:
            if levels or not _is_folder(inner.name, fd):
                _remove_entry(inner.name, fd, top_fd, levels - 1)
                continue
            with _open_folder(inner.name, fd):  # sets its mode: a folder without permissions cannot be moved
                try:
                    os.rename(inner.name, secrets.token_hex(16), src_dir_fd=fd, dst_dir_fd=top_fd)
                except OSError as exc:
                    if exc.errno != errno.EXDEV:
                        raise
                    _remove_entry(inner.name, fd, fd)  # out of a subvolume (btrfs) nothing is moved
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as exc:  # on some file systems `scandir` skips entries of a folder that changes: tried again
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _is_folder(name: str, parent_fd: int) -> bool:
    """Whether this entry is a folder itself, not a link to one."""
    return stat.S_ISDIR(os.lstat(name, dir_fd=parent_fd).st_mode)


@contextlib.contextmanager
def _open_folder(name: Path | str, parent_fd: int | None = None) -> Iterator[int]:
    """A descriptor of this folder, whose mode is first set to 0700. `name` is a path, or a name inside the parent. No
    link is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if sys.platform == "linux":
        path_fd = os.open(name, flags | os.O_PATH, dir_fd=parent_fd)  # needs no permission on the folder itself
        try:
            os.chmod(f"/proc/self/fd/{path_fd}", 0o700)
            fd = os.open(".", flags, dir_fd=path_fd)
        finally:
            os.close(path_fd)
    else:
        os.chmod(name, 0o700, dir_fd=parent_fd, follow_symlinks=False)
        fd = os.open(name, flags, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def restore_access(folder: Path) -> None:
    """Give this user all rights to a folder and to new files in it. An agent's programs may have taken them away, by
    its mode or by an ACL. Does nothing if there is no folder, and follows no link. Raises `SandboxError`."""
    with _explained(f"cannot open {folder}"), contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # usually there is no ACL: a look at that needs no lock of the folder
                os.getxattr(folder, ACL_OF_NEW, follow_symlinks=False)
                os.removexattr(folder, ACL_OF_NEW, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) and not _is_accessible(status.st_mode) and status.st_uid == os.getuid():
            with _open_folder(folder):  # sets its mode
                pass


def _is_accessible(mode: int) -> bool:
    """Whether it is a folder that its user may list, enter and write."""
    return stat.S_ISDIR(mode) and mode & stat.S_IRWXU == stat.S_IRWXU


def make_private(path: Path) -> None:
    """Create a directory of this user, and all missing ones above it, with mode 0700.

    Raises `SandboxError` if that fails, or if it belongs to another user (as in a shared temp folder).
    """
    if not path.parent.exists():
        make_private(path.parent)
    _make(path)
    if path.lstat().st_uid != os.getuid():
        raise SandboxError(f"{path} belongs to another user: move it away")


def _is_safe(name: str) -> bool:
    """Whether an agent's name can be its directory's name as it is."""
    return len(name) <= READABLE_LIMIT and _SAFE.fullmatch(name) is not None and not _LIKE_HASHED.search(name)


@contextlib.contextmanager
def _explained(failure: str) -> Iterator[None]:
    """Raise an OSError of the body as a `SandboxError` that begins with `failure`."""
    try:
        yield
    except OSError as exc:
        raise SandboxError(f"{failure}: {exc.strerror}; is the disk writable and not full?") from exc


def _make(path: Path) -> None:
    """Create one directory below an existing parent, with mode 0700. A link in its place is refused."""
    with _explained(f"cannot make {path}"):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise SandboxError(
                    f"{path} is a symbolic link or a file where a directory belongs: left alone, move it away"
                ) from None


class NotAFolder(SandboxError):
    """Something else is where a folder belongs."""


@contextlib.contextmanager
def folder_below(top: Path, place: PurePosixPath) -> Iterator[int]:
    """A descriptor of the parent folder of `place` below `top`, which is created if missing. Each folder is opened
    relative to its parent, so that a link put there meanwhile is not followed. Raises `NotAFolder`, OSError."""
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    opened = [os.open(top, flags)]
    try:
        for folder in place.parent.parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=opened[-1])
            try:
                opened.append(os.open(folder, flags | os.O_NOFOLLOW, dir_fd=opened[-1]))
            except OSError as exc:
                if exc.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
                    raise
                raise NotAFolder(
                    f"{top / place}: {folder!r} is a symbolic link or a file where a folder belongs, or "
                    "cannot be opened: move it away"
                ) from exc
        yield opened[-1]
    finally:
        for fd in opened:
            os.close(fd)


def _link(sandbox: Path, name: str, target: Path) -> None:
    """Make `sandbox/name` a link to `target`. Raises `SandboxError` if a real file is in its place."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or not relative.parts or ".." in relative.parts:
        raise SandboxError(f"[sandbox.links] {name!r}: must be a path inside the sandbox, such as 'skills'")
    real_target = os.path.abspath(target.expanduser())
    if not os.path.exists(real_target):
        raise SandboxError(
            f"[sandbox.links] {name}: its target {real_target} does not exist; make it or fix the setting"
        )
    place = sandbox / relative
    with _explained(f"[sandbox.links] {name}: cannot link {place}"), folder_below(sandbox, relative) as folder:
        try:
            os.symlink(real_target, place.name, dir_fd=folder)
        except FileExistsError:
            if not stat.S_ISLNK(os.lstat(place.name, dir_fd=folder).st_mode):
                raise SandboxError(
                    f"[sandbox.links] {name}: {place} is a real file or folder: left alone, move it away"
                ) from None
            if os.readlink(place.name, dir_fd=folder) != real_target:  # replace the link atomically
                fresh = f".{place.name}.{secrets.token_hex(8)}"
                os.symlink(real_target, fresh, dir_fd=folder)
                try:
                    os.replace(fresh, place.name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    os.unlink(fresh, dir_fd=folder)
                    raise
