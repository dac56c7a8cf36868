"""Which CLI there is and what it can do: found on disk, asked once, asked again when the file changes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ....errors import ClaudeUnavailable
from ....settings import Settings

# --help answers in 0.2 s (2.1.329) to 0.9 s (1.0.120) on two cores; a loaded machine gets a lot more.
PROBE_TIMEOUT = 30.0
PROBE_OUTPUT = 1024 * 1024

INSTALL = (
    "install it (npm install -g @anthropic-ai/claude-code), or pip install 'cli-session-proxy[claude]' for the binary "
    "that claude-agent-sdk carries, or name it with --claude-bin"
)

# Options that --help does not list but the CLI takes (run on 1.0.120 and 2.1.329): seen in its program text.
HIDDEN_FLAGS = ("--system-prompt", "--system-prompt-file")
KEEPS_SESSION_ID = (2, 0, 0)  # below it every --resume answers with a new id (facts, "Session ids")
# It answers `initialize` when it has loaded the session that it resumes: with every read of the transcript held up for
# 1.5 s, the answer came after the last of them (run on 1.0.90, 1.0.120 and 2.1.330). 1.0.60 never answers.
TELLS_WHEN_LOADED = (1, 0, 90)
KNOWS_CLIENT_COMPOSED = (2, 1, 329)  # run on; an older one counts as knowing it when its program text names it
CLIENT_COMPOSED = b"client_composed"
# A `set_model` that names the model it has and a system prompt replaces the prompt in the running process. A CLI
# that does not know this field says "success" all the same, so its program text is asked (run on 2.1.329).
PROMPT_ONLY = b"only_if_model_is_current"
# A running process can be given MCP servers that answer over its control channel (run on 2.1.329).
SET_SERVERS = b"mcp_set_servers"
# It can be started before its session's directory is known, and `claim_session` binds it to one (run on 2.1.329).
AWAIT_CLAIM = b'"--await-claim"'

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)\S*")
_FLAG = re.compile(r"^ {1,6}(?:-\w, +)?(--[a-zA-Z][\w-]*)(?:, +(--[a-zA-Z][\w-]*))?", re.MULTILINE)
_MODES = re.compile(r"--permission-mode <mode>.*?\(choices:([^)]*)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Capability:
    """One CLI binary. `flags` are those of --help and the hidden ones found in its program text.

    `client_composed`: it takes a frame so marked as words for the model only, never as a command or a file
    reference. Without it, `frames.deliverable` words the prompt so that nothing is interpreted.
    `takes_system_prompt`: a running process can be given another system prompt.
    `takes_tools`: the client's own tools can be offered to the model.
    `takes_claim`: it can be started ahead of time (see `Launch.spare`).
    """

    path: Path
    version: str
    version_tuple: tuple[int, int, int]
    flags: frozenset[str]
    permission_modes: frozenset[str]
    client_composed: bool
    takes_system_prompt: bool = False
    takes_tools: bool = False
    takes_claim: bool = False

    @property
    def warm(self) -> bool:
        """One process may serve many turns, under the id it was given."""
        return self.keeps_session_id and {"--session-id", "--resume", "--input-format"} <= self.flags

    @property
    def keeps_session_id(self) -> bool:
        """`--resume X` answers with X."""
        return self.version_tuple >= KEEPS_SESSION_ID

    @property
    def tells_when_loaded(self) -> bool:
        """It answers `initialize`, and has loaded its session by then; it does not read it again later."""
        return self.version_tuple >= TELLS_WHEN_LOADED

    @property
    def chooses_tools(self) -> bool:
        """`--tools ''` turns its own tools off; without it every known one is named in --disallowedTools."""
        return "--tools" in self.flags


_Key = tuple[str, int, int, int, int]
_probed: dict[_Key, Capability] = {}


def find(settings: Settings) -> Path:
    """The binary: `--claude-bin`, else `claude` on PATH, else the one inside `claude_agent_sdk`."""
    if settings.claude_bin is not None:
        return settings.claude_bin
    on_path = shutil.which("claude", path=settings.claude_env.get("PATH") or os.environ.get("PATH", os.defpath))
    if on_path is not None:
        return Path(on_path)
    spec = importlib.util.find_spec("claude_agent_sdk")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "_bundled" / "claude"
        if bundled.is_file():
            return bundled
    raise ClaudeUnavailable(f"no Claude CLI on PATH: {INSTALL}")


def _key(binary: Path) -> _Key:
    """What tells one binary from another: asked at every turn, so it costs one stat."""
    try:
        there = os.stat(binary)
    except OSError as exc:
        raise ClaudeUnavailable(f"no Claude CLI at {binary} ({exc.strerror}): {INSTALL}") from exc
    return str(binary), there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


def _runnable(binary: Path) -> str:
    """Its real path. Raises ClaudeUnavailable."""
    real = os.path.realpath(binary)
    if not os.path.isfile(real) or not os.access(real, os.X_OK):
        raise ClaudeUnavailable(f"{binary} is not an executable file: {INSTALL}")
    return real


async def probe(binary: Path, env: Mapping[str, str]) -> Capability:
    """Ask the binary for --version and --help. Kept until its file changes (path, size or modification time).

    Raises ClaudeUnavailable when it is missing, cannot run, does not answer in time or is no Claude CLI.
    """
    key = _key(binary)
    if key not in _probed:
        real = _runnable(binary)
        version_text = await _ask(binary, "--version", env)
        help_text = await _ask(binary, "--help", env)
        named = await asyncio.to_thread(_program_names, real)
        for old in [seen for seen in _probed if seen[0] == key[0]]:
            del _probed[old]
        _probed[key] = _capability(binary, version_text, help_text, named)
    return _probed[key]


def _capability(binary: Path, version_text: str, help_text: str, named: frozenset[bytes]) -> Capability:
    match = _VERSION.search(version_text)
    flags = {flag for found in _FLAG.findall(help_text) for flag in found if flag}
    if match is None or "--print" not in flags:
        raise ClaudeUnavailable(f"{binary} does not answer like a Claude CLI (--version, --help): {INSTALL}")
    version = (int(match[1]), int(match[2]), int(match[3]))
    modes = _MODES.search(help_text)
    return Capability(
        path=binary,
        version=match[0],
        version_tuple=version,
        flags=frozenset(flags | {flag for flag in HIDDEN_FLAGS if _literal(flag) in named}),
        permission_modes=frozenset(re.findall(r'"(\w+)"', modes[1]) if modes else ()),
        client_composed=version >= KNOWS_CLIENT_COMPOSED or CLIENT_COMPOSED in named,
        # with the snapshot on, the recorded prompt would be sent on until the next compaction
        takes_tools=SET_SERVERS in named,
        takes_system_prompt=PROMPT_ONLY in named and "--system-prompt-snapshot" in flags,
        takes_claim=AWAIT_CLAIM in named,
    )


def _literal(flag: str) -> bytes:
    return f'"{flag} <'.encode()


def _program_names(path: str) -> frozenset[bytes]:
    """Which of the names we look for are in the program text (230 MB take 0.1 s once in the page cache)."""
    wanted = [CLIENT_COMPOSED, PROMPT_ONLY, SET_SERVERS, AWAIT_CLAIM, *(_literal(flag) for flag in HIDDEN_FLAGS)]
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return frozenset()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return frozenset(name for name in wanted if text.find(name) >= 0)


async def _ask(binary: Path, flag: str, env: Mapping[str, str]) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            binary, flag, env=dict(env), cwd="/", start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as exc:
        raise ClaudeUnavailable(f"{binary} cannot be started ({exc.strerror}): {INSTALL}") from exc
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            while chunk := await process.stdout.read(65536):
                output = (output + chunk)[:PROBE_OUTPUT]
            await process.wait()
    except TimeoutError as exc:
        raise ClaudeUnavailable(f"{binary} {flag} did not answer within {PROBE_TIMEOUT:.0f} s: {INSTALL}") from exc
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in between
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        raise ClaudeUnavailable(f"{binary} {flag} failed with exit code {process.returncode}: {INSTALL}")
    return output.decode(errors="replace")
