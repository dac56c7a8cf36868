"""Which CLI there is and what it can do: found on disk, asked for --version and --help, and the rest by its version.

Nothing is read out of the program's file: a `claude` may be a script that starts the CLI (asdf, volta, nix, a
company's own). Such a script may start another version tomorrow without being changed itself. So what a running CLI
says of itself is compared with what we know (`heard`), and one that ends without a word is asked again (`forget`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .... import logs
from ....errors import ClaudeUnavailable
from ....settings import Settings
from . import descriptors

log = logs.get(__name__)

# --help answers in 0.2 s (2.1.329) to 0.9 s (1.0.120) on two cores; a loaded machine gets a lot more.
PROBE_TIMEOUT = 30.0
PROBE_OUTPUT = 1024 * 1024

PACKAGE = "@anthropic-ai/claude-code"
INSTALL = (
    f"install it (npm install -g {PACKAGE}), or pip install 'cli-session-proxy[claude]' for the binary "
    "that claude-agent-sdk carries, or name it with --claude-bin"
)
UPGRADE = f"npm install -g {PACKAGE}"  # or whatever a script that starts it wants

Version = tuple[int, int, int]

# The first version known to have it. What it is, see `Capability`. Run on the versions named and on 2.1.330.
KEEPS_SESSION_ID: Version = (2, 0, 0)  # below it every --resume answers with a new id
# Words that look like commands and files arrive as they are. 2.1.229 does not know the field.
CLIENT_COMPOSED: Version = (2, 1, 260)
# The whole loop: offers, calls, results, and results to a process that was started again. 2.1.278 takes the offers,
# but goes on with "Continue from where you left off." instead of the results when it was started again.
CLIENT_TOOLS: Version = (2, 1, 295)
# By its change log; its program text says "server rejected a thinking block; stripping all thinking blocks" (2.1.329).
HEALS_THINKING: Version = (2, 1, 156)
# 1.0.120 makes the prompt part of the summary, and then asks the model nothing but to go on from that (run).
PROMPT_AFTER_SUMMARY: Version = (2, 0, 0)
AWAIT_CLAIM: Version = (2, 1, 295)  # 2.1.278 has no such option
# Below it a `set_model` with a system prompt answers "success" and changes nothing (2.1.295).
SYSTEM_PROMPT: Version = (2, 1, 304)
# `apply_flag_settings` with variables of the environment, which the next request to the model heeds.
PARAMETERS: Version = (2, 1, 329)
# Below it `--resume` splits each record with several blocks, and gives new uuids to the pieces and to all records that
# follow. Where each record has one block it keeps every uuid, and the request extends the last one byte for byte (run
# on 1.0.120, 1.0.128, 2.0.30, 2.1.0 and 2.1.29, with a text, an image and a text in one prompt).
KEEPS_RECORDS: Version = (2, 1, 30)
# It answers `initialize` when it has loaded the session that it resumes: with every read of the transcript held up for
# 1.5 s, the answer came after the last of them (run on 1.0.90, 1.0.120 and 2.1.330). 1.0.60 never answers.
TELLS_WHEN_LOADED: Version = (1, 0, 90)
# Options that --help does not list everywhere.
SYSTEM_PROMPT_FILE: Version = (1, 0, 60)
HIDDEN_FLAGS: Mapping[str, Version] = {"--system-prompt": (1, 0, 35), "--system-prompt-file": SYSTEM_PROMPT_FILE}

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)\S*")
_FLAG = re.compile(r"^ {1,6}(?:-\w, +)?(--[a-zA-Z][\w-]*)(?:, +(--[a-zA-Z][\w-]*))?", re.MULTILINE)
_MODES = re.compile(r"--permission-mode <mode>.*?\(choices:([^)]*)\)", re.DOTALL)


@dataclass(frozen=True)
class Capability:
    """One CLI. `path` is what is run: the CLI, or a script that starts it. `flags` are the options that it takes."""

    path: Path
    version: str
    version_tuple: Version
    flags: frozenset[str]
    permission_modes: frozenset[str]

    @cached_property
    def warm(self) -> bool:
        """One process may serve many turns, under the id it was given."""
        return self.keeps_session_id and {"--session-id", "--resume", "--input-format"} <= self.flags

    @cached_property
    def keeps_session_id(self) -> bool:
        """`--resume X` answers with X."""
        return self.version_tuple >= KEEPS_SESSION_ID

    @cached_property
    def keeps_records(self) -> bool:
        """It loads records of several blocks, and of equal times, as they are. For any other CLI a transcript is
        written with one block a record."""
        return self.version_tuple >= KEEPS_RECORDS

    @cached_property
    def tells_when_loaded(self) -> bool:
        """It answers `initialize`, and has loaded its session by then; it does not read it again later."""
        return self.version_tuple >= TELLS_WHEN_LOADED

    @cached_property
    def chooses_tools(self) -> bool:
        """`--tools ''` turns its own tools off; without it every known one is named in --disallowedTools."""
        return "--tools" in self.flags

    @cached_property
    def client_composed(self) -> bool:
        """It takes a frame so marked as words for the model only, never as a command or a file reference.

        Without it, `frames.user_frame` words the prompt so that nothing is interpreted.
        """
        return self.version_tuple >= CLIENT_COMPOSED

    @cached_property
    def takes_tools(self) -> bool:
        """The client's own tools can be offered to the model (control request `mcp_set_servers`)."""
        return self.version_tuple >= CLIENT_TOOLS

    @cached_property
    def heals_thinking(self) -> bool:
        """Where the provider refuses a sealed thought, it leaves them all out by itself and asks again."""
        return self.version_tuple >= HEALS_THINKING

    @cached_property
    def compacts_before_prompt(self) -> bool:
        """Where it compacts before a turn, the turn's prompt is not summed up with the rest."""
        return self.version_tuple >= PROMPT_AFTER_SUMMARY

    @cached_property
    def takes_claim(self) -> bool:
        """It can be started ahead of time (see `Launch.spare`): `--await-claim`, then `claim_session`."""
        return self.version_tuple >= AWAIT_CLAIM

    @cached_property
    def takes_parameters(self) -> bool:
        """A running process can be told how many tokens it may answer with, how to sample and what to call."""
        return self.version_tuple >= PARAMETERS

    @cached_property
    def takes_system_prompt(self) -> bool:
        """A running process can be given another one (`set_model` with `only_if_model_is_current`).

        With the snapshot on, the recorded prompt would be sent on until the next compaction.
        """
        return self.version_tuple >= SYSTEM_PROMPT and "--system-prompt-snapshot" in self.flags


def newer(since: Version) -> str:
    """The end of a message that says what this CLI cannot do."""
    return f"; version {'.'.join(map(str, since))} and newer can: upgrade the CLI ({UPGRADE})"


_Key = tuple[str, int, int, int, int]
_probed: dict[_Key, Capability] = {}
_asking: dict[tuple[_Key, asyncio.AbstractEventLoop], asyncio.Task[Capability]] = {}
_heard: dict[Path, str] = {}  # the version that a process of this path said of itself, where --version said another


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
    raise ClaudeUnavailable(f"no Claude CLI on PATH: {INSTALL}", retry=False)


async def probe(binary: Path, env: Mapping[str, str], cwd: Path = Path("/")) -> Capability:
    """Ask it for --version and --help, once for all who want to know. Kept until its file changes, or `forget`.

    `cwd` is where it will be run: scripts such as asdf's choose a version by the directory. Raises ClaudeUnavailable
    when it is missing, cannot run, does not answer in time or is no Claude CLI.
    """
    try:
        there = os.stat(binary)  # at every turn
    except OSError as exc:
        raise ClaudeUnavailable(f"no Claude CLI at {binary} ({exc.strerror}): {INSTALL}", retry=False) from exc
    key = str(binary), there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns
    if (known := _probed.get(key)) is not None:
        return known
    asker = key, asyncio.get_running_loop()
    if (asking := _asking.get(asker)) is None:
        # Own task: it is not cancelled with the one who asked first.
        asking = _asking[asker] = asyncio.create_task(_asked(key, binary, env, cwd))
        asking.add_done_callback(lambda task: (_asking.pop(asker), task.cancelled() or task.exception()))
    return await asyncio.shield(asking)


def heard(capability: Capability, version: str) -> None:
    """A process of this CLI says that it is this version, which is not the one that we know: we ask again."""
    log.info("claude_version_changed", path=str(capability.path), known=capability.version, runs=version)
    _heard[capability.path] = version
    forget(capability)


def forget(capability: Capability) -> None:
    """Ask again before the next process is started."""
    for key in [key for key in _probed if key[0] == str(capability.path)]:
        del _probed[key]


async def _asked(key: _Key, binary: Path, env: Mapping[str, str], cwd: Path) -> Capability:
    asked = [_ask(binary, flag, env, cwd) for flag in ("--version", "--help")]
    answers = await asyncio.gather(*asked, return_exceptions=True)  # both are over then
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    version_text, help_text = (str(answer) for answer in answers)
    flags = {flag for found in _FLAG.findall(help_text) for flag in found if flag}
    if _VERSION.search(version_text) is None or "--print" not in flags:
        raise ClaudeUnavailable(
            f"{binary} does not answer like a Claude CLI (--version, --help): {INSTALL}", retry=False
        )
    match = _VERSION.search(_heard.get(binary, version_text)) or _VERSION.search(version_text)
    assert match is not None
    version = (int(match[1]), int(match[2]), int(match[3]))
    flags |= {flag for flag, since in HIDDEN_FLAGS.items() if version >= since}
    modes = _MODES.search(help_text)
    names = frozenset(re.findall(r'"(\w+)"', modes[1]) if modes else ())
    found = Capability(binary, match[0], version, frozenset(flags), names)
    forget(found)
    _probed[key] = found
    return found


async def _ask(binary: Path, flag: str, env: Mapping[str, str], cwd: Path) -> str:
    try:
        descriptors.check()
        process = await asyncio.create_subprocess_exec(
            binary, flag, env=dict(env), cwd=cwd, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as exc:
        if exc.errno in descriptors.NONE_FREE:
            raise descriptors.unavailable(exc) from exc
        raise ClaudeUnavailable(f"{binary} cannot be started ({exc.strerror}): {INSTALL}", retry=False) from exc
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
        raise ClaudeUnavailable(f"{binary} {flag} failed with exit code {process.returncode}: {INSTALL}", retry=False)
    return output.decode(errors="replace")
