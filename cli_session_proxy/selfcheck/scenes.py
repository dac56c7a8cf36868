"""The scenes that the self-check plays with a CLI. Each step notes an observation.

The scenes run the code of production: its processes, its transcript writer and its transcript reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import AF_UNIX

import psutil

from turnfault.provider.script import Fail, HeldReply, Reply, ToolUse
from turnfault.provider.seen import Seen

from ..backends.base import Called
from ..backends.claude import transcript
from ..backends.claude.process.capability import PROMPT_FILE
from ..backends.claude.process.child import Launch
from ..backends.claude.process.events import PermissionRequest
from ..backends.claude.process.observed import Name, Observation
from ..backends.claude.process.parameters import EXTRA_BODY, MAX_TOKENS
from ..backends.claude.process.process import ClaudeProcess
from ..backends.claude.sessions.composing import closing_record
from ..backends.claude.transcript import Entry, Scribe, files
from ..domain.approvals import Verdict
from ..domain.client_tools import Offers, ToolPolicy, cli_name
from ..domain.models import JSON, Block, FileMark, Message, Record, Tool, ToolChoice
from ..errors import ClaudeUnavailable
from ..settings import Profile
from .stage import (
    LATE,
    MODEL,
    SYSTEM,
    Differs,
    Stage,
    StageTurn,
    Texts,
    Unable,
    difference,
    texts_in,
    texts_of,
    texts_of_path,
    until,
)

# All prompts are unique, so that a request can be recognised by its prompt.
#
# The first turn: its prompt, and the text and the thinking of the answer.
FIRST, ANSWER, THOUGHT = "check-first", "The colour is check-teal.", "They want check-teal."
# A transcript that we write: its prompt, which has an image beside it, and the next turn's prompt. A second one: its
# prompt. It ends with a call of the client's tool and the result.
SHOWN, WRITTEN, LOOKED_UP = "check-shown", "check-written", "check-looked-up"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE: Block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
OFFERS = Offers.of((Tool("lookup", "Looks a word up.", {"properties": {"word": {"type": "string"}}}),))
CALL: Block = {"type": "tool_use", "id": "toolu_check", "name": cli_name("lookup"), "input": {"word": "teal"}}
RESULT_TEXT = "check-found"
# Compaction: the prompt whose answer reports a full context, the next prompt, the summary, and a text in the CLI's
# request for a summary.
FILLED, COMPACTED, SUMMARY, ASKS_FOR_SUMMARY = "check-filled", "check-compacted", "check-summary", "detailed summary"
FULL = {"input_tokens": 990_000}
# A prompt whose request the provider refuses because of a thinking block, and the provider's message.
SEALED, REFUSED = "check-sealed", "messages.1.content.0: Invalid `signature` in `thinking` block"
# Requests to a running process. Another system prompt; limits of the model; the client's tools; a prompt beside an
# image; prompts that the CLI must not take for commands, and the file that one names; an interrupted turn and the
# next one; a turn that is taken back and the one in its place.
OPENING, AGAIN, ANOTHER_SYSTEM = "check-opening", "check-again", "You are being checked anew."
LIMITED, UNLIMITED, STOP_AT, TOKENS = "check-limited", "check-unlimited", "check-stop", 1234
TOOLS, BESIDE_IMAGE = "check-tools", "check-beside"
SECRET, SECRET_FILE = "check-secret", "secret.txt"
LIKE_COMMANDS = ("/clear", f"read @{SECRET_FILE}")
STOPPED, FOLLOWED, TAKEN_BACK, INSTEAD = "check-stopped", "check-followed", "check-taken-back", "check-instead"
# A resumed session; a process that was started before its session was known; approvals; a login instead of a key.
RESUMED, CLAIMED = "check-resumed", "check-ahead"
FORBIDDEN, ALLOWED, REASON = "check-forbidden", "check-allowed", "check-reason"
LOGGED_IN, LOGIN = "check-logged-in", "sk-ant-oat01-fake-selfcheck"
# Seconds: a transcript of this check is not older.
OLDEST = 60.0


@dataclass(slots=True)
class SceneTalk:
    """The conversation of one session, as the next request to the model should show it."""

    session_id: str
    texts: Texts = field(default_factory=list)
    turns: list[str] = field(default_factory=list)  # the uuids of its prompts
    records: list[Record] = field(default_factory=list)
    request: Seen | None = None

    async def turn(self, stage: Stage, process: ClaudeProcess, prompt: str, *beside: Block) -> StageTurn:
        """Run one more turn. Raises `Differs` unless the request showed the conversation so far and this prompt."""
        blocks = [*beside, _text(prompt)]
        turn = await stage.turn(process, blocks)
        shown = texts_in(turn.request)
        if (wrong := difference([*self.texts, *texts_of("user", blocks)], shown)) is not None:
            raise Differs(f"the model was shown something else: {wrong}")
        self.add_turn(turn)
        return turn

    def add_turn(self, turn: StageTurn) -> None:
        self.request = turn.request
        self.turns.append(turn.uuid)
        self.texts = [*texts_in(turn.request), *texts_of("assistant", turn.blocks)]


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


async def play(stage: Stage) -> None:
    """Play all scenes, one after another; no two CLIs run at once. Stop if the first turn fails."""
    first = await _first(stage)
    if first is None and PROMPT_FILE in stage.found["start"].detail:
        first = await _first_without(stage, "start", "prompt_file", "it starts without this option, and not with it")
    if first is None:
        why = "other frames name the prompt, and its result does not"
        first = await _first_without(stage, "frames", "tag", why)
    if first is None or stage.found["place"].outcome != "ok":
        return
    await _round_trip(stage, first)
    await _continues_from_results(stage, first)
    last = await _running(stage)
    await _resumed(stage, last or first)
    await _claimed(stage)
    await _approvals(stage)
    await _logged_in(stage)


# --- the first turn of a session, with the options that the CLI's version should have


async def _first_without(stage: Stage, failed: Name, without: Name, why: str) -> SceneTalk | None:
    """If the first turn failed at `failed`, repeat it without the feature `without`. None unless it succeeds."""
    if failed not in stage.found or stage.found[failed].outcome != "failed":
        return None
    before, cli, hopeful = dict(stage.found), stage.cli, stage.hopeful
    del stage.found[failed]
    stage.take(without, "failed")
    first = await _first(stage)
    if first is None:
        stage.found, stage.cli, stage.hopeful = before, cli, hopeful
    else:
        stage.found[without] = Observation.of(without, "failed", why)
    return first


async def _first(stage: Stage) -> SceneTalk | None:
    """Run the first turn. None if the CLI did not finish it."""
    launch = stage.launch(stage.cli)
    first: SceneTalk | None = None
    async with stage.observing("start"), stage.running(launch) as process:
        async with stage.observing("frames"):
            stage.upstream.when(FIRST, Reply(ANSWER, thinking=THOUGHT))
            try:
                turn = await stage.turn(process, FIRST)
            except ClaudeUnavailable as exc:
                stage.note("tools_off", "failed", exc.message)
                raise Unable("it was not used any further") from exc
            for how, text in {
                "in pieces": turn.streamed(), "in blocks": turn.text(), "in the result": turn.result.text
            }.items():  # fmt: skip
                if text != ANSWER:
                    raise Differs(f"the answer {how} is {text!r}, and the model said {ANSWER!r}")
            if (thought := turn.text("thinking")) != THOUGHT:
                raise Differs(f"the thought is {thought!r}, and the model thought {THOUGHT!r}")
            first = SceneTalk(launch.session_id)
            first.add_turn(turn)
        if first is None and process.runs is None:
            frames = stage.found.pop("frames")
            raise (Differs if frames.outcome == "failed" else Unable)(frames.detail)
        if first is not None:
            await _observe_file(stage, first, launch)
            async with stage.observing("prompt_file"):
                if not stage.cli.does("prompt_file"):
                    raise Unable("it was given on the command line")
                if SYSTEM not in json.dumps(turn.request.body.get("system")):
                    raise Differs("the system prompt of the file did not reach the model")
            stage.note("tag", "ok" if turn.result.names_prompt else "failed", "its result names no prompt")
            async with stage.observing("tools_off"):
                if offered := turn.request.body.get("tools"):
                    raise Differs(f"the model was offered {', '.join(str(tool.get('name')) for tool in offered)}")
    return first


async def _observe_file(stage: Stage, first: SceneTalk, launch: Launch) -> None:
    """Read the transcript file when the result arrives, and again if it is written later."""

    def place() -> Path:
        return stage.projects.written(launch.cwd, stage.transcript_of(launch), time.time() - OLDEST)

    at_once = _is_whole(path := place())
    async with stage.observing("place"):
        if await until(lambda: place().exists(), LATE) is None:
            wrote = ", ".join(stage.written()) or "nothing"
            raise Differs(f"there is no {path.relative_to(stage.config_dir)}; it wrote {wrote}")
    if stage.found["place"].outcome != "ok":
        return
    path = place()
    late = await until(lambda: _is_whole(path), LATE)
    async with stage.observing("records"):
        parsed = transcript.parse(path.read_bytes())
        if parsed.broken:
            raise Differs(f"{parsed.broken} lines are no records")
        _check_parents(parsed.path, None)
        texts = [pair for pair in texts_of_path(parsed.path) if not pair[1].startswith("thinking")]
        if (wrong := difference([("user", f"text {FIRST}"), ("assistant", f"text {ANSWER}")], texts)) is not None:
            kinds = ", ".join(sorted({entry.kind for entry in parsed.entries}))
            raise Differs(f"in the records, {wrong}; their kinds: {kinds}")
        first.records = [entry.record() for entry in parsed.entries]
    if late is not None:
        stage.note("complete", "ok" if at_once else "failed", f"it was whole {late:.2f} s later")


def _is_whole(path: Path) -> bool:
    texts = _texts_in_file(path)
    return ("user", f"text {FIRST}") in texts and ("assistant", f"text {ANSWER}") in texts


def _texts_in_file(path: Path) -> Texts:
    """Empty if the file does not exist (yet)."""
    try:
        return texts_of_path(transcript.parse(path.read_bytes()).path)
    except OSError:
        return []


def _check_parents(path: Sequence[Entry], start: str | None) -> None:
    if not transcript.unbroken(path, start):
        parents = [f"{entry.kind} {(entry.uuid or '')[:8]} on {(entry.parent or 'none')[:8]}" for entry in path]
        raise Differs(f"the records do not hang on each other: {', '.join(parents)}")


# --- a transcript that we wrote


async def _round_trip(stage: Stage, first: SceneTalk) -> None:
    """Write records of several blocks. If that fails, write one block per record, as production then does."""
    stage.take("whole_records", "ok")
    await _trip(stage, first)
    whole = stage.found["round_trip"]
    if whole.outcome == "failed":
        del stage.found["round_trip"]
        stage.take("whole_records", "failed")
        await _trip(stage, first)
    if stage.found["round_trip"].outcome == "ok":
        stage.note("whole_records", whole.outcome, whole.detail)


async def _trip(stage: Stage, first: SceneTalk) -> None:
    """Write all kinds of blocks into the file of a new session, and check that the model is shown them."""
    launch = stage.launch(stage.cli, resume=True)
    async with stage.observing("round_trip"):
        records = _written_records(stage, first, launch)
        path = stage.transcript_of(launch)
        before = _write(stage, launch, records)
        known = transcript.parse_records(records).path
        async with stage.running(launch) as process:
            await stage.bounded(process, process.loaded(_nothing))
            turn = await stage.turn(process, WRITTEN)
            expected = [*texts_of_path(known), ("user", f"text {WRITTEN}")]
            if (wrong := difference(expected, texts_in(turn.request))) is not None:
                raise Differs(f"a transcript that was written does not reach the model as it is: {wrong}")
            if first.records and first.request is not None and turn.request.prefix_kept(first.request) < 1.0:
                raise Differs("the request does not begin with that of the turn before it, byte for byte")
            answered = turn.result.session_id
            stage.note("same_id", "ok" if answered == launch.session_id else "failed", f"it answered as {answered}")
            await _check_appended(stage, path, before, known, turn)
            await _compacted(stage, process)
            await _healed(stage, process)


async def _nothing() -> None:
    """Read the file after the turn has ended."""


def _written_records(stage: Stage, first: SceneTalk, launch: Launch) -> list[Record]:
    """The first turn as the CLI recorded it, and an invented exchange with an image and a tool call."""
    parsed = transcript.parse_records(first.records)
    at = time.time()
    scribe = Scribe(launch.session_id, launch.cwd, stage.cli.version, at, parsed.leaf)

    result: Block = {"type": "tool_result", "tool_use_id": CALL["id"], "content": RESULT_TEXT}
    exchange = [
        Message("user", (IMAGE, _text(SHOWN))),
        Message("assistant", (_text("I look it up."), CALL)),
        Message("user", (result,)),
        Message("assistant", (_text(f"It is {RESULT_TEXT}."),)),
    ]
    records = list(first.records)
    for message in exchange:
        scribe.at = at  # all at one time
        records.append(scribe.record(message, MODEL))
    return records


def _write(stage: Stage, launch: Launch, records: Sequence[Record]) -> FileMark:
    path = stage.transcript_of(launch)
    return transcript.write(path, records, launch.session_id, form=stage.cli.form)


async def _check_appended(stage: Stage, path: Path, before: FileMark, known: Sequence[Entry], turn: StageTurn) -> None:
    """Raises `Differs` unless the file holds the records that we wrote, followed by the new turn."""
    after = files.in_folder(path.parent, turn.result.session_id)
    answer = ("assistant", f"text {turn.text()}")

    def added() -> list[Entry]:
        if after == path:
            verdict = transcript.check(path, before, None)
            return [] if verdict is None else list(verdict.tail)
        try:
            copy = transcript.parse(after.read_bytes()).path
        except OSError:
            return []
        end = transcript.end_of_copy(known, copy)
        if stage.cli.form.whole_records and not {entry.uuid for entry in known} <= {entry.uuid for entry in copy}:
            return []
        return [] if end is None else copy[end:]

    if await until(lambda: answer in texts_of_path(added()), LATE) is None:
        raise Differs(f"the file was not only appended to: {texts_of_path(added()) or ', '.join(stage.written())}")
    if after == path:
        _check_parents(added(), before.leaf)


async def _compacted(stage: Stage, process: ClaudeProcess) -> None:
    """The provider reports a full context, so the CLI must ask for a summary before its next turn."""
    async with stage.observing("keeps_prompt"):
        stage.upstream.when(FILLED, Reply(usage=FULL))
        stage.upstream.when(ASKS_FOR_SUMMARY, Reply(f"<summary>{SUMMARY}</summary>"))
        stage.upstream.when(COMPACTED, Reply(thinking=THOUGHT))
        await stage.turn(process, FILLED)
        shown = texts_in((await stage.turn(process, COMPACTED)).request)
        if SUMMARY not in str(shown):
            raise Unable("the CLI did not compact")
        if shown[-1] != ("user", f"text {COMPACTED}"):
            raise Differs(f"after a summary, the model was not shown the turn's prompt: {shown[-1:]}")


async def _healed(stage: Stage, process: ClaudeProcess) -> None:
    """The provider refuses a thinking block of the previous turn."""
    async with stage.observing("heals_thinking"):
        stage.upstream.when(SEALED, Fail(400, message=REFUSED))
        turn = await stage.turn(process, SEALED, may_fail=True)
        again, refused = texts_in(turn.request), texts_in(turn.requests[0])
        left = [pair for pair in refused if not pair[1].startswith("thinking")]
        if left == refused:
            raise Unable("it sent no thought")
        if turn.result.is_error:
            raise Differs(f"a turn ended as {turn.result.subtype}: {turn.result.text}")
        if (wrong := difference(left, again)) is not None:
            raise Differs(f"it did not ask again for the same without thoughts: {wrong}")


async def _continues_from_results(stage: Stage, first: SceneTalk) -> None:
    """A new process, which did not make the tool call, continues from the result of the call."""
    launch = stage.launch(stage.hopeful, resume=True)
    async with stage.observing("mcp_set_servers", part=True):
        turn_uuid = str(uuid.uuid4())
        parsed = transcript.parse_records(first.records)
        scribe = Scribe(launch.session_id, launch.cwd, stage.cli.version, time.time(), parsed.leaf)
        result: Block = {"type": "tool_result", "tool_use_id": CALL["id"], "content": RESULT_TEXT}
        exchange = [
            scribe.record(Message("user", (_text(LOOKED_UP),)), MODEL),
            scribe.record(Message("assistant", (CALL,)), MODEL),
            scribe.record(Message("user", (result,)), MODEL),
        ]
        known = [*first.records, *exchange]
        _write(stage, launch, [*known, closing_record(scribe, turn_uuid)])
        async with stage.running(launch) as process:
            if not await stage.bounded(process, process.adapt(replace(launch, offers=OFFERS))):
                raise Differs("it did not take the client's tools")
            turn = await stage.turn(process, (), frame_uuid=turn_uuid)
            expected = texts_of_path(transcript.parse_records(known).path)
            if (wrong := difference(expected, texts_in(turn.request))) is not None:
                raise Differs(f"a process that was started again does not go on from the results: {wrong}")


# --- requests to a running process; each is tried, whatever the version

Step = Callable[[Stage, SceneTalk, ClaudeProcess], Awaitable[object]]


async def _running(stage: Stage) -> SceneTalk | None:
    """Run each step on a process that passed the previous step. Returns the conversation of the last process."""
    steps: list[tuple[Name, Step]] = [
        ("set_model", _set_model), ("apply_flag_settings", _parameters), ("mcp_set_servers", _tools),
        ("blocks", lambda stage, talk, process: talk.turn(stage, process, BESIDE_IMAGE, IMAGE)),
        ("words", _like_commands), ("interrupt", _interrupted), ("rewind_conversation", _rewound),
        ("no_inbox", _no_inbox),
    ]  # fmt: skip
    steps = [step for step in steps if step[0] not in stage.found]
    talk = None
    while steps:
        launch = stage.launch(stage.hopeful)
        async with stage.observing(*(name for name, _ in steps), part=True), stage.running(launch) as process:
            talk = SceneTalk(launch.session_id)
            await talk.turn(stage, process, OPENING)
            while steps and process.usable:
                name, step = steps.pop(0)
                async with stage.observing(name, part=name == "rewind_conversation"):
                    await step(stage, talk, process)
                if name in stage.found and stage.found[name].outcome != "ok":
                    break  # the next steps may depend on it
        if talk is None or not talk.turns:
            return None
    return talk


async def _set_model(stage: Stage, talk: SceneTalk, process: ClaudeProcess) -> None:
    ours = process.launch
    for system, other, prompt in ((ANOTHER_SYSTEM, SYSTEM, AGAIN), (SYSTEM, ANOTHER_SYSTEM, f"{AGAIN} as before")):
        if not await stage.bounded(process, process.adapt(replace(ours, system_prompt=system))):
            raise Differs("it did not take another system prompt")
        turn = await talk.turn(stage, process, prompt)
        texts = [str(block.get("text")).strip() for block in turn.request.body.get("system") or ()]
        if system not in texts or other in texts:
            raise Differs("it said that it took another system prompt, and the next request did not have it")


async def _parameters(stage: Stage, talk: SceneTalk, process: ClaudeProcess) -> None:
    env = {MAX_TOKENS: str(TOKENS), EXTRA_BODY: json.dumps({"stop_sequences": [STOP_AT]})}
    for variables, prompt in ((env, LIMITED), ({}, UNLIMITED)):
        await stage.bounded(process, process.set_env(variables))
        turn = await talk.turn(stage, process, prompt)
        got = turn.request.body.get("max_tokens"), turn.request.body.get("stop_sequences")
        if (got == (TOKENS, [STOP_AT])) != bool(variables):
            raise Differs(f"it was told {variables or 'to reset'}, and the next request had {got[0]} tokens, {got[1]}")


async def _tools(stage: Stage, talk: SceneTalk, process: ClaudeProcess) -> None:
    ours = process.launch
    if not await stage.bounded(process, process.adapt(replace(ours, offers=OFFERS))):
        raise Differs("it did not take the client's tools")
    stage.upstream.when(TOOLS, ToolUse([(str(CALL["name"]), CALL["input"])]))
    policy = ToolPolicy(OFFERS, ToolChoice(), _unchecked)
    calling = await stage.turn(process, TOOLS, policy=policy)
    offered = [tool.get("name") for tool in calling.request.body.get("tools") or ()]
    if CALL["name"] not in offered:
        raise Differs(f"it took the client's tools, and the model was offered {offered or 'none'}")
    called = calling.events[-1] if calling.events else None
    if not isinstance(called, Called):
        raise Differs("the model called a tool of the client, and the call did not come out")
    result: JSON = {"content": [{"type": "text", "text": RESULT_TEXT}], "isError": False}
    brought = {str(call["id"]): result for call in called.calls}
    turn = await stage.turn(process, (), policy=policy, results=brought)
    if texts_in(turn.request)[-1:] != [("user", f"tool_result {next(iter(brought))} {RESULT_TEXT}")]:
        raise Differs(f"the result of a tool did not reach the model: {texts_in(turn.request)[-1:]}")
    talk.add_turn(StageTurn(calling.uuid, turn.events, turn.requests))
    if not await stage.bounded(process, process.adapt(replace(ours, offers=Offers()))):
        raise Differs("it did not give the client's tools up again")


async def _unchecked(_arguments: object, _schema: JSON) -> str | None:
    """The tool is declared without `strict`."""
    return None


async def _like_commands(stage: Stage, talk: SceneTalk, process: ClaudeProcess) -> None:
    (process.cwd / SECRET_FILE).write_text(SECRET)
    for prompt in LIKE_COMMANDS:
        turn = await talk.turn(stage, process, prompt)
        if SECRET in turn.request.raw.decode():
            raise Differs("a file that a prompt named went to the model")


async def _interrupted(stage: Stage, talk: SceneTalk, process: ClaudeProcess) -> None:
    gate = HeldReply(after=1, reply=Reply("This answer is long, and does not come to its end."))
    stage.upstream.when(STOPPED, gate)
    running = asyncio.create_task(stage.turn(process, STOPPED, may_fail=True))
    try:
        await stage.bounded(process, gate.reached.wait())
        await process.interrupt()
        await running
    finally:
        gate.open()
        running.cancel()
        await asyncio.wait({running})
    turn = await stage.turn(process, FOLLOWED)
    shown = texts_in(turn.request)
    if difference(talk.texts, shown[: len(talk.texts)]) is not None or shown[-1] != ("user", f"text {FOLLOWED}"):
        raise Differs("the turn after an interrupted one did not go on from the ones before it")
    talk.add_turn(turn)


async def _rewound(stage: Stage, talk: SceneTalk, process: ClaudeProcess) -> None:
    before = list(talk.texts), list(talk.turns)
    await talk.turn(stage, process, TAKEN_BACK)
    await talk.turn(stage, process, f"{TAKEN_BACK} too")
    to, newest = talk.turns[-2:]
    if not await stage.bounded(process, process.rewind(to, newest)):
        raise Differs("it did not take the conversation back")
    talk.texts, talk.turns = before
    await talk.turn(stage, process, INSTEAD)


async def _no_inbox(_stage: Stage, _talk: SceneTalk, process: ClaudeProcess) -> None:
    """Neither the process nor a descendant listens on a socket, where another agent's CLI could speak to it."""
    sockets = []
    try:
        started = psutil.Process(process.pid)
        for one in (started, *started.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                sockets += one.net_connections("all")
    # It has ended, this user may not see them, or any program's socket has a name that psutil cannot read.
    except (psutil.Error, RuntimeError, ValueError) as exc:
        raise Unable(f"its sockets cannot be seen ({exc})") from exc
    for socket in sockets:
        if socket.status == psutil.CONN_LISTEN or (socket.family == AF_UNIX and socket.laddr):
            raise Differs(f"other agents' CLIs can speak to it: it listens at {socket.laddr}")


# --- a new process for an existing session, and one that was started without a session


async def _resumed(stage: Stage, talk: SceneTalk) -> None:
    """A resumed CLI answers `initialize` once it has read its session: later changes of the file have no effect."""
    launch = stage.launch(stage.hopeful, session_id=talk.session_id, resume=True)
    rewound = any(text.endswith(INSTEAD) for _, text in talk.texts)
    file = stage.transcript_of(launch)
    # The CLI may write the last answer late.
    await until(lambda: talk.texts[-1] in _texts_in_file(file), LATE)
    async with stage.observing("initialize"), stage.running(launch) as process:
        if not await stage.bounded(process, process.boot()):
            raise Differs("it did not answer `initialize`")
        file.unlink(missing_ok=True)
        turn = await stage.turn(process, RESUMED)
        wrong = difference([*talk.texts, ("user", f"text {RESUMED}")], texts_in(turn.request))
        async with stage.observing(*(("rewind_conversation",) if rewound else ())):
            if wrong is not None and TAKEN_BACK in str(texts_in(turn.request)):
                raise Differs(f"what was taken back comes again when the session is resumed: {wrong}")
        if wrong is not None and TAKEN_BACK not in str(texts_in(turn.request)):
            raise Differs(f"it had not read its session when it answered `initialize`: {wrong}")


async def _claimed(stage: Stage) -> None:
    launch = replace(stage.launch(stage.hopeful, "claimed"), system_prompt=ANOTHER_SYSTEM)
    waiting = stage.launch(stage.hopeful, "ahead")
    spare = waiting.spare(waiting.cwd, Path(dict(waiting.env)["TMPDIR"]))
    async with stage.observing("claim_session"), stage.running(spare) as process:
        if not await stage.bounded(process, process.boot()):
            raise Differs("it does not start without a session")
        if not await stage.bounded(process, process.claim(launch)):
            raise Differs("it did not take a session")
        talk = SceneTalk(process.session_id)
        turn = await talk.turn(stage, process, CLAIMED)
        if ANOTHER_SYSTEM not in json.dumps(turn.request.body.get("system")):
            raise Differs("it took a session, and the next request did not have its system prompt")
        path, since = stage.transcript_of(process.launch), time.time() - OLDEST
        if await until(lambda: stage.projects.written(process.cwd, path, since).exists(), LATE) is None:
            raise Differs(f"it took a session, and wrote {', '.join(stage.written())}")


# --- a tool that waits for a person


async def _approvals(stage: Stage) -> None:
    """The CLI asks although its mode would let it write, does nothing when denied, and writes when allowed."""
    profile = Profile(tools=("Write",), approve=("Write",), permission_mode="acceptEdits")
    launch = replace(stage.launch(stage.hopeful, "asked"), profile=profile)
    async with stage.observing("can_use_tool"), stage.running(launch) as process:
        for prompt, verdict in (
            (FORBIDDEN, Verdict("denied", "check", REASON)),
            (ALLOWED, Verdict("allowed", "check")),
        ):
            file = launch.cwd / prompt
            stage.upstream.when(prompt, ToolUse([("Write", {"file_path": str(file), "content": prompt})]))
            turn = await stage.turn(process, prompt, verdict=verdict)
            if [event.tool for event in turn.events if isinstance(event, PermissionRequest)] != ["Write"]:
                raise Differs("it did not ask once before it wrote a file")
            if file.exists() != verdict.allows:
                raise Differs(
                    f"the answer was {verdict.outcome}, and it {'wrote' if file.exists() else 'did not write'}"
                )
            if not verdict.allows and REASON not in str(texts_in(turn.request)[-1:]):
                raise Differs(f"the model was not told why: {texts_in(turn.request)[-1:]}")


# --- a login instead of a key


async def _logged_in(stage: Stage) -> None:
    launch = stage.launch(stage.cli, "logged-in")
    env = {**dict(launch.env), "CLAUDE_CODE_OAUTH_TOKEN": LOGIN}
    del env["ANTHROPIC_API_KEY"]
    launch = replace(launch, env=tuple(sorted(env.items())))
    async with stage.observing("login"), stage.running(launch) as process:
        turn = await stage.turn(process, LOGGED_IN)
        if turn.request.headers.get("authorization") != f"Bearer {LOGIN}":
            raise Differs("the request did not carry the login")
