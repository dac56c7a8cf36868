"""Finds the CLI, and knows what it can do: by --version, --help and the self-check.

The results of the self-check decide. Before it, and for what it could not try, the version decides.

The program's file is not inspected: `claude` may be a script that starts the CLI (asdf, volta, nix, a company's own).
Such a script may start another version tomorrow without being changed. So the version that a running CLI reports is
compared with the known one (`heard`), and after a CLI that ended without output its --version and --help are read
again (`forget`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from .... import logs, machine
from ....errors import ClaudeUnavailable
from ....settings import Settings
from ..transcript import Loading
from . import descriptors
from .observed import EXPECTED, Name, Observation, Observed, Version, expected

log = logs.get(__name__)

# --help answers in 0.2 s (2.1.329) to 0.9 s (1.0.120) on two cores. A loaded machine needs much longer.
PROBE_TIMEOUT = 30.0
PROBE_OUTPUT = 1024 * 1024

# How many reports of another version lead to a probe, in so many seconds. It starts the CLI twice, also for the other
# agents. A script may start another version each time, and a shell in a confined CLI's place may say that it is one.
MOST_HEARD, HEARD_WITHIN = 3, 60.0

PACKAGE = "@anthropic-ai/claude-code"


def how_to_install() -> str:
    """How to install a CLI. On musl (Alpine) claude-agent-sdk is source only, without the CLI of its wheels."""
    from_wheel = "pip install 'cli-session-proxy[claude]' for the binary that claude-agent-sdk carries, or "
    if machine.SYSTEM == "musl":
        from_wheel = ""
    return f"install it ({machine.command_to('install the CLI')}), or {from_wheel}name it with --claude-bin"


INSTALL = how_to_install()
UPGRADE = f"npm install -g {PACKAGE}"  # A CLI behind a script (asdf, volta) is upgraded by that tool.

# The first version with --session-id (1.0.45 has none): we need a session's id before its first turn.
OLDEST: Version = (1, 0, 60)
# Options of every supported CLI that --help may not list.
SYSTEM_PROMPT = "--system-prompt"
PROMPT_FILE = "--system-prompt-file"

# `claude --version` prints "2.1.330 (Claude Code)", perhaps after a notice.
_VERSIONS = (
    re.compile(r"(\d+)\.(\d+)\.(\d+)\S*(?= \(Claude Code\))"),
    re.compile(r"(\d+)\.(\d+)\.(\d+)\S*"),
    re.compile(r"\b(\d+)\.(\d+)()\b"),
)
LONGEST_VERSION = 4096  # characters of its output that are searched
_CLAUDE = re.compile(r"\bclaude\b", re.IGNORECASE)  # only a CLI's own output names it
# All CLIs up to 2.1.330 print a numeric version: one that prints another is newer than all of them.
UNKNOWN_VERSION, NEWER_THAN_ALL = "unknown", (999, 0, 0)
# The options of 2.1.330 that a process is started with, for a CLI whose --help was not read.
OPTIONS = frozenset(
    {
        "--add-dir", "--allowedTools", "--append-system-prompt", "--await-claim", "--disallowedTools", "--effort",
        "--include-partial-messages", "--input-format", "--mcp-config", "--model", "--output-format",
        "--permission-mode", "--print", "--resume", "--session-id", "--setting-sources", "--settings",
        "--strict-mcp-config", SYSTEM_PROMPT, "--system-prompt-snapshot", "--tools", "--verbose",
    }
)  # fmt: skip
UNKNOWN_OPTION = re.compile(r"error: unknown option '(--?[\w-]+)")
# Options without which a CLI is still used.
OPTIONAL = frozenset({"--effort", "--include-partial-messages", "--system-prompt-snapshot"})
_FLAG = re.compile(r"^ {1,6}(?:-\w, +)?(--[a-zA-Z][\w-]*)(?:, +(--[a-zA-Z][\w-]*))?", re.MULTILINE)
_MODES = re.compile(r"--permission-mode <mode>.*?\(choices:([^)]*)\)", re.DOTALL)


def _ability(name: Name) -> cached_property[bool]:
    """A property of a CLI: whether it `does` what this check observes."""
    return cached_property(lambda cli: cli.does(name))


@dataclass(frozen=True)
class Capability:
    """One CLI. `path`: the CLI, or a script that starts it. `flags`: its options.

    `observed`: results of its self-check. After a check or a failure in use there is a new `Capability`, which the next
    turn gets from `probe`; a running process keeps its own.
    """

    path: Path
    version: str
    version_tuple: Version
    flags: frozenset[str]
    permission_modes: frozenset[str]
    observed: Observed = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        """For messages."""
        return f"Claude CLI {self.version} at {self.path}"

    def does(self, name: Name) -> bool:
        """Whether it passed this check or, if it was not tried, its version is expected to."""
        seen = self.observed.get(name)
        if seen is None or seen.outcome == "not tried":
            return self.version_tuple >= EXPECTED[name]
        return seen.outcome == "ok"

    def was_seen(self, name: Name) -> bool:
        """Whether its check passed. Then a failure of this in use has another cause."""
        return (seen := self.observed.get(name)) is not None and seen.outcome == "ok"

    def cannot(self, name: Name, what: str) -> str:
        """The error message if this is needed: the CLI, `what` it cannot do, the check's result, and a version that
        can."""
        problem = f"{self.name} cannot {what}"
        seen = self.observed.get(name)
        if seen is None or seen.outcome != "failed" or not expected(name, self.version_tuple):
            return f"{problem}{newer(EXPECTED[name])}"
        return f"{problem}: its check failed at `{name}` ({seen.detail or 'nothing was seen'}); use another version"

    def not_seen_asking(self) -> ClaudeUnavailable:
        """The error of a turn whose tools need approval, before the check. The version is not enough: a CLI that does
        not ask would run them."""
        seen = self.observed.get("can_use_tool")
        if seen is not None and seen.outcome == "failed":
            why = self.cannot("can_use_tool", "be trusted to ask before it runs a tool, as `approve` wants it")
            return ClaudeUnavailable(why, retry=False)
        return ClaudeUnavailable(
            f"it was not checked yet whether {self.name} asks before it runs a tool: wait for the self-check of "
            "`serve`, or run `cli-session-proxy doctor --check-cli`",
            retry_after=10.0,
        )

    # `--resume X` answers with X.
    keeps_session_id = _ability("same_id")
    # It answers `initialize` after it has loaded its session, and does not read the file again.
    tells_when_loaded = _ability("initialize")
    # It takes a frame with this field as text for the model only, never as a command or a file reference. Without it,
    # `frames.user_frame` splits the prompt so that nothing is interpreted.
    client_composed = _ability("words")
    # A prompt may have several blocks: an image beside its words, words in two pieces.
    takes_blocks = _ability("blocks")
    # The client's own tools can be offered to the model (control request `mcp_set_servers`).
    takes_tools = _ability("mcp_set_servers")
    # If the provider refuses signed thinking, it leaves all thinking out and asks again.
    heals_thinking = _ability("heals_thinking")
    # A running process accepts a token limit, sampling parameters and a tool choice.
    takes_parameters = _ability("apply_flag_settings")

    @cached_property
    def warm(self) -> bool:
        """One process may serve many turns, under its given session id."""
        return self.keeps_session_id and {"--session-id", "--resume", "--input-format"} <= self.flags

    @cached_property
    def tags(self) -> bool:
        """Its results may name the prompt that they answer."""
        seen = self.observed.get("tag")
        return seen is None or seen.outcome != "failed"

    @cached_property
    def chooses_tools(self) -> bool:
        """`--tools ''` turns its own tools off; else every known one is named in --disallowedTools."""
        return "--tools" in self.flags

    @cached_property
    def form(self) -> Loading:
        """The form in which it can load a transcript."""
        return Loading(whole_records=self.does("whole_records"))

    @cached_property
    def takes_claim(self) -> bool:
        """It can be started ahead of time (see `Launch.spare`): `--await-claim`, then `claim_session`."""
        return self.does("claim_session") and self.does("initialize")

    @cached_property
    def takes_system_prompt(self) -> bool:
        """A running process accepts another system prompt (`set_model` with `only_if_model_is_current`).

        With the snapshot on, the recorded prompt would be used until the next compaction.
        """
        return self.does("set_model") and "--system-prompt-snapshot" in self.flags


def newer(since: Version) -> str:
    """The end of a message about what this CLI cannot do."""
    return f"; version {'.'.join(map(str, since))} and newer can: upgrade the CLI ({UPGRADE})"


def pin(version: str | None) -> str:
    """How to install a version that passed the check; None: no such version is known here."""
    which = "VERSION" if version is None else version
    earlier = "an earlier version" if version is None else f"version {version}"
    return f"use {earlier}: npm install -g {PACKAGE}@{which}, or claude install {which}"


def numbers(version: str) -> Version:
    """A version's text as numbers, to compare; (0, 0, 0) if it has none."""
    found = read_version(version)
    return (0, 0, 0) if found is None else found[1]


# Identifies a file's state: path, device, inode, size, time.
Identity = tuple[str, int, int, int, int]
_probed: dict[Identity, Capability] = {}
_versions: dict[Identity, tuple[str, Version] | None] = {}
_probing: dict[tuple[Identity, asyncio.AbstractEventLoop], asyncio.Task[Capability]] = {}
_refused: dict[tuple[Path, str], frozenset[str]] = {}  # options that a CLI rejected, by path and version
FAILED_IN_A_ROW = 2  # turns in which something failed, after which the CLI counts as unable to do it
_reported: dict[Path, str] = {}  # the version that a process of this path reported, if not that of --version
# When reports of another version last led to a probe. Those that may be forged are counted apart: no agent's shell can
# use up what others' reports need.
_heard_at: dict[tuple[Path, bool], deque[float]] = {}
_observed: dict[tuple[Identity, str], Observed] = {}  # self-check results of this file as this version
_replacements: dict[Identity, Identity] = {}  # the file that is run instead of the one at that path
_listeners: list[Listener] = []


class Listener(Protocol):
    """Callbacks about CLIs. They must not block or fail."""

    def found(self, identity: Identity, cli: Capability) -> None:
        """A new or changed CLI is about to be used."""

    def degraded(self, identity: Identity, cli: Capability, seen: Observation) -> None:
        """It failed in use at something that it was expected to do."""


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls it for every known CLI, and for each new one."""
    _listeners.append(listener)
    try:
        for identity, cli in probed_here():
            listener.found(identity, cli)
        yield
    finally:
        _listeners.remove(listener)


def probed_here() -> list[tuple[Identity, Capability]]:
    """Every known CLI, without those that are run instead of another."""
    return [(identity, cli) for identity, cli in _probed.items() if identity not in _replacements.values()]


def observe(identity: Identity, version: str, observed: Observed) -> None:
    """Set the self-check results of that file as that version; they apply from the next turn on."""
    for known in [known for known in _observed if known[0][0] == identity[0] and known[0] != identity]:
        del _observed[known]  # the file there was replaced
    _observed[identity, version] = observed
    if (cli := _probed.get(identity)) is not None and cli.version == version:
        _probed[identity] = replace(cli, observed=observed)


def use_instead(identity: Identity, other: Identity | None) -> None:
    """From the next turn on run `other` instead of this file, until the file changes; None: run this file."""
    for known in [known for known in _replacements if known[0] == identity[0]]:
        del _replacements[known]
    if other is not None:
        _replacements[identity] = other


def register(binary: Path, cli: Capability) -> Identity:
    """`binary` is the same program as `cli`, so it need not be probed. Raises OSError."""
    identity = identity_of(binary)
    _observed[identity, cli.version] = cli.observed
    _probed[identity] = replace(cli, path=binary)
    return identity


def identity_of(binary: Path) -> Identity:
    """The file's present state. Raises OSError."""
    status = os.stat(binary)
    return str(binary), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def failed(cli: Capability, name: Name, detail: str) -> None:
    """This CLI failed in use at something that it was expected to do. From the next turn on it is not used for it.

    `detail`: what it did instead, perhaps its own message; it is cut here. Logged once, stored by `serve` (a later
    self-check may overrule it), shown by `doctor`, the page and /metrics. Running processes are not affected.
    """
    for identity, known in list(_probed.items()):
        if known.path != cli.path or known.version != cli.version or not known.does(name):
            continue
        seen = Observation.of(name, "failed", detail)
        observe(identity, known.version, {**known.observed, name: seen})
        log.warning("claude_degraded", observation=name, version=cli.version, path=str(cli.path), detail=seen.detail)
        for listener in _listeners:
            listener.degraded(identity, known, seen)


class Doubts:
    """Counts failures of CLIs in single turns. One may have another cause; after two in a row the CLI has `failed`."""

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[Path, str, Name], int] = {}

    def failed(self, cli: Capability, name: Name, detail: str) -> None:
        key = cli.path, cli.version, name
        self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
        if self._in_a_row[key] >= FAILED_IN_A_ROW:
            failed(cli, name, detail)

    def worked(self, cli: Capability, *names: Name) -> None:
        for name in names:
            self._in_a_row.pop((cli.path, cli.version, name), None)


def known(binary: Path) -> tuple[Capability, Capability] | None:
    """The CLI at that path, and the one that is run; None before it was probed."""
    for identity, cli in _probed.items():
        if identity[0] == str(binary):
            return cli, _probed.get(_replacements.get(identity, identity), cli)
    return None


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


async def version(binary: Path, env: Mapping[str, str]) -> tuple[str, Version] | None:
    """The output of --version, which takes 10 ms (--help: 140; 2.1.332). Cached until its file changes, or `forget`.
    None: it is no Claude CLI. Raises ClaudeUnavailable.
    """
    try:
        identity = identity_of(binary)
    except OSError as exc:
        raise _missing(binary, exc) from exc
    if identity not in _versions:
        output = await _ask(binary, "--version", env, Path("/"))
        _versions[identity] = read_version(output) if _CLAUDE.search(output) else None
    return _versions[identity]


def _missing(binary: Path, exc: OSError) -> ClaudeUnavailable:
    return ClaudeUnavailable(f"no Claude CLI at {binary} ({exc.strerror}): {INSTALL}", retry=False)


async def probe(binary: Path, env: Mapping[str, str], cwd: Path = Path("/")) -> Capability:
    """Run --version and --help, once for all callers. Cached until its file changes, or `forget`.

    `cwd`: where it will be run, because scripts such as asdf's choose a version by directory. Raises ClaudeUnavailable
    if it is missing, cannot run, does not answer in time or is no Claude CLI.
    """
    try:
        key = identity_of(binary)  # checked at every turn
    except OSError as exc:
        raise _missing(binary, exc) from exc
    key = _replacements.get(key, key)
    if (known := _probed.get(key)) is not None:
        return known
    caller = key, asyncio.get_running_loop()
    if (probing := _probing.get(caller)) is None:
        # Own task: a cancelled first caller must not cancel it for others.
        probing = _probing[caller] = asyncio.create_task(_probe(key, Path(key[0]), env, cwd))
        probing.add_done_callback(lambda task: (_probing.pop(caller), task.cancelled() or task.exception()))
    return await asyncio.shield(probing)


def heard(capability: Capability, version: str | None) -> None:
    """A process of this CLI reported another version than the known one: probe it again, unless that was done often
    just now. None: the report may be forged, only the probe counts."""
    key, now = (capability.path, version is None), time.monotonic()
    heard_at = _heard_at.setdefault(key, deque(maxlen=MOST_HEARD))
    if len(heard_at) == MOST_HEARD and now - heard_at[0] < HEARD_WITHIN:
        return
    heard_at.append(now)
    if version is not None:
        log.info("claude_version_changed", path=str(capability.path), known=capability.version, runs=version)
        _reported[capability.path] = version
    forget(capability)


def forget(capability: Capability) -> None:
    """Probe it again before the next process is started."""
    for key in [key for key in (*_probed, *_versions) if key[0] == str(capability.path)]:
        _probed.pop(key, None)
        _versions.pop(key, None)


def without(capability: Capability, option: str) -> None:
    """It rejected this option, despite its --help. The next process is started without it, if possible."""
    if option == PROMPT_FILE:
        failed(capability, "prompt_file", "it does not know the option")
    if option not in OPTIONAL:
        return
    key = capability.path, capability.version
    _refused[key] = _refused.get(key, frozenset()) | {option}
    forget(capability)
    log.warning("claude_option_refused", cli=capability.name, option=option)


def read_version(text: str) -> tuple[str, Version] | None:
    """The version as text and as numbers. Two numbers are enough."""
    for form in _VERSIONS:
        if (found := form.search(text[:LONGEST_VERSION])) is not None:
            return found[0], (int(found[1]), int(found[2]), int(found[3] or 0))
    return None


async def _probe(key: Identity, binary: Path, env: Mapping[str, str], cwd: Path) -> Capability:
    questions = [_ask(binary, flag, env, cwd) for flag in ("--version", "--help")]
    answers = await asyncio.gather(*questions, return_exceptions=True)  # waits for both
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    version_text, help_text = (str(answer) for answer in answers)
    flags = {flag for found in _FLAG.findall(help_text) for flag in found if flag}
    read = read_version(_reported.get(binary, "")) or read_version(version_text)
    if (read is None or "--print" not in flags) and _CLAUDE.search(version_text) is None:
        raise ClaudeUnavailable(
            f"{binary} does not answer like a Claude CLI (--version, --help): {INSTALL}", retry=False
        )
    if "--print" not in flags:
        log.warning("claude_help_not_read", path=str(binary), said=help_text[:200])
        flags |= OPTIONS
    if read is None:
        log.warning("claude_version_not_read", path=str(binary), said=version_text[:200])
    name, version = read or (UNKNOWN_VERSION, NEWER_THAN_ALL)
    if "--session-id" not in flags:
        raise ClaudeUnavailable(
            f"Claude CLI {name} at {binary} is too old, as it has no option --session-id{newer(OLDEST)}", retry=False
        )
    flags.add(SYSTEM_PROMPT)
    modes = _MODES.search(help_text)
    names = frozenset(re.findall(r'"(\w+)"', modes[1]) if modes else ())
    observed = _observed.get((key, name), {})
    flags -= _refused.get((binary, name), frozenset())
    found = Capability(binary, name, version, frozenset(flags), names, observed)
    forget(found)
    _probed[key] = found
    for listener in _listeners:
        listener.found(key, found)
    return _probed.get(_replacements.get(key, key), found)


async def _ask(binary: Path, flag: str, env: Mapping[str, str], cwd: Path, *, tries: int = 2) -> str:
    try:
        descriptors.check()
        code, output = await run((binary, flag), env, cwd, seconds=PROBE_TIMEOUT, most=PROBE_OUTPUT)
    except TimeoutError as exc:
        if tries > 1:  # a real CLI (2.1.332) was seen once that had not said what it is after 30 s
            log.warning("claude_asked_again", path=str(binary), flag=flag)
            return await _ask(binary, flag, env, cwd, tries=tries - 1)
        raise ClaudeUnavailable(f"{binary} {flag} did not answer within {PROBE_TIMEOUT:.0f} s: {INSTALL}") from exc
    except OSError as exc:
        if exc.errno in descriptors.NONE_FREE:
            raise descriptors.unavailable(exc) from exc
        raise ClaudeUnavailable(f"{binary} cannot be started ({exc.strerror}): {INSTALL}", retry=False) from exc
    if code != 0:
        raise ClaudeUnavailable(f"{binary} {flag} failed with exit code {code}: {INSTALL}", retry=False)
    return output


async def run(
    command: Sequence[str | Path], env: Mapping[str, str], cwd: Path, *, seconds: float, most: int
) -> tuple[int | None, str]:
    """The exit code, and the first bytes of stdout. Raises `OSError` if it cannot be started, `TimeoutError`."""
    process = await asyncio.create_subprocess_exec(
        *command, env=dict(env), cwd=cwd, start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(seconds):
            while chunk := await process.stdout.read(65536):
                output = (output + chunk)[:most]
            await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode, output.decode(errors="replace")
