"""Runs git on a repository that is not trusted.

The program, not pygit2: it reads every format of the user's own git, and `commit` passes options on to `git commit`.

- No hooks run, and no programs of the repository's configuration: reading uses `log` without signatures, pagers or
diffs, writing uses `write-tree`, `commit-tree` and `update-ref`. `git commit` with a person's options runs the programs
of the user's own configuration, and no others.
- Nothing is fetched, by no protocol: of a partial or shallow clone only existing objects are read.
- It stays in its repository. It refuses a `.git` that points to another one, was replaced since its first use, has a
link where git reads or writes, or borrows objects or parents from elsewhere. Every call names the directories that were
found. Git can read, write and run nothing else (Linux, see `within_program`), not even the user's configuration,
except for `git commit` with a person's options.
- Every call has limits of time, memory and bytes; exceeding one ends the call, not the proxy.
- Its input is a file: a git that ends before it has read a pipe would make uvloop raise RuntimeError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, InvalidRequest
from ..machine import Mounts, absolute, interpreter, links_to
from ..tasks import in_thread_at
from . import within_program

T = TypeVar("T")

# Seconds for one call. A history that takes longer is read in part (see `attempts`).
LIMIT = 30.0
# The most bytes that are kept of an output that is read as a whole: ids and names.
MOST_OUTPUT = 1024 * 1024
PIECE = 64 * 1024
LONGEST_PATH = 4096
# The most files in a folder of a git directory: each is looked at, a million in a second or two.
MOST_FILES = 1_000_000
# Git's memory limit in bytes: objects are unpacked as a whole, and a few KiB can become gigabytes.
MEMORY = 2 * 1024**3

# Variables that are passed on: for git's programs and the user's own configuration, keys and identity.
_ALLOWED = (
    "PATH", "HOME", "XDG_CONFIG_HOME", "TZ", "EMAIL", "GNUPGHOME", "GPG_TTY", "SSH_AUTH_SOCK",
    "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL",
)  # fmt: skip
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1", "GIT_PAGER": "cat", "GIT_EDITOR": "false",
    "GIT_ALLOW_PROTOCOL": "", "GIT_PROTOCOL_FROM_USER": "0",  # overrides `protocol.ext.allow` of the repository
}  # fmt: skip
_CONFIGURATION = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.alternateRefsCommand=", "log.showSignature=false",
    "gc.auto=0", "maintenance.auto=false", "i18n.commitEncoding=UTF-8", "diff.ignoreSubmodules=dirty",
)  # fmt: skip

# Paths that git needs to start: the system's libraries and time zones.
_SYSTEM = (
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share", "/lib", "/lib32", "/lib64", "/nix/store",
    "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom",
)  # fmt: skip
# Files by which a repository uses objects or parents of commits from elsewhere, each with what to do about it.
_EXTERNAL_SOURCES = {
    "objects/info/alternates": "copy the objects with `git repack -a -d`, and remove that file",
    "info/grafts": "remove that file",
}
# Settings that name a program for `git commit`. Also `required`: with it a filter without a program fails.
_PROGRAMS = re.compile(
    r"core\.(sshcommand|askpass|editor|pager|gitproxy)|sequence\.editor|gpg\.(.+\.)?program|gpg\.ssh\.defaultkeycommand"
    r"|filter\..+\.(clean|smudge|process|required)|diff\..+\.(command|textconv)|diff\.external|merge\..+\.driver"
    r"|credential\.(.+\.)?helper|trailer\..+\.(cmd|command)|interactive\.difffilter"
)
# Parts of a git directory that git reads or writes here. A link in them could lead to any file.
_GIT_FILES = (
    "COMMIT_EDITMSG", "HEAD", "config", "config.worktree", "index", "logs", "objects", "packed-refs", "refs",
    "reftable", "shallow",
)  # fmt: skip
# The git directory and the common directory of each repository at its first use, each with device and inode.
_first_used: dict[Path, tuple[tuple[Path, int, int], ...]] = {}


class GitFailed(Exception):
    """Git failed. `code`: its exit code; -1: it was ended here. `message`: the first line of its output."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Repository:
    """One repository, named by a directory in it: a work tree, one of several, or a bare one. Made by `opened`."""

    def __init__(self, path: Path, written: Iterable[Path] = ()) -> None:
        self.path = path
        self._written = written
        self._git_variables: dict[str, str] = {}  # environment variables that name its directories
        self._included: list[tuple[Path, int, int]] = []  # files that its configuration includes, as `_check` returns
        self._git_dirs: tuple[tuple[Path, int, int], ...] = ()  # as `_check` returns them

    @staticmethod
    async def opened(path: Path, written: Iterable[Path] = ()) -> Repository:
        """Raises `ConfigError` without a repository or without git, or if the repository was replaced.

        `written`: folders that confined agents may write. A path in one must not lead out of it.
        """
        repository = Repository(path, written)
        try:
            await repository._look(repository._refuse_pipes)
            output = await repository.run("rev-parse", "--path-format=absolute", "--git-dir", "--git-common-dir")
            git_dir, common = map(Path, output.split("\n"))
            top, worktree = None, ""
            if await repository.run("rev-parse", "--is-inside-work-tree") == "true":
                top = Path(await repository.run("rev-parse", "--path-format=absolute", "--show-toplevel"))
            with contextlib.suppress(GitFailed):
                worktree = await repository.run("config", "--file", str(git_dir / "config"), "--get", "core.worktree")
            git_dirs = await repository._look(repository._check, top, git_dir, common, worktree)
            repository._git_variables = {"GIT_DIR": str(git_dir)}
            if top is not None:  # with a common directory git does not take it for a bare repository
                repository._git_variables |= {"GIT_COMMON_DIR": str(common), "GIT_WORK_TREE": str(top)}
            configuration = await repository._own_configuration()
            for name, _ in configuration:
                if name.lower().startswith("hook."):  # git 2.54 runs them whatever `core.hooksPath` says
                    raise ConfigError(
                        f"the configuration of the git repository {path} names a hook ({name}): git memory runs "
                        "none. Remove it there, or set it in your own configuration of git"
                    )
                if name.lower() == "core.worktree" and top is None:
                    raise ConfigError(
                        f"the configuration of the git repository {path} names a work tree elsewhere, which is not "
                        f"its own: remove {name} there"
                    )
            repository._git_dirs = git_dirs
            files = {file for _, file in configuration}
            repository._included = await repository._look(_outside, files, git_dirs)
            # One may have been replaced before it was looked at: only these very files can be read now.
            if repository._included and await repository._own_configuration() != configuration:
                raise ConfigError(f"the configuration of the git repository {path} was changed meanwhile: try again")
        except OSError as exc:
            raise ConfigError(f"the git repository {path} cannot be read: {exc.strerror}") from exc
        except GitFailed as exc:
            why = exc.message
            if "not a git repository" in why:
                why = (
                    "not a git repository: make one there with `git init`, or name another (repo in git_memory, --repo)"
                )
            raise ConfigError(f"the git repository {path} cannot be read: {why}") from exc
        return repository

    async def _look(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that looks into the repository. Raises `GitFailed` after `LIMIT`: a program of an agent that
        writes there can hold it up, and other agents use the same repository."""
        try:
            async with asyncio.timeout(LIMIT):
                return await in_thread_at(self.path, function, *arguments)
        except TimeoutError as exc:
            raise GitFailed(-1, f"a look at its files took longer than {LIMIT:g} s") from exc

    def _refuse_pipes(self) -> None:
        """Raises `ConfigError` for a pipe among the files that git opens first, or a file of any size: git would wait
        or read there until `LIMIT`."""
        path = Path(os.path.abspath(self.path))
        git_dirs = (folder for top in (path, *path.parents) for folder in (top / ".git", top))
        git_dir = next((folder for folder in git_dirs if os.path.lexists(folder / "HEAD")), path)
        for name in (*_GIT_FILES, "commondir"):
            with contextlib.suppress(OSError):
                status = (git_dir / name).stat()
                if not _is_plain(status.st_mode):
                    raise self._no_file(git_dir / name)
                if status.st_size > MEMORY:
                    raise ConfigError(f"{git_dir / name} is larger than git's limit of memory here: remove it")

    def _no_file(self, path: Path) -> ConfigError:
        return ConfigError(f"{path} in the git repository {self.path} is neither a file nor a folder: remove it")

    async def _own_configuration(self) -> list[tuple[str, str]]:
        """The names in the repository's own configuration, each with its file."""
        words = ("config", "--list", "-z", "--name-only", "--show-scope", "--show-origin")
        fields = (await self.run(*words, whole=True)).split("\0")
        entries = zip(fields[::3], fields[1::3], fields[2::3], strict=False)
        return [(name, file.removeprefix("file:")) for scope, file, name in entries if scope in ("local", "worktree")]

    def _check(self, top: Path | None, git_dir: Path, common: Path, worktree: str) -> tuple[tuple[Path, int, int], ...]:
        """The git directory and the common directory, each with device and inode.

        Raises `ConfigError` if the git directory belongs to another repository, or was replaced.

        `worktree`: the work tree named in the git directory's configuration, as in a submodule.
        """
        if top is None:
            path = self.path.resolve()
            is_own = common == git_dir and any(git_dir in (top, top / ".git") for top in (path, *path.parents))
        elif git_dir == top / ".git":
            is_own = common == git_dir and not git_dir.is_symlink()
        elif common == git_dir.parent.parent != git_dir:  # a linked work tree: the git directory names it
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # it may be no plain file
            line = b""
            with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
                fd = os.open(git_dir / "gitdir", flags)
                closing.callback(os.close, fd)  # `open(fd)` leaves a folder's descriptor open
                line = os.read(fd, LONGEST_PATH).strip()
            is_own = line == os.fsencode(top / ".git")
        else:  # a submodule: any other work tree could be the user's own files
            named_here = bool(worktree) and (git_dir / worktree).resolve() == top.resolve()
            is_own = common == git_dir and named_here and (top / ".git").is_file()
        # An agent could put a link to another repository on the way. A repository around the folder is no other one.
        found_at = git_dir if top is None else top
        mounts, path = Mounts(), Path(os.path.abspath(self.path))
        way = (*links_to(path), path.resolve())
        found_place = mounts.place(found_at.resolve())
        for folder in self._written:
            written = mounts.shown(folder.resolve()).values()
            if any(mounts.place(at).is_relative_to(one) for at in way for one in written):
                is_own &= any(found_place.is_relative_to(one) or one.is_relative_to(found_place) for one in written)
        odd = None
        if is_own:
            found_odd = (_link_or_pipe(folder / name) for folder in {git_dir, common} for name in _GIT_FILES)
            odd = next(filter(None, found_odd), None)
        if odd is not None and not odd.is_symlink():
            raise self._no_file(odd)
        if not is_own or odd is not None:
            raise ConfigError(
                f"the .git of {self.path} leads to {common}, which is not its own: name that repository itself, or "
                "remove what was put there"
            )
        for folder in (git_dir, common):
            for name, remedy in _EXTERNAL_SOURCES.items():
                if os.path.lexists(folder / name):
                    raise ConfigError(
                        f"the git repository {self.path} names what lies outside of it in {folder / name}: git memory "
                        f"reads none of that; {remedy}"
                    )
        found = tuple((folder, folder.stat().st_dev, folder.stat().st_ino) for folder in (git_dir, common))
        if _first_used.setdefault(self.path, found) != found:
            raise ConfigError(
                f"the repository {self.path} was replaced by another one since it was first used: restart the proxy if "
                "that was you"
            )
        return found

    @property
    def has_work_tree(self) -> bool:
        return "GIT_WORK_TREE" in self._git_variables

    async def program_overrides(self) -> list[str]:
        """Options for git that replace each program that the repository's configuration names by the one of the user's
        own configuration, or by none."""
        of_user: dict[str, str] = {}
        of_repository = set()
        output = await self.run("config", "--list", "-z", "--show-scope", whole=True, as_user=True)
        entries = output.split("\0")
        for scope, entry in zip(entries[::2], entries[1::2], strict=False):
            name, _, value = entry.partition("\n")
            if _PROGRAMS.fullmatch(name.lower()):
                if scope in ("system", "global"):
                    of_user[name] = value
                elif scope in ("local", "worktree"):
                    of_repository.add(name)
        if unusable := [name for name in of_repository if "=" in name]:  # `-c` ends the name at the first one
            raise ConfigError(
                f"the configuration of the git repository {self.path} names a program that cannot be switched off "
                f"({unusable[0]}): remove it there"
            )
        values = {name: "gpg" for name in of_repository if name.endswith("program")}
        values |= {name: "false" for name in of_repository if name.endswith("required")}
        values |= of_user
        return [word for name in sorted(of_repository) for word in ("-c", f"{name}={values.get(name, '')}")]

    async def run(
        self,
        *words: str,
        stdin: str = "",
        limit: float = LIMIT,
        environment: dict[str, str] | None = None,
        writes: bool = False,
        whole: bool = False,
        as_user: bool = False,
    ) -> str:
        """Run git with these words; returns its output. Raises `GitFailed`, and `ConfigError` without git or the
        directory.

        `limit`: seconds. `writes`: git may change the repository. `whole`: more output than `MOST_OUTPUT` is an error,
        else it is cut. `as_user`: git is not confined: it may read the user's configuration and other files.
        """
        child = await self._started(words, environment, stdin, rights="" if as_user else "rw" if writes else "r")
        try:
            async with asyncio.timeout(limit):
                out, error, _ = await asyncio.gather(_output(child.stdout), _output(child.stderr), child.wait())
        except TimeoutError as exc:
            raise GitFailed(-1, f"git {words[0]} took longer than {limit:g} s") from exc
        finally:
            await _end(child)
        if child.returncode:
            lines = error.decode("utf-8", "replace").strip().splitlines() or [f"exit {child.returncode}"]
            raise GitFailed(child.returncode, lines[0].removeprefix("fatal: ").removeprefix("error: "))
        if whole and len(out) > MOST_OUTPUT:
            raise GitFailed(-1, f"git {words[0]} printed more than {MOST_OUTPUT} bytes")
        return out[:MOST_OUTPUT].decode("utf-8", "replace").strip()

    async def pieces(self, *words: str) -> AsyncGenerator[bytes, None]:
        """Git's output as a stream; closing it ends git. Raises `GitFailed` at the end."""
        child = await self._started(words, None, "", stderr=asyncio.subprocess.DEVNULL)
        assert child.stdout is not None
        try:
            while piece := await child.stdout.read(PIECE):
                yield piece
            if code := await child.wait():
                raise GitFailed(code, f"git {words[0]} ended with exit code {code}")
        finally:
            await _end(child)

    async def _started(
        self,
        words: Sequence[str],
        environment: dict[str, str] | None,
        stdin_text: str,
        stderr: int = asyncio.subprocess.PIPE,
        rights: str = "r",
    ) -> asyncio.subprocess.Process:
        """Start git. `rights`: to the git directories, "r" or "rw"; "" does not confine git."""
        options = [word for value in _CONFIGURATION for word in ("-c", value)]
        env = {name: os.environ[name] for name in _ALLOWED if name in os.environ} | _ENVIRONMENT | self._git_variables
        env |= {"PATH": absolute(os.environ.get("PATH", os.defpath)), **(environment or {})}
        directory = self.path
        try:
            git_path = shutil.which("git", path=env["PATH"])
            if git_path is None:
                raise FileNotFoundError("git")
            bounded = (interpreter(), "-I", "-S", within_program.__file__, str(MEMORY))
            argv: tuple[str, ...] = (*bounded, "--", git_path)
            if rights and self._git_dirs:
                program, libraries = await asyncio.to_thread(_program, env["PATH"])
                allowed = [f"{rights}:{device}:{inode}:{path}" for path, device, inode in dict.fromkeys(self._git_dirs)]
                allowed += [f"r:{device}:{inode}:{path}" for path, device, inode in self._included]
                allowed += [f"r:0:0:{path}" for path in _SYSTEM]
                allowed += [f"rx:0:0:{path}" for path in (program, *libraries)] + [f"rw:0:0:{os.devnull}"]
                argv = (*bounded, *allowed, "--", program)
                env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
                directory = Path("/")  # bare names must not resolve to files of the repository
            with tempfile.TemporaryFile() if stdin_text else open(os.devnull, "rb+") as stdin:  # noqa: ASYNC230 - a few KiB
                stdin.write(stdin_text.encode("utf-8", "replace"))
                stdin.seek(0)
                return await asyncio.create_subprocess_exec(
                    *argv, "--no-pager", *options, *words, cwd=directory, env=env,
                    stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                )  # fmt: skip
        except FileNotFoundError as exc:
            why = "git is not installed" if self.path.is_dir() else "there is no such directory"
            raise ConfigError(f"the git repository {self.path} cannot be read: {why}") from exc
        except OSError as exc:
            raise ConfigError(f"the git repository {self.path} cannot be read: {exc.strerror}") from exc

    async def head(self) -> str | None:
        """The commit of HEAD; None before the first one."""
        try:
            return await self.run("rev-parse", "--quiet", "--verify", "HEAD^{commit}")
        except GitFailed as exc:
            if exc.code != 1:  # exit code 1 without output: there is none
                raise
            return None

    async def reachable(self, revision: str) -> str:
        """The id of a commit that is reachable from HEAD. Raises `InvalidRequest` for any other."""
        head = await self.head()
        try:
            commit = await self.run("rev-parse", "--quiet", "--verify", "--end-of-options", f"{revision}^{{commit}}")
            await self.run("merge-base", "--is-ancestor", commit, head or "HEAD")
        except GitFailed as exc:
            raise InvalidRequest(f"note must name a commit that HEAD leads to, not {revision!r}", param="note") from exc
        return commit


@cache
def _program(path: str) -> tuple[str, tuple[str, ...]]:
    """The real git in PATH (not a wrapper), and the loader and libraries that it needs."""
    git_path = shutil.which("git", path=path)
    if git_path is None:
        raise FileNotFoundError(path)

    def output(*argv: str, **variables: str) -> str:
        env = {"PATH": path, "LC_ALL": "C.UTF-8", **variables}
        done = subprocess.run(  # noqa: S603 - git's own start
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT, check=False
        )
        return done.stdout.decode(errors="replace").strip()

    inner = Path(output(git_path, "--exec-path"), "git")
    program = os.path.realpath(inner if inner.is_file() else git_path)
    libraries = re.findall(r"(/\S+) \(0x", output(program, LD_TRACE_LOADED_OBJECTS="1"))  # as `ldd` does
    return program, (*libraries, *map(str, Path("/lib").glob("ld-*")))


def _outside(files: Iterable[str], git_dirs: Iterable[tuple[Path, int, int]]) -> list[tuple[Path, int, int]]:
    """Those of these files that are in none of the git directories, each with device and inode."""
    within = [folder.resolve() for folder, _, _ in git_dirs]
    real = sorted(
        real for real in {Path(os.path.realpath(file)) for file in files} if not any(map(real.is_relative_to, within))
    )
    return [(path, state.st_dev, state.st_ino) for path in real for state in (path.stat(),)]


def _is_plain(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _link_or_pipe(path: Path) -> Path | None:
    """The first that is neither a file nor a folder: this path, or one at any depth below. Raises `ConfigError` for too
    many files."""
    if path.is_symlink() or (path.exists() and not _is_plain(path.stat().st_mode)):
        return path
    unread, left = [str(path)] if path.is_dir() else [], MOST_FILES
    while unread:
        with contextlib.suppress(FileNotFoundError), os.scandir(unread.pop()) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    raise ConfigError(f"{path} has more than {MOST_FILES:,} files: run `git gc` there")
                if entry.is_dir(follow_symlinks=False):
                    unread.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    return Path(entry.path)
    return None


async def _output(pipe: asyncio.StreamReader | None) -> bytes:
    """All output, of which one byte more than `MOST_OUTPUT` is kept: an untrusted repository may make it endless."""
    assert pipe is not None
    data = b""
    while piece := await pipe.read(PIECE):
        data += piece[: MOST_OUTPUT + 1 - len(data)]
    return data


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    # Read the pipes to their end: unread data would keep the transport open.
    await child.communicate()
