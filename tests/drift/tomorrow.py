"""A CLI of tomorrow: the real one, with one thing changed on the way in or out.

Runs by itself (`cli.ChangingCli` writes the script that calls `main`), with the standard library alone. Frames of
stdout and stdin pass through `Change.said` and `Change.told`. A change of the transcript gives the real CLI a
configuration directory of its own, and keeps there in today's form what the new one keeps in another.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

VERSION = "2.9.0"
Frame = dict[str, Any]


class Change:
    """Nothing but the version is changed. `said` and `told` give what goes on instead of a frame."""

    stores = False  # it keeps transcripts its own way

    def __init__(self) -> None:
        self.cli: Passing

    def argv(self, argv: list[str]) -> list[str]:
        return argv

    def version(self, text: str) -> str:
        return re.sub(r"\d+\.\d+\.\d+", VERSION, text)

    def help(self, text: str) -> str:
        return text

    def begin(self) -> None:
        """Before the real one is started, in a run that takes turns. It may print, and end."""

    def said(self, frame: Frame) -> list[Frame | bytes]:
        return [frame]

    def told(self, frame: Frame) -> list[Frame]:
        return [frame]

    def last(self) -> list[Frame]:
        """What it says before it ends."""
        return []

    # transcripts

    place = staticmethod(lambda path: path)  # where it keeps what today's CLI keeps at this path
    moves_whole = True  # a session that it found where today's CLI keeps it
    late = 0.0  # seconds after which a turn's records are there

    def stored(self, lines: list[Frame]) -> bytes:
        """These lines behind others that are there already."""
        return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)

    def loaded(self, data: bytes) -> list[Frame]:
        return [json.loads(line) for line in data.splitlines() if line.strip()]


class Said(Change):
    def __init__(self, said: Callable[[Frame], list[Frame | bytes]]) -> None:
        self.said = said  # type: ignore[method-assign,assignment]


class Told(Change):
    """`told` gets a frame, and what prints frames in the CLI's place."""

    def __init__(self, told: Callable[[Frame, Callable[[Frame], None]], list[Frame]]) -> None:
        self.told = lambda frame: told(frame, self.cli.print)  # type: ignore[method-assign]


class Asked(Change):
    """What it says to --version and --help; `option` is one that it does not take any more."""

    def __init__(
        self,
        version: Callable[[str], str] | None = None,
        help: Callable[[str], str] | None = None,
        option: str | None = None,
    ) -> None:
        if version is not None:
            self.version = version  # type: ignore[method-assign,assignment]
        if help is not None:
            self.help = help  # type: ignore[method-assign,assignment]
        self._option = option

    def begin(self) -> None:
        if self._option is not None and any(one.split("=")[0] == self._option for one in sys.argv):
            print(f"error: unknown option '{self._option}'", file=sys.stderr, flush=True)
            os._exit(1)


class Begins(Change):
    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin  # type: ignore[method-assign]


class Stored(Change):
    stores = True

    def __init__(
        self,
        *,
        place: Callable[[Path], Path] | None = None,
        stored: Callable[[list[Frame]], bytes] | None = None,
        loaded: Callable[[bytes], list[Frame]] | None = None,
        late: float = 0.0,
        moves_whole: bool = True,
    ) -> None:
        self.late, self.moves_whole = late, moves_whole
        if place is not None:
            self.place = place  # type: ignore[assignment]
        if stored is not None:
            self.stored = stored  # type: ignore[method-assign,assignment]
        if loaded is not None:
            self.loaded = loaded  # type: ignore[method-assign,assignment]


class FullDisk(Stored):
    """It cannot write what is said, and tells so at its end."""

    def __init__(self) -> None:
        super().__init__(stored=lambda _: b"")

    def last(self) -> list[Frame]:
        return [{"type": "system", "subtype": "session_writes_lost", "error_code": "ENOSPC", "lost": ["transcript"]}]


# --- the frames


def every(kind: str, change: Callable[[Frame], Frame | list[Frame | bytes]]) -> Said:
    """Change each frame of this type (`system/init` and its like name the subtype too)."""

    def said(frame: Frame) -> list[Frame | bytes]:
        of = frame.get("type"), f"{frame.get('type')}/{frame.get('subtype')}"
        if kind not in (*of, "*"):
            return [frame]
        changed = change(frame)
        return changed if isinstance(changed, list) else [changed]

    return Said(said)


def renamed(*path: str, to: str) -> Callable[[Frame], Frame]:
    """The field at this path under another name."""

    def change(frame: Frame) -> Frame:
        at: Any = frame
        for name in path[:-1]:
            at = at.get(name) if isinstance(at, dict) else None
        if isinstance(at, dict) and path[-1] in at:
            at[to] = at.pop(path[-1])
        return frame

    return change


def without(*names: str) -> Callable[[Frame], Frame]:
    return lambda frame: {name: value for name, value in frame.items() if name not in names}


def blocks_renamed(frame: Frame) -> Frame:
    """Text blocks are of another type, in assistant frames and in the stream."""
    for block in frame.get("message", {}).get("content") or ():
        if isinstance(block, dict) and block.get("type") == "text":
            block["type"] = "prose"
    return frame


def stream_blocks_renamed(frame: Frame) -> Frame:
    event = frame.get("event", {})
    if event.get("content_block", {}).get("type") == "text":
        event["content_block"]["type"] = "prose"
    if event.get("delta", {}).get("type") == "text_delta":
        event["delta"]["type"] = "prose_delta"
    return frame


def both(*changes: Said) -> Said:
    def said(frame: Frame) -> list[Frame | bytes]:
        frames: list[Frame | bytes] = [frame]
        for change in changes:
            frames = [out for one in frames for out in (change.said(one) if isinstance(one, dict) else [one])]
        return frames

    return Said(said)


def extra(frame: Frame) -> list[Frame | bytes]:
    """New frames around each, new fields in each."""
    more = {"trace": {"span": uuid.uuid4().hex, "depth": [1, {"a": None}]}, "v": 3}
    new = {"type": "telemetry", "subtype": "heartbeat", "message": "soon", "event": 7, "session_id": None}
    return [{**frame, **more}, new, {"type": "system", "subtype": "budget_notice", "uuid": 5}, b"", b"null"]


def twice(frame: Frame) -> list[Frame | bytes]:
    return [frame, frame]


def asks(frame: Frame) -> list[Frame | bytes]:
    """It asks its host something new, and goes on when it has an answer."""
    return [{"type": "control_request", "request_id": "new-1", "request": {"subtype": "host_consent"}}, frame]


class AsksAndWaits(Change):
    """It asks its host for something new before a turn, and takes the prompt when it was answered."""

    def __init__(self) -> None:
        self._held: list[Frame] = []
        self._asked = False

    def told(self, frame: Frame) -> list[Frame]:
        answered = frame.get("type") == "control_response"
        if answered and frame.get("response", {}).get("request_id") == "new-1":
            held, self._held = self._held, []
            self._asked = False
            return held
        if frame.get("type") == "user":
            self._held.append(frame)
            self._asked = True
            self.cli.print({"type": "control_request", "request_id": "new-1", "request": {"subtype": "host_consent"}})
            return []
        return [frame]


class FirstLine(Change):
    """The first frame has a notice glued to it."""

    def __init__(self, notice: bytes, *, first: str | None = None) -> None:
        self._notice, self._first = notice, first

    def said(self, frame: Frame) -> list[Frame | bytes]:
        if self._notice and (self._first is None or frame.get("type") == self._first):
            notice, self._notice = self._notice, b""
            return [notice + json.dumps(frame).encode()]
        return [frame]


class LastBeforeResult(Change):
    """The order is another one: the result comes before the last assistant frame."""

    def __init__(self) -> None:
        self._held: list[Frame | bytes] = []

    def said(self, frame: Frame) -> list[Frame | bytes]:
        if frame.get("type") == "assistant":
            held, self._held = self._held, [frame]
            return held
        if frame.get("type") == "result":
            held, self._held = self._held, []
            return [frame, *held]
        return [frame]


class NoAnswer(Change):
    """It ends with exit code 0 when it is asked, and prints a notice."""

    def told(self, frame: Frame) -> list[Frame]:
        if frame.get("type") == "user":
            print("Please accept the new terms: run `claude` once.", flush=True)
            self.cli.end(0)
        return [frame]


class OneTurn(Change):
    """It ends after each turn."""

    def said(self, frame: Frame) -> list[Frame | bytes]:
        if frame.get("type") == "result":
            threading.Timer(0.05, self.cli.hang_up).start()
        return [frame]


class Updated(Change):
    """An update puts another file in its place in the middle of each turn."""

    def told(self, frame: Frame) -> list[Frame]:
        if frame.get("type") == "user":
            place = Path(sys.argv[0])
            fresh = place.with_name("claude.fresh")
            fresh.write_text(f"{place.read_text()}#\n")
            fresh.chmod(0o755)
            os.replace(fresh, place)
        return [frame]


def control(subtype: str, *, answer: bool) -> Told:
    """It refuses this control request, or never answers it."""

    def told(frame: Frame, say: Callable[[Frame], None]) -> list[Frame]:
        request = frame.get("request", {})
        if frame.get("type") != "control_request" or request.get("subtype") != subtype:
            return [frame]
        if answer:
            error = f"Unsupported control request subtype: {subtype}"
            say(
                {
                    "type": "control_response",
                    "response": {"subtype": "error", "request_id": frame["request_id"], "error": error},
                }
            )
        return []

    return Told(told)


def taken_for_nothing(subtype: str, *, keep: Callable[[Frame], bool] = lambda _: False) -> Told:
    """It says "success" to this control request and does nothing."""

    def told(frame: Frame, say: Callable[[Frame], None]) -> list[Frame]:
        request = frame.get("request", {})
        if frame.get("type") != "control_request" or request.get("subtype") != subtype or keep(request):
            return [frame]
        say(
            {
                "type": "control_response",
                "response": {"subtype": "success", "request_id": frame["request_id"], "response": {}},
            }
        )
        return []

    return Told(told)


def user_frames(change: Callable[[Frame], Frame]) -> Told:
    return Told(lambda frame, _: [change(frame) if frame.get("type") == "user" else frame])


def notice_and_end(text: str, code: int, *, err: bool = False) -> Begins:
    def begin() -> None:
        print(text, file=sys.stderr if err else sys.stdout, flush=True)
        os._exit(code)

    return Begins(begin)


def silent() -> None:
    """It starts, and says nothing, ever."""
    threading.Event().wait()


def noisy() -> None:
    """Long warnings on both streams, before anything else."""
    sys.stderr.write("Warning: deprecated option\n" * 20_000)
    sys.stderr.flush()
    sys.stdout.write("Warning: deprecated option\n" * 20_000)
    sys.stdout.flush()


# --- the transcript


def enveloped(lines: list[Frame]) -> bytes:
    return b"".join(json.dumps({"v": 2, "record": line}).encode() + b"\n" for line in lines)


def opened(data: bytes) -> list[Frame]:
    """Both forms: what an older CLI has left is still read."""
    found = [json.loads(line) for line in data.splitlines() if line.strip()]
    return [line["record"] if "record" in line and "v" in line else line for line in found]


def plain(lines: list[Frame]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def compressed(lines: list[Frame]) -> bytes:
    return gzip.compress(plain(lines)) if lines else b""


def decompressed(data: bytes) -> list[Frame]:
    return Change().loaded(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)


def with_notes(lines: list[Frame]) -> bytes:
    """New types of lines off the chain: without a uuid, and with one on which nothing hangs."""
    out = []
    for line in lines:
        out.append(line)
        if line.get("type") in ("user", "assistant"):
            out.append({"type": "insight", "sessionId": line.get("sessionId"), "text": "a note of tomorrow"})
            name = str(uuid.uuid5(uuid.NAMESPACE_OID, f"leaf {line['uuid']}"))
            out.append({"type": "bookmark", "uuid": name, "parentUuid": line["uuid"], "timestamp": line["timestamp"]})
    return plain(out)


def without_notes(data: bytes) -> list[Frame]:
    return [line for line in Change().loaded(data) if line.get("type") not in ("insight", "bookmark")]


def linked(lines: list[Frame]) -> bytes:
    """A record of a new type between each two of the chain."""
    out = []
    for line in lines:
        above = line.get("parentUuid")
        if line.get("uuid") and above:
            name = str(uuid.uuid5(uuid.NAMESPACE_OID, f"link {line['uuid']}"))
            out.append({"type": "checkpoint", "uuid": name, "parentUuid": above, "timestamp": line["timestamp"]})
            out.append({**line, "parentUuid": name})
        else:
            out.append(line)
    return plain(out)


def unlinked(data: bytes) -> list[Frame]:
    """As today's: what it says may hang on any record of the new type."""
    lines = Change().loaded(data)
    above = {line["uuid"]: line.get("parentUuid") for line in lines if line.get("type") == "checkpoint"}
    kept = [line for line in lines if line.get("type") != "checkpoint"]
    for line in kept:
        while line.get("parentUuid") in above:
            line["parentUuid"] = above[line["parentUuid"]]
    return kept


def other_uuids(lines: list[Frame]) -> list[Frame]:
    """Each record is stored under another uuid than the frames name. Twice, it is the same again."""

    def other(name: str | None) -> str | None:
        return name and name[:24] + name[:23:-1]

    return [
        {**line, "uuid": other(line["uuid"]), "parentUuid": other(line.get("parentUuid"))} if "uuid" in line else line
        for line in lines
    ]


def apart(lines: list[Frame]) -> list[Frame]:
    """No record names the one before it any more."""
    return [
        {**line, "parentUuid": str(uuid.uuid5(uuid.NAMESPACE_OID, line["uuid"]))} if line.get("parentUuid") else line
        for line in lines
    ]


def one_after_another(data: bytes) -> list[Frame]:
    lines, above = Change().loaded(data), None
    for line in lines:
        if "uuid" in line:
            line["parentUuid"], above = above, line["uuid"]
    return lines


def fields_renamed(lines: list[Frame]) -> bytes:
    names = {"uuid": "id", "parentUuid": "parentId"}
    return plain([{names.get(name, name): value for name, value in line.items()} for line in lines])


def fields_as_before(data: bytes) -> list[Frame]:
    names = {"id": "uuid", "parentId": "parentUuid"}
    lines = Change().loaded(data)
    return [
        {names.get(name, name): value for name, value in line.items()} if "parentId" in line else line for line in lines
    ]


def own_folder(path: Path) -> Path:
    return path.parents[2] / "conversations" / path.stem / "events.jsonl"


CONTROL = (
    "initialize", "set_model", "apply_flag_settings", "mcp_set_servers", "claim_session", "interrupt", "get_settings",
    "rewind_conversation",
)  # fmt: skip
CHANGES: dict[str, Callable[[], Change]] = {
    "nothing but the version": Change,
    # frames
    "extra frames and fields": lambda: every("*", extra),
    "every frame twice": lambda: every("*", twice),
    "init without tools": lambda: every("system/init", without("tools")),
    "init: session_id renamed": lambda: every("system/init", renamed("session_id", to="sessionId")),
    "no init": lambda: every("system/init", lambda _: []),
    "assistant: type renamed": lambda: every("assistant", renamed("type", to="kind")),
    "assistant: message renamed": lambda: every("assistant", renamed("message", to="payload")),
    "assistant: content renamed": lambda: every("assistant", renamed("message", "content", to="parts")),
    "assistant: text blocks renamed": lambda: every("assistant", blocks_renamed),
    "text blocks renamed everywhere": lambda: both(
        every("assistant", blocks_renamed), every("stream_event", stream_blocks_renamed)
    ),
    "no assistant frames": lambda: every("assistant", lambda _: []),
    "stream: type renamed": lambda: every("stream_event", renamed("type", to="kind")),
    "stream: event renamed": lambda: every("stream_event", renamed("event", to="data")),
    "stream: deltas renamed": lambda: every("stream_event", renamed("event", "delta", to="change")),
    "stream: text blocks renamed": lambda: every("stream_event", stream_blocks_renamed),
    "no stream events": lambda: every("stream_event", lambda _: []),
    "neither stream nor assistant frames": lambda: both(
        every("assistant", lambda _: []), every("stream_event", lambda _: [])
    ),
    "no frames of words, and no result text": lambda: both(
        every("assistant", lambda _: []), every("stream_event", lambda _: []), every("result", without("result"))
    ),
    "result: type renamed": lambda: every("result", renamed("type", to="kind")),
    "result: another type": lambda: every("result", lambda frame: {**frame, "type": "turn_result"}),
    "result: subtype renamed": lambda: every("result", lambda frame: {**frame, "subtype": "done"}),
    "result: tag of the prompt renamed": lambda: every("result", renamed("user_message_uuids", to="prompt_ids")),
    "result: tag of the prompt is a text": lambda: every(
        "result", lambda frame: {**frame, "user_message_uuids": ",".join(frame.get("user_message_uuids") or ())}
    ),
    "result: session_id renamed": lambda: every("result", renamed("session_id", to="sessionId")),
    "result: text and usage renamed": lambda: every(
        "result", lambda frame: renamed("result", to="text")(renamed("usage", to="tokens")(frame))
    ),
    "result before the last assistant frame": LastBeforeResult,
    "frames in an envelope": lambda: every("*", lambda frame: {"v": 2, "frame": frame}),
    "a notice glued to the first frame": lambda: FirstLine(b"Update available: run `claude update` "),
    "a notice glued to the result": lambda: FirstLine(b"\x1b[33mUsage: 80 %\x1b[0m ", first="result"),
    "a byte order mark and CRLF": lambda: every(
        "*", lambda frame: [b"\xef\xbb\xbf" + json.dumps(frame).encode() + b"\r"]
    ),
    "floods of warnings": lambda: Begins(noisy),
    # control requests
    "apply_flag_settings taken for nothing": lambda: taken_for_nothing("apply_flag_settings"),
    "mcp_set_servers taken for nothing": lambda: taken_for_nothing("mcp_set_servers"),
    "set_model taken for nothing": lambda: taken_for_nothing("set_model"),
    "interrupt taken for nothing": lambda: taken_for_nothing("interrupt"),
    "it asks its host something new": lambda: every("system/init", asks),
    "it asks its host something new, and waits": AsksAndWaits,
    # what it is told
    "the prompt's uuid is not heeded": lambda: user_frames(without("uuid")),
    "client_composed is not heeded": lambda: user_frames(without("client_composed")),
    # --version, --help, options
    "version in other words": lambda: Asked(version=lambda _: "Claude Code (build 2026-12-01, channel stable)\n"),
    "version with two numbers": lambda: Asked(version=lambda _: "Claude Code 3.1\n"),
    "version behind a notice": lambda: Asked(
        version=lambda text: "Update 9.9.9 is available\n" + re.sub(r"\d+\.\d+\.\d+", VERSION, text)
    ),
    "help in other words": lambda: Asked(
        help=lambda text: "Usage: claude [prompt]\n\n" + re.sub(r"^ +(-\w, )?--", "• --", text, flags=re.MULTILINE)
    ),
    "help names no options": lambda: Asked(
        help=lambda _: "Usage: claude [prompt]. See https://docs.example.test/cli\n"
    ),
    "--include-partial-messages is gone": lambda: Asked(option="--include-partial-messages"),
    "--session-id is gone": lambda: Asked(option="--session-id"),
    "--resume is gone": lambda: Asked(option="--resume"),
    "--strict-mcp-config is gone": lambda: Asked(option="--strict-mcp-config"),
    # its life
    "exit 0 without an answer": NoAnswer,
    "it ends after every turn": OneTurn,
    "binary replaced in the middle of a turn": Updated,
    "it refuses to run": lambda: notice_and_end("This version is blocked: run `claude update`.", 1, err=True),
    "it refuses to run, on stdout": lambda: notice_and_end("This version is blocked: run `claude update`.", 0),
    "it says nothing": lambda: Begins(silent),
    # the transcript
    "new types of lines off the chain": lambda: Stored(stored=with_notes, loaded=without_notes),
    "a new type of record on the chain": lambda: Stored(stored=linked, loaded=unlinked),
    "transcript: other names of uuid and parentUuid": lambda: Stored(stored=fields_renamed, loaded=fields_as_before),
    "transcript: uuids that the frames do not have": lambda: Stored(
        stored=lambda lines: plain(other_uuids(lines)), loaded=lambda data: other_uuids(Change().loaded(data))
    ),
    "transcript: records that do not hang together": lambda: Stored(
        stored=lambda lines: plain(apart(lines)), loaded=one_after_another
    ),
    "transcript in an envelope": lambda: Stored(stored=enveloped, loaded=opened),
    "transcript compressed": lambda: Stored(
        place=lambda path: path.with_suffix(".jsonl.gz"), stored=compressed, loaded=decompressed
    ),
    "transcript compressed under the same name": lambda: Stored(stored=compressed, loaded=decompressed),
    "transcript under another name": lambda: Stored(place=lambda path: path.with_name(f"session-{path.name}")),
    "transcript in another folder": lambda: Stored(place=own_folder),
    "transcript in another folder, of the newer turns only": lambda: Stored(place=own_folder, moves_whole=False),
    "transcript half a second late": lambda: Stored(late=0.5),
    "transcript five seconds late": lambda: Stored(late=5.0),
    "no transcript": lambda: Stored(stored=lambda _: b""),
    "no transcript, as the disk is full": FullDisk,
}
for _subtype in CONTROL:
    CHANGES[f"{_subtype} refused"] = partial(control, _subtype, answer=True)
    CHANGES[f"{_subtype} not answered"] = partial(control, _subtype, answer=False)


# --- the pass-through


class Passing:
    """The real CLI, and three threads around it: stdin, stdout, and what is late."""

    def __init__(self, change: Change, binary: str, own: Path) -> None:
        self.change = change
        change.cli = self
        self._argv = [binary, *change.argv(sys.argv[1:])]
        self._own = own
        self._env = dict(os.environ)
        self._config = Path(self._env.get("CLAUDE_CONFIG_DIR", ""))
        self._printing = threading.Lock()
        self._child: subprocess.Popen[bytes]
        self._written: dict[Path, int] = {}  # lines of the real CLI's files that were passed on
        self._storing = threading.Lock()

    # what it prints

    def print(self, frame: Frame | bytes) -> None:
        line = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        with self._printing:
            os.write(1, line + b"\n") if len(line) < 60_000 else self._all(line + b"\n")

    def _all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]

    def end(self, code: int) -> None:
        self._child.kill()
        self._child.wait()
        os._exit(code)

    def hang_up(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()

    def run(self) -> None:
        self.change.begin()
        if self.change.stores:
            self._env["CLAUDE_CONFIG_DIR"] = str(self._own)
            self._load()
        self._child = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._env)
        threading.Thread(target=self._pass_in, daemon=True).start()
        assert self._child.stdout is not None
        for line in self._child.stdout:
            try:
                frame = json.loads(line)
            except ValueError:
                self.print(line.rstrip(b"\n"))
                continue
            if self.change.stores and not self.change.late:
                self._store()
            elif self.change.late and frame.get("type") == "result":
                threading.Timer(self.change.late, self._store).start()
            if "claude_code_version" in frame:
                frame["claude_code_version"] = VERSION
            for out in self.change.said(frame):
                self.print(out)
        code = self._child.wait()
        if self.change.stores:
            self._store()
        for frame in self.change.last():
            self.print(frame)
        os._exit(code if code >= 0 else 128 - code)

    def _pass_in(self) -> None:
        into: IO[bytes] | None = self._child.stdin
        assert into is not None
        try:
            for line in sys.stdin.buffer:
                for frame in self.change.told(json.loads(line)):
                    into.write(json.dumps(frame).encode() + b"\n")
                    into.flush()
            into.close()
        except (BrokenPipeError, ValueError):  # it has ended
            pass

    # transcripts

    def _named(self, *options: str) -> str | None:
        """The session that its arguments name."""
        given = (one.split("=", 1) for one in sys.argv if "=" in one)
        return next((value for name, value in given if name in options), None)

    def _load(self) -> None:
        """What is stored of the session to resume, in the form that the real CLI reads."""
        named = self._named("--resume")
        if named is None:
            return
        folder = re.sub(r"[^a-zA-Z0-9]", "-", os.path.realpath(os.getcwd()))
        usual = self._config / "projects" / folder / f"{named}.jsonl"
        real = self._own / "projects" / folder / usual.name
        found = next((path for path in (self.change.place(usual), usual) if path.is_file()), None)
        real.unlink(missing_ok=True)
        if found is None:
            return
        lines = self.change.loaded(found.read_bytes())
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(plain(lines))
        # What it reads from where today's CLI keeps it goes on, as a whole, where it keeps it itself.
        whole = self.change.moves_whole and found != self.change.place(usual)
        self._written[real] = 0 if whole else len(lines)

    def _store(self) -> None:
        with self._storing:
            for real in (self._own / "projects").glob(f"*/{self._named('--resume', '--session-id')}.jsonl"):
                data = real.read_bytes()
                lines = Change().loaded(data[: data.rfind(b"\n") + 1])
                done = self._written.get(real, 0)
                place = self.change.place(self._config / real.relative_to(self._own))
                more = self.change.stored(lines[done:])
                if more:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with open(place, "ab") as file:
                        file.write(more)
                self._written[real] = len(lines)


def main(name: str, binary: str, own: str) -> None:
    change = CHANGES[name]()
    asked = [one for one in ("--version", "--help") if one in sys.argv]
    if asked:
        said = subprocess.run([binary, asked[0]], capture_output=True, text=True, check=True).stdout
        print(change.version(said) if asked == ["--version"] else change.help(said), end="", flush=True)
        return
    if "-p" not in sys.argv:
        os.execv(binary, [binary, *sys.argv[1:]])
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Passing(change, binary, Path(own)).run()
