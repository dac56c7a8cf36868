"""Finds the CLI's folder for the sessions of a working directory.

The CLI's naming rule is not documented, but measured (2.1.329), and used as the first guess. If the CLI writes a file
in another folder, that folder is noted as a link in `<var>/projects`. A note is only valid for the directory's present
path: if `var` is moved, the rule is used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

from .... import logs
from ....errors import SandboxError
from ....sandbox import Sandboxes, make_private, remove_any
from ....settings import Settings
from .files import MEMORY, find_elsewhere, in_folder

log = logs.get(__name__)

# UTF-16 units of a name; a longer one is cut, and a hash of the directory is appended.
LONGEST = 200
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# The folder of the CLI's directory with the owners: for each folder of sessions a link to the agent's directory.
OWNERS = "cli-session-proxy"
# Beside `projects` the CLI keeps more of a session under its id: the task list, and copies of files.
OF_SESSIONS = ("tasks", "file-history", "session-env", "uploads", "dev-mods")
# Seconds before its start at which a turn's file may be written: file systems have coarse clocks.
COARSE = 2.0


def plain_name(cwd: str) -> str:
    """The directory's uncut name: each UTF-16 unit that is no letter or digit becomes `-`."""
    units = re.sub(r"[^\x00-\uffff]", "--", cwd)
    return re.sub(r"[^a-zA-Z0-9]", "-", units)


def project_dir(config_dir: Path, cwd: Path) -> Path:
    """The folder in which the CLI keeps the sessions of this working directory, by its rule."""
    real = os.path.realpath(cwd)
    name = plain_name(real)
    if len(name) > LONGEST:
        # The CLI's hash: `h * 31 + c` over the UTF-16 units in 32 bits, its absolute value in base 36.
        data, number = real.encode("utf-16-le", "surrogatepass"), 0
        for at in range(0, len(data), 2):
            number = (number * 31 + int.from_bytes(data[at : at + 2], "little")) & 0xFFFFFFFF
        number = min(number, 2**32 - number)
        digits = "" if number else "0"
        while number:
            number, digit = divmod(number, 36)
            digits = _DIGITS[digit] + digits
        name = f"{name[:LONGEST]}-{digits}"
    return config_dir / "projects" / name


class Projects:
    """The folders of agents' directories. Notes are read each time: another proxy may have written them."""

    def __init__(self, settings: Settings, sandboxes: Sandboxes, config_dir: Path) -> None:
        self.config_dir = config_dir
        self.sandboxes = sandboxes
        self.root = config_dir / "projects"
        self._notes = settings.var / "projects"
        prefix = plain_name(os.path.realpath(sandboxes.prefix))
        self._begins = f"{prefix}-"[:LONGEST]

    def folder(self, cwd: Path) -> Path:
        guess = project_dir(self.config_dir, cwd)
        try:
            recorded = Path(os.readlink(self._note(cwd, guess)))
        except OSError:
            return guess
        return recorded if recorded.parent == self.root else guess

    def own(self, cwd: Path) -> None:
        """Note that the CLI's folder of this directory is this agent's. Raises `SandboxError` if it is another's.

        The CLI has one folder for directories such as `a.b` and `a-b`, and for long ones whose hashes are equal. One
        agent would be shown the notes of the other and, if it is confined, could read its transcripts. If the note
        cannot be written, a warning is logged and the agent runs.
        """
        note = self._owner_note(cwd)
        if self._owner(cwd) == os.path.realpath(cwd):
            return
        try:
            make_private(note.parent)
            with contextlib.suppress(FileExistsError):
                note.symlink_to(os.path.realpath(cwd))
                return
            with self._removing_owners():
                with contextlib.suppress(FileExistsError):  # it was removed meanwhile
                    note.symlink_to(os.path.realpath(cwd))
                    return
                if not self.is_others_own(cwd):
                    _replace_link(note, os.path.realpath(cwd))
                    return
        except (OSError, SandboxError) as exc:  # perhaps only `projects` is writable, or the disk has no symbolic links
            log.warning("sessions_owner_not_noted", dir=cwd.name, error=str(exc))
            return
        raise SandboxError(
            f"the CLI would keep the sessions of {cwd} with those of another agent ({note} leads to its directory), "
            "and show each the other's notes: set another claude_config_dir or `var`"
        )

    def is_others_own(self, cwd: Path) -> bool:
        """Whether the note for this directory names another agent's directory that exists."""
        owner = self._owner(cwd)
        if owner is None or owner == os.path.realpath(cwd):
            return False
        with contextlib.suppress(OSError):  # by another path: a link where `var` was, or another case (macOS)
            return not os.path.samefile(owner, cwd)
        return os.path.lexists(owner)

    def disown(self, cwd: Path) -> None:
        """Remove the note that `own` made."""
        if self._owner(cwd) is not None:
            with self._removing_owners():
                if self._owner(cwd) == os.path.realpath(cwd):
                    self._owner_note(cwd).unlink()

    @contextlib.contextmanager
    def _removing_owners(self) -> Iterator[None]:
        """Hold the lock for the removal and replacement of notes: else two agents could replace the same one. A first
        note takes no lock, so it does not wait for a proxy that is paused in here."""
        with open(self.config_dir / OWNERS / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _owner(self, cwd: Path) -> str | None:
        with contextlib.suppress(OSError):
            return os.readlink(self._owner_note(cwd))
        return None

    def _owner_note(self, cwd: Path) -> Path:
        return self.config_dir / OWNERS / project_dir(self.config_dir, cwd).name

    def path(self, cwd: Path, session_id: str) -> Path:
        """The session's transcript. Raises `SandboxError` for what is no session id."""
        return in_folder(self.folder(cwd), session_id)

    def folders(self, cwd: Path) -> set[Path]:
        """All folders that may have sessions of this directory."""
        return {self.folder(cwd), project_dir(self.config_dir, cwd)}

    def written(self, cwd: Path, path: Path, since: float) -> Path:
        """The place at which the CLI has written this transcript since then, expected at `path`. Another place is
        noted."""
        if path.exists():
            return path
        places = self.elsewhere(path)
        with contextlib.suppress(FileNotFoundError):
            places = [place for place in places if os.stat(place).st_mtime >= since - COARSE]
        if len(places) != 1:
            return path
        note = self._note(cwd, project_dir(self.config_dir, cwd))
        make_private(note.parent)
        _replace_link(note, places[0].parent)
        return places[0]

    def elsewhere(self, path: Path) -> list[Path]:
        """Files of the same session in other folders (moved sandbox, doubled prefix). Not in those of confined agents:
        each could put a file there, and hold up whoever looks for one."""
        prefix = self.sandboxes.prefix
        confined = {project_dir(self.config_dir, prefix / name) for name in self.sandboxes.all_confined()}
        return find_elsewhere(self.config_dir, path.stem, {path.parent, *confined})

    def remove_lists(self, cwd: Path, session_ids: Collection[str]) -> None:
        """Remove the CLI's files of these sessions outside `projects`. A session with a transcript in another folder
        keeps them: an adopted session is still a person's. Raises `SandboxError`."""
        for session_id in session_ids:
            lists = [self.config_dir / folder / session_id for folder in OF_SESSIONS]
            lists += self.config_dir.glob(f"todos/{session_id}-agent-*")  # 1.0.120: one of each sub-agent
            found = [*filter(os.path.lexists, lists)]
            if found and not self.elsewhere(self.path(cwd, session_id)):
                for one in found:
                    remove_any(one)

    def forget(self, cwd: Path) -> None:
        """Remove the note: use the rule again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._note(cwd, project_dir(self.config_dir, cwd)))

    def is_of_agents(self, folder: Path) -> bool:
        """Whether it is the CLI's folder of some agent's directory."""
        return folder.name.startswith(self._begins) or bool(self._notes_of(folder))

    def is_others(self, folder: Path, cwd: Path) -> bool:
        """Whether a folder that was noted for this directory also belongs to others."""
        others = set(self._notes_of(folder)) - {self._note(cwd, project_dir(self.config_dir, cwd)).name}
        if others or folder.name.startswith(self._begins):
            return True
        with contextlib.suppress(FileNotFoundError):
            return any(name != MEMORY for name in os.listdir(folder))
        return False

    def _notes_of(self, folder: Path) -> list[str]:
        with contextlib.suppress(OSError), os.scandir(self._notes) as notes:
            return [note.name for note in notes if os.readlink(note.path) == str(folder)]
        return []

    def _note(self, cwd: Path, guess: Path) -> Path:
        return self._notes / f"{cwd.name}.{hashlib.sha256(os.fsencode(guess)).hexdigest()[:16]}"


def _replace_link(link: Path, target: Path | str) -> None:
    """Replace the link in one step. If it were missing for a moment, another agent could make its own."""
    fresh = link.with_name(f".{secrets.token_hex(8)}")
    os.symlink(target, fresh)
    os.replace(fresh, link)
