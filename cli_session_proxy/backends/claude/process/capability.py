"""Which CLI there is and what it can do: found on disk, asked for --version and --help; and what it was seen to do.

What the self-check has observed decides. Until then, and for what it could not try, the version does.

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
from collections.abc import Iterator, Mapping
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

# --help answers in 0.2 s (2.1.329) to 0.9 s (1.0.120) on two cores; a loaded machine gets a lot more.
PROBE_TIMEOUT = 30.0
PROBE_OUTPUT = 1024 * 1024

PACKAGE = "@anthropic-ai/claude-code"


def how_to_install() -> str:
    """On musl (Alpine) claude-agent-sdk comes as source, without the CLI that its wheels carry."""
    wheel = "pip install 'cli-session-proxy[claude]' for the binary that claude-agent-sdk carries, or "
    others = "" if machine.SYSTEM == "musl" else wheel
    return f"install it ({machine.command_to('install the CLI')}), or {others}name it with --claude-bin"


INSTALL = how_to_install()
UPGRADE = f"npm install -g {PACKAGE}"  # or whatever a script that starts it wants

# 1.0.45 has no --session-id, 1.0.60 has it: without, no session has an id that we know before its first turn.
OLDEST: Version = (1, 0, 60)
# Every CLI that is not too old has it; --help does not list it everywhere.
SYSTEM_PROMPT = "--system-prompt"
PROMPT_FILE = "--system-prompt-file"

# Its own words are "2.1.330 (Claude Code)"; a notice may stand before them.
_VERSIONS = (
    re.compile(r"(\d+)\.(\d+)\.(\d+)\S*(?= \(Claude Code\))"),
    re.compile(r"(\d+)\.(\d+)\.(\d+)\S*"),
    re.compile(r"\b(\d+)\.(\d+)()\b"),
)
LONGEST_VERSION = 4096  # characters of what it says that are looked through
_ITSELF = re.compile(r"\bclaude\b", re.IGNORECASE)
# All CLIs up to 2.1.330 tell their version in numbers: one that does not is newer.
UNREAD, NEWER_THAN_ALL = "unknown", (999, 0, 0)
# The options of 2.1.330 that a process is started with: for one whose --help is not read.
OPTIONS = frozenset(
    {
        "--add-dir", "--allowedTools", "--append-system-prompt", "--await-claim", "--disallowedTools", "--effort",
        "--include-partial-messages", "--input-format", "--mcp-config", "--model", "--output-format",
        "--permission-mode", "--print", "--resume", "--session-id", "--setting-sources", "--settings",
        "--strict-mcp-config", SYSTEM_PROMPT, "--system-prompt-snapshot", "--tools", "--verbose",
    }
)  # fmt: skip
UNKNOWN_OPTION = re.compile(r"error: unknown option '(--?[\w-]+)")
# Without these a turn is answered all the same.
DISPENSABLE = frozenset({"--effort", "--include-partial-messages", "--system-prompt-snapshot"})
_FLAG = re.compile(r"^ {1,6}(?:-\w, +)?(--[a-zA-Z][\w-]*)(?:, +(--[a-zA-Z][\w-]*))?", re.MULTILINE)
_MODES = re.compile(r"--permission-mode <mode>.*?\(choices:([^)]*)\)", re.DOTALL)


@dataclass(frozen=True)
class Capability:
    """One CLI. `path` is what is run: the CLI, or a script that starts it. `flags` are the options that it takes.

    `observed` is what it was seen to do. One that is checked, or degraded, is replaced by another `Capability`, which
    the next turn gets from `probe`; a process keeps the one that it was started with until then.
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
        """It was seen to do this; where that was not tried, it is expected to."""
        seen = self.observed.get(name)
        if seen is None or seen.outcome == "not tried":
            return self.version_tuple >= EXPECTED[name]
        return seen.outcome == "ok"

    def was_seen(self, name: Name) -> bool:
        """Its check saw it do this: where it does not, somebody else has a hand in it."""
        return (seen := self.observed.get(name)) is not None and seen.outcome == "ok"

    def cannot(self, name: Name, what: str) -> str:
        """The message for where this is needed: which CLI cannot do `what`, what was seen, and which version can."""
        said = f"{self.name} cannot {what}"
        seen = self.observed.get(name)
        if seen is None or seen.outcome != "failed" or not expected(name, self.version_tuple):
            return f"{said}{newer(EXPECTED[name])}"
        return f"{said}: its check failed at `{name}` ({seen.detail or 'nothing was seen'}); use another version"

    def not_seen_asking(self) -> ClaudeUnavailable:
        """The error of a turn whose tools wait for a person. Its version is not enough to go by: a CLI that does not
        ask would run them."""
        seen = self.observed.get("can_use_tool")
        if seen is not None and seen.outcome == "failed":
            why = self.cannot("can_use_tool", "be trusted to ask before it runs a tool, as `approve` wants it")
            return ClaudeUnavailable(why, retry=False)
        return ClaudeUnavailable(
            f"it was not checked yet whether {self.name} asks before it runs a tool: wait for the self-check of "
            "`serve`, or run `cli-session-proxy doctor --check-cli`",
            retry_after=10.0,
        )

    @cached_property
    def warm(self) -> bool:
        """One process may serve many turns, under the id it was given."""
        return self.keeps_session_id and {"--session-id", "--resume", "--input-format"} <= self.flags

    @cached_property
    def keeps_session_id(self) -> bool:
        """`--resume X` answers with X."""
        return self.does("same_id")

    @cached_property
    def tags(self) -> bool:
        """Its result may name the prompt that it answers, so that no other one is taken for it."""
        seen = self.observed.get("tag")
        return seen is None or seen.outcome != "failed"

    @cached_property
    def tells_when_loaded(self) -> bool:
        """It answers `initialize`, and has loaded its session by then; it does not read it again later."""
        return self.does("initialize")

    @cached_property
    def chooses_tools(self) -> bool:
        """`--tools ''` turns its own tools off; without it every known one is named in --disallowedTools."""
        return "--tools" in self.flags

    @cached_property
    def client_composed(self) -> bool:
        """It takes a frame so marked as words for the model only, never as a command or a file reference.

        Without it, `frames.user_frame` words the prompt so that nothing is interpreted.
        """
        return self.does("words")

    @cached_property
    def takes_blocks(self) -> bool:
        """A prompt may have several blocks: an image beside its words, words in two pieces."""
        return self.does("blocks")

    @cached_property
    def takes_tools(self) -> bool:
        """The client's own tools can be offered to the model (control request `mcp_set_servers`)."""
        return self.does("mcp_set_servers")

    @cached_property
    def heals_thinking(self) -> bool:
        """Where the provider refuses a sealed thought, it leaves them all out by itself and asks again."""
        return self.does("heals_thinking")

    @cached_property
    def form(self) -> Loading:
        """How it loads a transcript: to be written so."""
        return Loading(whole_records=self.does("whole_records"))

    @cached_property
    def takes_claim(self) -> bool:
        """It can be started ahead of time (see `Launch.spare`): `--await-claim`, then `claim_session`."""
        return self.does("claim_session") and self.does("initialize")

    @cached_property
    def takes_parameters(self) -> bool:
        """A running process can be told how many tokens it may answer with, how to sample and what to call."""
        return self.does("apply_flag_settings")

    @cached_property
    def takes_system_prompt(self) -> bool:
        """A running process can be given another one (`set_model` with `only_if_model_is_current`).

        With the snapshot on, the recorded prompt would be sent on until the next compaction.
        """
        return self.does("set_model") and "--system-prompt-snapshot" in self.flags


def newer(since: Version) -> str:
    """The end of a message that says what this CLI cannot do."""
    return f"; version {'.'.join(map(str, since))} and newer can: upgrade the CLI ({UPGRADE})"


def pin(version: str | None) -> str:
    """How a person takes a version that memory can be trusted to; None: which one is not known here."""
    which = "VERSION" if version is None else version
    earlier = "an earlier version" if version is None else f"version {version}"
    return f"use {earlier}: npm install -g {PACKAGE}@{which}, or claude install {which}"


def numbers(version: str) -> Version:
    """Of a version's text, to compare; (0, 0, 0) for what is none."""
    found = read_version(version)
    return (0, 0, 0) if found is None else found[1]


# A file as it stands somewhere: path, device, inode, size, time.
Identity = tuple[str, int, int, int, int]
_probed: dict[Identity, Capability] = {}
_versions: dict[Identity, tuple[str, Version] | None] = {}
_asking: dict[tuple[Identity, asyncio.AbstractEventLoop], asyncio.Task[Capability]] = {}
_refused: dict[tuple[Path, str], frozenset[str]] = {}  # options that a CLI refused, by path and version
IN_A_ROW = 2  # turns
_heard: dict[Path, str] = {}  # the version that a process of this path said of itself, where --version said another
_observed: dict[tuple[Identity, str], Observed] = {}  # what was seen of this file as this version
_stand_ins: dict[Identity, Identity] = {}  # which file is run in place of the one that lies there
_listeners: list[Listener] = []


class Listener(Protocol):
    """Is told of CLIs. Neither may wait or fail."""

    def found(self, identity: Identity, cli: Capability) -> None:
        """A CLI that was not known, or has changed, is about to be used."""

    def degraded(self, identity: Identity, cli: Capability, seen: Observation) -> None:
        """It failed in use at what it was taken to do."""


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """It is told of every CLI that is known already, and of each that comes."""
    _listeners.append(listener)
    try:
        for identity, cli in there():
            listener.found(identity, cli)
        yield
    finally:
        _listeners.remove(listener)


def there() -> list[tuple[Identity, Capability]]:
    """Every CLI that is known, but for those that are run in place of another."""
    return [(identity, cli) for identity, cli in _probed.items() if identity not in _stand_ins.values()]


def observe(identity: Identity, version: str, observed: Observed) -> None:
    """From the next turn on this decides what the CLI is used for: it was seen of that file as that version."""
    for known in [known for known in _observed if known[0][0] == identity[0] and known[0] != identity]:
        del _observed[known]  # another file lies there by now
    _observed[identity, version] = observed
    if (cli := _probed.get(identity)) is not None and cli.version == version:
        _probed[identity] = replace(cli, observed=observed)


def stand_in(identity: Identity, other: Identity | None) -> None:
    """From the next turn on that one is run in place of this file, until another file lies there; None: itself."""
    for known in [known for known in _stand_ins if known[0] == identity[0]]:
        del _stand_ins[known]
    if other is not None:
        _stand_ins[identity] = other


def register(binary: Path, cli: Capability) -> Identity:
    """`binary` is the same program as `cli`: it need not be asked. Raises OSError."""
    identity = identity_of(binary)
    _observed[identity, cli.version] = cli.observed
    _probed[identity] = replace(cli, path=binary)
    return identity


def identity_of(binary: Path) -> Identity:
    """The file as it stands there now. Raises OSError."""
    there = os.stat(binary)
    return str(binary), there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


def failed(cli: Capability, name: Name, detail: str) -> None:
    """This CLI was seen, in use, not to do what it was taken to do: from the next turn on it is not used for it.

    `detail` is what it did instead, in its own words where it said some; it is bounded here. Logged once, kept in the
    store by `serve` (a self-check that begins later may overrule it), shown by `doctor`, the page and /metrics.
    A process that runs goes on with what it was started as.
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
    """What CLIs did not do in single turns. Once may be somebody else's fault; twice in a row they have `failed`."""

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[Path, str, Name], int] = {}

    def failed(self, cli: Capability, name: Name, detail: str) -> None:
        key = cli.path, cli.version, name
        self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
        if self._in_a_row[key] >= IN_A_ROW:
            failed(cli, name, detail)

    def worked(self, cli: Capability, *names: Name) -> None:
        for name in names:
            self._in_a_row.pop((cli.path, cli.version, name), None)


def known(binary: Path) -> tuple[Capability, Capability] | None:
    """The CLI that lies there, as it is known by now, and the one that is run; None before it was asked."""
    for identity, cli in _probed.items():
        if identity[0] == str(binary):
            return cli, _probed.get(_stand_ins.get(identity, identity), cli)
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
    """As it answers --version, which takes 10 ms where --help takes 140 (2.1.332). Kept until its file changes, or
    `forget`. None: in no words of a Claude CLI's. Raises ClaudeUnavailable.
    """
    try:
        identity = identity_of(binary)
    except OSError as exc:
        raise _missing(binary, exc) from exc
    if identity not in _versions:
        said = await _ask(binary, "--version", env, Path("/"))
        _versions[identity] = read_version(said) if _ITSELF.search(said) else None
    return _versions[identity]


def _missing(binary: Path, exc: OSError) -> ClaudeUnavailable:
    return ClaudeUnavailable(f"no Claude CLI at {binary} ({exc.strerror}): {INSTALL}", retry=False)


async def probe(binary: Path, env: Mapping[str, str], cwd: Path = Path("/")) -> Capability:
    """Ask it for --version and --help, once for all who want to know. Kept until its file changes, or `forget`.

    `cwd` is where it will be run: scripts such as asdf's choose a version by the directory. Raises ClaudeUnavailable
    when it is missing, cannot run, does not answer in time or is no Claude CLI.
    """
    try:
        key = identity_of(binary)  # at every turn
    except OSError as exc:
        raise _missing(binary, exc) from exc
    key = _stand_ins.get(key, key)
    if (known := _probed.get(key)) is not None:
        return known
    asker = key, asyncio.get_running_loop()
    if (asking := _asking.get(asker)) is None:
        # Own task: it is not cancelled with the one who asked first.
        asking = _asking[asker] = asyncio.create_task(_asked(key, Path(key[0]), env, cwd))
        asking.add_done_callback(lambda task: (_asking.pop(asker), task.cancelled() or task.exception()))
    return await asyncio.shield(asking)


def heard(capability: Capability, version: str) -> None:
    """A process of this CLI says that it is this version, which is not the one that we know: we ask again."""
    log.info("claude_version_changed", path=str(capability.path), known=capability.version, runs=version)
    _heard[capability.path] = version
    forget(capability)


def forget(capability: Capability) -> None:
    """Ask again before the next process is started."""
    for key in [key for key in (*_probed, *_versions) if key[0] == str(capability.path)]:
        _probed.pop(key, None)
        _versions.pop(key, None)


def without(capability: Capability, option: str) -> None:
    """It does not know this option, whatever its --help says: the next process is started without, if that will do."""
    if option == PROMPT_FILE:
        failed(capability, "prompt_file", "it does not know the option")
    if option not in DISPENSABLE:
        return
    key = capability.path, capability.version
    _refused[key] = _refused.get(key, frozenset()) | {option}
    forget(capability)
    log.warning("claude_option_refused", cli=capability.name, option=option)


def read_version(text: str) -> tuple[str, Version] | None:
    """The version as it is written, and in numbers. Two numbers will do."""
    for form in _VERSIONS:
        if (found := form.search(text[:LONGEST_VERSION])) is not None:
            return found[0], (int(found[1]), int(found[2]), int(found[3] or 0))
    return None


async def _asked(key: Identity, binary: Path, env: Mapping[str, str], cwd: Path) -> Capability:
    asked = [_ask(binary, flag, env, cwd) for flag in ("--version", "--help")]
    answers = await asyncio.gather(*asked, return_exceptions=True)  # both are over then
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    version_text, help_text = (str(answer) for answer in answers)
    flags = {flag for found in _FLAG.findall(help_text) for flag in found if flag}
    said = read_version(_heard.get(binary, "")) or read_version(version_text)
    if (said is None or "--print" not in flags) and _ITSELF.search(version_text) is None:
        raise ClaudeUnavailable(
            f"{binary} does not answer like a Claude CLI (--version, --help): {INSTALL}", retry=False
        )
    if "--print" not in flags:
        log.warning("claude_help_not_read", path=str(binary), said=help_text[:200])
        flags |= OPTIONS
    if said is None:
        log.warning("claude_version_not_read", path=str(binary), said=version_text[:200])
        said = UNREAD, NEWER_THAN_ALL
    name, version = said
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
    return _probed.get(_stand_ins.get(key, key), found)


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
