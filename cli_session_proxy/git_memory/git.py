"""The git program, on a repository that may be anybody's.

The program, not pygit2: it reads every format of repository that its user's own git made, and `commit` hands options on
to `git commit`.

- No hook runs, and nothing that the repository's configuration names as a program: reading uses `log` without
  signatures, pagers or differences, writing uses `write-tree`, `commit-tree` and `update-ref`.
- Nothing is fetched: of a partial or shallow clone only what is there is read.
- Every call has a limit of time and of bytes; what is over it ends the call, not the proxy.
- Its input is a file. A git that has ended before it read a pipe would make uvloop raise RuntimeError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from ..errors import ConfigError, InvalidRequest

# Seconds for one call. The history is read in part where it takes longer (see `reading`).
LIMIT = 30.0
# Bytes of an answer that is kept as a whole: ids and names.
ANSWER = 1024 * 1024
PIECE = 64 * 1024

# Of the environment: where git finds its programs and the user's own configuration, keys and identity.
_ALLOWED = (
    "PATH", "HOME", "XDG_CONFIG_HOME", "TZ", "EMAIL", "GNUPGHOME", "GPG_TTY", "SSH_AUTH_SOCK",
    "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL",
)  # fmt: skip
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1", "GIT_PAGER": "cat", "GIT_EDITOR": "false",
}  # fmt: skip
_CONFIGURATION = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.alternateRefsCommand=", "log.showSignature=false",
    "protocol.allow=never", "gc.auto=0", "maintenance.auto=false", "i18n.commitEncoding=UTF-8",
)  # fmt: skip


class Failed(Exception):
    """git ended with an error. `said` is its own first line."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code
        self.said = said


class Repository:
    """One repository, named by a directory in it: a work tree, one of several, or a bare one. Made by `opened`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    async def opened(path: Path) -> Repository:
        """Raises `ConfigError` where there is none, or no git."""
        found = Repository(path)
        try:
            await found.run("rev-parse", "--git-dir")
        except Failed as exc:
            said = exc.said
            if "not a git repository" in said:
                said = "it is none: make one there with `git init`, or name another with repo in git_memory (--repo)"
            raise ConfigError(f"the git repository {path} cannot be read: {said}") from exc
        return found

    async def run(
        self, *words: str, stdin: str = "", limit: float = LIMIT, environment: dict[str, str] | None = None
    ) -> str:
        """What git prints. Raises `Failed`, and `ConfigError` where there is no git or no such directory."""
        child = await self._started(words, environment, stdin)
        try:
            async with asyncio.timeout(limit):
                out, error = await child.communicate()
        except TimeoutError as exc:
            raise Failed(-1, f"git {words[0]} took longer than {limit:g} s") from exc
        finally:
            await _ended(child)
        if child.returncode:
            lines = error[:ANSWER].decode("utf-8", "replace").strip().splitlines() or [f"exit {child.returncode}"]
            raise Failed(child.returncode, lines[0].removeprefix("fatal: ").removeprefix("error: "))
        return out[:ANSWER].decode("utf-8", "replace").strip()

    async def pieces(self, *words: str) -> AsyncGenerator[bytes, None]:
        """The bytes that git prints, as they come; closing it ends git. Raises `Failed` at the end."""
        child = await self._started(words, None, "", stderr=asyncio.subprocess.DEVNULL)
        assert child.stdout is not None
        try:
            while piece := await child.stdout.read(PIECE):
                yield piece
            if code := await child.wait():
                raise Failed(code, f"git {words[0]} ended with exit code {code}")
        finally:
            await _ended(child)

    async def _started(
        self, words: Sequence[str], more: dict[str, str] | None, given: str, stderr: int = asyncio.subprocess.PIPE
    ) -> asyncio.subprocess.Process:
        options = [word for value in _CONFIGURATION for word in ("-c", value)]
        env = {name: os.environ[name] for name in _ALLOWED if name in os.environ} | _ENVIRONMENT | (more or {})
        try:
            with tempfile.TemporaryFile() if given else open(os.devnull, "rb+") as stdin:  # noqa: ASYNC230 - a few KiB
                stdin.write(given.encode("utf-8", "replace"))
                stdin.seek(0)
                return await asyncio.create_subprocess_exec(
                    "git", "--no-pager", *options, *words, cwd=self.path, env=env,
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
        except Failed as exc:
            if exc.code != 1:  # it says nothing, and 1, where there is none
                raise
            return None

    async def reachable(self, revision: str) -> str:
        """The id of a commit that HEAD leads to. Raises `InvalidRequest` for any other."""
        head = await self.head()
        try:
            found = await self.run("rev-parse", "--quiet", "--verify", "--end-of-options", f"{revision}^{{commit}}")
            await self.run("merge-base", "--is-ancestor", found, head or "HEAD")
        except Failed as exc:
            raise InvalidRequest(f"note must name a commit that HEAD leads to, not {revision!r}", param="note") from exc
        return found


async def _ended(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    # To the end of its pipes: what waits there would keep the transport open.
    await child.communicate()
