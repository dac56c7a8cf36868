"""One CLI process: start, turns one at a time, and end.

- Its output is read all the time, with or without a listener (see `frames.Output`).
- A turn may stop at calls of the client's tools: then the process is `waiting` for their results.
- A turn that its consumer abandons makes the process unusable (`usable` is False): the rest of its output belongs to
that turn, and must not become the answer to another.
- `close` returns when the process and its group are dead and reaped: only then may its transcript be touched.

Not its business: time limits of a turn, the content of a session.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .... import logs, redact
from ....domain.approvals import Verdict
from ....domain.client_tools import Offers, ToolPolicy, error_result
from ....domain.limits import size_of
from ....domain.models import JSON, NO_USAGE, Block, Usage
from ....errors import ClaudeUnavailable
from ....settings import Settings
from ...base import Activity, Called, PermissionWithdrawn
from . import capability, frames, permissions
from .child import AT_WORK, Child, Launch, check_tools
from .events import CallRefused, CliEvent, Declined, PermissionRequest, ProcessDied, Result
from .frames import A_VALUE, FRAMES, READ_SIZE, STDERR_TAIL, End, Output, printable
from .guardian import Guardian
from .observed import NAMES
from .tool_server import ToolServer, not_taken, offer
from .turn_reader import TurnReader, calls_in, told_in

# Timeouts in seconds. A CLI answers a control request in milliseconds, prints something some milliseconds after its
# prompt, and its result within 50 ms after the model's last word (2.1.330). With the start of a process, a client gets
# an error within 15 s.
ANSWER_WAIT = 10.0
SILENCE = 10.0
LOOK = 0.5  # seconds over which its processor use is measured
INTERRUPT_WAIT = 5.0
STOP_WAIT = 1.0  # for an abandoned turn to end; a new process takes as long
NOT_STOPPED = f"it did not end a turn within {INTERRUPT_WAIT:g} s when it was told to"

# Characters of the messages in a turn's frames that are kept until its end, each value counted as `A_VALUE`.
MOST_TOLD = 160 * 1024 * 1024

# Control requests that a CLI may refuse for good reasons.
MAY_REFUSE = frozenset({"set_model"})

NO_CONVERSATION = "No conversation found"
NO_COMPACTION = "DISABLE_AUTO_COMPACT"

__all__ = ["ClaudeProcess", "Launch"]

log = logs.get(__name__)


class ClaudeProcess:
    """A running CLI, made by `spawn`. `pid` and `start_time` together identify it even if the pid is reused."""

    def __init__(
        self,
        launch: Launch,
        settings: Settings,
        child: Child,
        output: Output,
        ended: Callable[[], None],
    ) -> None:
        self.launch = launch
        self.pid = child.pid
        self.start_time = child.start_time
        self.session_id = launch.session_id
        self.last_used = time.monotonic()
        self.busy = False
        self._settings = settings
        self._child = child
        self._spoiled = False
        self._requests = 0
        self._tools = ToolServer()
        self._reader: TurnReader | None = None  # of the running or waiting turn
        self._names_first = False  # in an earlier turn the answer began after its prompt had been named
        self._model: str | None = None  # the model's id, as the process reports it
        self.runs: str | None = None  # the version that it reports
        self._checked: object = None  # the checked tools of its last `init` frame
        # Of the last turn, if the process is confined: the messages in its frames; None: too many.
        self.told: list[JSON] | None = []
        self._told_size = 0
        self.env_set: Mapping[str, str] = {}  # variables changed by `set_env`
        self._closing: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None  # the timeout of an expected output
        self._waited_in_vain = False
        self._stopping: asyncio.TimerHandle | None = None  # the timeout of an interrupted turn
        self._unconfirmed: Callable[[], Awaitable[None]] | None = None
        self._open_requests: dict[str, PermissionRequest] = {}  # of permission, by id
        self._output = output
        output.begin(child.stderr, asked=self._serve, broken=self.kill, ended=ended)

    @classmethod
    async def spawn(
        cls, launch: Launch, settings: Settings, guardian: Guardian, ended: Callable[[], None] = lambda: None
    ) -> ClaudeProcess:
        """Raises ClaudeUnavailable (cannot be started), SandboxError (no such cwd), InvalidRequest (too large).

        `ended` is called at the end of its output.
        """
        output = Output()
        process = cls(launch, settings, await Child.start(launch, guardian, output, READ_SIZE), output, ended)
        try:
            if not await process._offer(launch.offers):
                raise await process._death()
        except BaseException:
            process.kill()
            await process.close()
            raise
        return process

    @property
    def alive(self) -> bool:
        return self._child.process.returncode is None and not self._output.ended

    @property
    def started(self) -> asyncio.Event:
        """Set when its first output has come, or never will."""
        return self._output.started

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done when its output has ended."""
        return self._output.at_end

    @property
    def usable(self) -> bool:
        """Whether it can take a turn now."""
        ready = self.alive and not self.busy and not self._spoiled and self._closing is None and self._reader is None
        return ready and not self._child.input_ended

    @property
    def runs_others(self) -> bool:
        """Whether an agent's programs run with it. They may stop or imitate it, so its failures say nothing about the
        CLI in general."""
        return self._may_take_long or self.launch.confined  # its programs may have been left by earlier turns

    @property
    def _may_take_long(self) -> bool:
        """Whether its profile may run programs before the first output or after the last."""
        profile = self.launch.profile
        return bool(profile.tools or profile.setting_sources or profile.mcp_config)

    @property
    def waiting(self) -> bool:
        """Whether it waits for results of the client's tools."""
        return self.alive and self._reader is not None and not self.busy and not self._spoiled and self._closing is None

    @property
    def died(self) -> bool:
        """Whether it ended by itself outside a turn. (A CLI for a single turn ends after it.)"""
        ours = self.busy or self._spoiled or self._closing is not None or not self.launch.capability.warm
        return not self.alive and not ours

    @property
    def cwd(self) -> Path:
        return self.launch.cwd

    @property
    def version(self) -> str:
        return self.launch.capability.version

    @property
    def returncode(self) -> int | None:
        return self._child.process.returncode

    @property
    def writes_lost(self) -> str | None:
        """Why it could not write its session, if reported: 2.1.317 does at its end, with exit code 0."""
        return self._output.writes_lost

    @property
    def stderr(self) -> str:
        """The last 16 KB of what it printed there."""
        return self._output.stderr

    async def loaded(self, confirm: Callable[[], Awaitable[None]]) -> None:
        """Call `confirm` after it has read the resumed session, and before it gets a prompt.

        A CLI that does not report this gets the prompt first: then `confirm` is called at its first output, before
        anything is passed on. Raises ProcessDied, and exceptions of `confirm`.
        """
        if not self.launch.capability.tells_when_loaded:
            self._unconfirmed = confirm
            return
        if await self._ask("initialize") is None:
            raise await self._unanswered("initialize")
        await confirm()

    # --- a turn -----------------------------------------------------------------------------------------

    async def turn(
        self,
        frame_uuid: str,
        content: Sequence[Block],
        policy: ToolPolicy | None = None,
        results: Mapping[str, JSON] | None = None,
    ) -> AsyncGenerator[CliEvent, None]:
        """Send one prompt, or the `results` (MCP's, by call) that it waits for. Yields events, a `Result` or `Called`
        last. Raises ProcessDied.

        After the `Result` the process is free again. No time limit: the caller has one, and closes or kills the
        process.
        """
        if not results:
            if not self.usable:
                raise await self._unfit("the process cannot take a turn")
            lines = frames.user_frame(frame_uuid, content, self.launch.capability)
            tag = frame_uuid if self.launch.capability.tags else None
            reader = self._reader = TurnReader(tag, policy, named=self._names_first)
        else:
            if not self.waiting or self._reader is None:
                raise await self._unfit("the process waits for no results")
            brought = [self._tools.answer(call, result) for call, result in results.items()]
            lines = b"".join(frames.line(frame) for frame in brought if frame is not None)
            reader = self._reader
            reader.go_on(policy)
        self._output.listen()
        self.busy, self.told, self._told_size = True, [], 0
        self._write(lines)
        complete = False
        later, hooked = asyncio.get_running_loop().call_later, self._may_take_long
        if not results and not hooked:
            self._alarm = later(SILENCE / 2, self._ring, f"it said nothing for {SILENCE:g} s")
        try:
            while not complete:
                frame = await self._output.next()
                if isinstance(frame, End):
                    raise await self._death()
                if self._alarm is not None and frame is not None and frame.get("type") in FRAMES:
                    self._alarm.cancel()
                    self._alarm = None
                if frame is not None and frame.get("subtype") == "init" and frame.get("type") == "system":
                    self._check_init(frame)
                if self._unconfirmed is not None and frame is not None:
                    await self._unconfirmed()
                    self._unconfirmed = None
                if policy is not None and (calls := calls_in(frame)):
                    await policy.examine(calls)
                if results and (call := not_taken(frame, results)) is not None:
                    raise self.died_of(f"it put an error of its own in the place of the client's result for {call}")
                events = reader.feed(frame)
                of_turn = events not in ([Activity("repeated")], [Activity("of_another_prompt")])
                if self.launch.confined and of_turn and (told := told_in(frame)) is not None:
                    self._note(told)
                if reader.call_without_frame:
                    why = "it made a call of a client's tool, and no frame had told of that call"
                    self._failed("mcp_set_servers", why)
                    raise self.died_of(why, retry=False)
                for event in events:
                    match event:
                        case CallRefused():
                            reply = self._tools.answer(event.call, error_result(event.why))
                            if reply is not None:
                                self._write(frames.line(reply))
                        case PermissionWithdrawn():
                            self._open_requests.pop(event.id, None)
                        case Result():
                            said = f"{event.text[:STDERR_TAIL]} {str(event.detail.get('errors', ''))[:STDERR_TAIL]}"
                            if event.is_error and NO_CONVERSATION in said:  # there was no turn
                                raise self.died_of(f'it said "{NO_CONVERSATION}"', said=said, no_conversation=True)
                            if self._child.stdin.transport.get_write_buffer_size():
                                self._spoiled = True  # it answered before it read the prompt: more will follow
                            self.session_id = event.session_id or self.session_id
                            if not self.launch.capability.warm:
                                # Not earlier: 1.0.120 exits at the end of stdin without flushing its output (an
                                # answer of 1 MB was cut, rc 0).
                                self._child.end_input()
                            self._release()
                            complete = True
                        case Called():
                            self.busy, complete = False, True
                    yield event
                if reader.said_all and not complete and not hooked and self._alarm is None:
                    why = f"it gave no result for {SILENCE:g} s after the model had answered"
                    self._alarm = later(SILENCE / 2, self._ring, why)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            if self._stopping is not None:
                self._stopping.cancel()
                self._stopping = None
            if not complete:
                self._spoiled, self.busy, self.told = True, False, []

    @property
    def used(self) -> Usage:
        """Usage of the running turn so far."""
        return NO_USAGE if self._reader is None else self._reader.used

    async def stopped(self) -> bool:
        """End an abandoned turn, and read the rest of its output. Returns whether the process can be used again.

        Its memory has a part of that turn until it is rewound. Takes about `STOP_WAIT`, or the process is killed.
        """
        reader = self._reader
        if reader is None or self.busy or not self.alive or self._closing is not None or self._unconfirmed is not None:
            return False
        try:
            async with asyncio.timeout(STOP_WAIT):
                await self.interrupt()
                while not isinstance(frame := await self._output.next(), End):
                    for event in reader.feed(frame):
                        if isinstance(event, Called):
                            return False
                        refused = isinstance(event, Declined) and frame is not None and frame.get("type") == "result"
                        if isinstance(event, Result) or refused:
                            self._spoiled = bool(self._child.stdin.transport.get_write_buffer_size())
                            self._release()
                            return self.usable
        except TimeoutError:
            self.kill()
        return False

    def _ring(self, why: str, worked: float | None = None, until: float = 0.0) -> None:
        """A timer for half of a timeout has fired. After the second half the process is killed: a machine that was
        suspended skips only one half.

        If the process used processor time in that half, or waited for some, the machine is busy: it gets more halves,
        up to `spawn_timeout`.
        """
        loop, now = asyncio.get_running_loop(), self._child.processor_seconds()
        if worked is None:
            until = loop.time() + self._settings.spawn_timeout
        if worked is None or (now - worked > SILENCE / 2 * AT_WORK and loop.time() < until):
            self._alarm = loop.call_later(SILENCE / 2, self._ring, why, now, until)
            return
        if why == NOT_STOPPED:
            self._failed("interrupt", why)
        self._output.failure, self._waited_in_vain = why, True
        self.kill()

    def permit(self, asked: PermissionRequest, verdict: Verdict) -> None:
        """Answer a permission request of the CLI. Ignored if that is no longer open."""
        if self._open_requests.pop(asked.request_id, None) is not None:
            self._write(frames.line(permissions.answer(asked, verdict)))

    def _note(self, told: JSON) -> None:
        size = size_of([told], MOST_TOLD - self._told_size, A_VALUE)
        self._told_size += size or 0
        if size is None:
            self.told = None
        elif self.told is not None:
            self.told.append(told)

    def _release(self) -> None:
        self._open_requests.clear()
        self._tools.forget()
        self._output.leave()
        self._names_first |= self._reader is not None and self._reader.names_first
        self._reader = None
        self.busy = False
        self.last_used = time.monotonic()

    def _serve(self, request: JSON) -> None:
        """Answer a control request of the CLI, if that is possible at once.

        A CLI that sends requests without reading the answers is killed, so that buffered data, the prompt included,
        stays below two of the largest bodies.
        """
        if self._child.stdin.transport.get_write_buffer_size() > 2 * self._settings.max_body:
            log.warning("claude_does_not_read", pid=self.pid)
            self.kill()
        elif self.launch.profile.approve and self._output.listening and permissions.is_asked(request):
            # Between turns nobody could approve: the CLI gets an error, and runs nothing.
            asked = permissions.read(request)
            self._open_requests[asked.request_id] = asked
        elif (reply := self._tools.handle(request, in_turn=self._output.listening)) is not None:
            self._write(line := frames.line(reply))
            self._output.count(line)

    def _write(self, lines: bytes) -> None:
        """Write without waiting: the transport buffers what the CLI has not read yet, while its output is still read.

        To a CLI whose input is closed nothing is written: the reader of stdout notices its end, and knows the reason.
        """
        if not self._child.input_ended and not self._child.stdin.is_closing():  # uvloop raises if it is closing
            self._child.stdin.write(lines)

    def _check_init(self, frame: JSON) -> None:
        """Check the `init` frame at the start of a turn. A CLI with tools that should be off is killed at once.

        Raises ClaudeUnavailable; ProcessDied if it is another version than expected, and so was started with wrong
        options: another attempt starts it with the right ones.
        """
        self._model = str(frame["model"]) if frame.get("model") else None
        known = self.launch.capability
        version = self.runs = str(frame.get("claude_code_version") or known.version)
        if version != known.version:
            capability.heard(known, None if self.runs_others else version)  # it may be forged
        if self._checked == (offered := frame.get("tools")):  # the same tools as in an earlier turn
            return
        try:
            check_tools(self.launch, frame)
        except ClaudeUnavailable as exc:
            self.kill()
            if version != known.version:
                why = f"it is Claude CLI {version}, and was taken for {known.version}"
                raise self.died_of(why) from exc
            raise
        self._checked = offered

    async def _death(self) -> ProcessDied:
        """The error of a process that ended without a result."""
        await self._output.last_words()
        try:
            await asyncio.wait_for(self._child.process.wait(), self._settings.stop_grace)
        except TimeoutError:
            self.kill()  # it closed its stdout, but still runs
        code = self.returncode
        why = self._output.failure or ("its output ended" if code is None else f"it ended with exit code {code}")
        no_conversation = NO_CONVERSATION in self.stderr
        if not self._output.spoke and not no_conversation:  # it did not start: perhaps it is another version by now
            refused = capability.UNKNOWN_OPTION.search(self.stderr)
            if refused is not None and not self.launch.confined:  # confined: the message may be forged
                capability.without(self.launch.capability, refused[1])
            else:
                capability.forget(self.launch.capability)  # a wrapper script may start another version now
        if no_conversation:
            why = f'it said "{NO_CONVERSATION}", and {why}'
        retry = not self._waited_in_vain  # no second wait: a client gets its error within 15 s
        why = f"{why} before the result" if retry else why
        return self.died_of(why, no_conversation=no_conversation, retry=retry)

    def died_of(self, why: str, *, said: str = "", no_conversation: bool = False, retry: bool = True) -> ProcessDied:
        """The error of a process that gives no result. `said`: other output of it, quoted if its stderr is empty;
        `retry`: another process may succeed; `no_conversation`: it did not find its session."""
        return ProcessDied(
            why,
            returncode=self.returncode,
            stderr=self.stderr or said,
            notices=self._output.notices,
            cli=self.launch.capability.name,
            used=None if self._reader is None else self._reader.used,
            retry=retry,
            no_conversation=no_conversation,
        )

    async def _unanswered(self, subtype: str) -> ProcessDied:
        """The error of a process that did not answer this control request, or has ended."""
        if not self.alive:
            return await self._death()
        self.kill()
        why = f"it did not answer the control request `{subtype}` in {self._answer_wait:g} s"
        return self.died_of(why, retry=False)

    @property
    def _answer_wait(self) -> float:
        return min(ANSWER_WAIT, self._settings.spawn_timeout)

    async def _unfit(self, why: str) -> ProcessDied:
        """The error of a process that cannot take a turn: it has ended, else `why`."""
        if (not self.alive or self._child.input_ended) and not self._spoiled and self._closing is None:
            return await self._death()
        return self.died_of(why)

    async def interrupt(self) -> None:
        """Ask it to end the running turn: the turn's `Result` follows (under 50 ms on 2.1.329). If it does not, it is
        killed, and `ProcessDied` follows."""
        if not self.alive:
            return
        if not self.launch.capability.does("interrupt"):
            self.kill()
            return
        if self.busy:
            self._stopping = asyncio.get_running_loop().call_later(INTERRUPT_WAIT, self._ring, NOT_STOPPED, math.inf)
        await self._child.look()
        if self._child.input_ended:  # a CLI for a single turn: its stdin is closed
            self._child.signal(signal.SIGINT)
            return
        self._requests += 1
        self._write(frames.control_request(f"proxy-{self._requests}", "interrupt"))

    async def adapt(self, launch: Launch) -> bool:
        """Switch to this launch, which is equal to the present one except for the system prompt.

        The prompt is given to the running process (3 to 20 ms on 2.1.329; a new process takes 350 ms) for its next
        request. False if it was refused: then the process cannot serve this launch.
        """
        if launch.system_prompt != (present := self.launch.system_prompt):
            said = all((prompt or "").strip() for prompt in (launch.system_prompt, present))
            if not said or not launch.capability.takes_system_prompt:
                return False
            fields = {"model": self._model, "system_prompt": launch.system_prompt, "only_if_model_is_current": True}
            if self._model is None or not await self._ask("set_model", **fields):
                return False
        if launch.offers != self._tools.offers and not await self._offer(launch.offers):
            return False
        self.launch = launch
        return True

    async def model(self) -> str | None:
        """The id of its model; None if unknown."""
        if self._model is None:  # no turn has begun yet, whose `init` frame names it
            replied = await self._reply("get_settings")
            applied = ((replied or {}).get("response") or {}).get("applied") or {}
            return str(applied["model"]) if applied.get("model") else None
        return self._model

    async def set_env(self, env: Mapping[str, str]) -> bool:
        """Set these environment variables from its next request to the model on; variables that were set before and are
        not among them get their start values back. Without a change nothing is sent.

        False if the CLI refused: then it has its start values. Raises ProcessDied if it may have other values: then no
        turn may run in it. Run on 2.1.329 and 2.1.330, also before `initialize` and while it waits for results (5 to 25
        ms).
        """
        if not env and not self.env_set:
            return True
        start_values = dict(self.launch.env)
        change = {
            name: env.get(name, start_values.get(name, ""))
            for name in (*self.env_set, *env)
            if env.get(name) != self.env_set.get(name)
        }
        if not change:
            return True
        accepted = await self._ask("apply_flag_settings", settings={"env": change})
        if accepted is None:
            raise await self._unanswered("apply_flag_settings")
        if not accepted and self.env_set:  # it still has the values of an earlier turn
            raise self.died_of("it did not give up the parameters of the turn before")
        self.env_set = dict(env) if accepted else {}
        return accepted

    async def rewind(self, to: str, newest: str) -> bool:
        """Rewind its conversation to before the prompt of the frame `to`; `newest` is the frame of its last prompt.

        Both frames are on the conversation's path. False if the CLI refused: then its conversation is unchanged. False,
        too, if it did not answer: then it can run no more turns (`usable`).
        """
        fields = {"target_message_uuid": to, "last_seen_user_message_uuid": newest}
        replied = await self._reply("rewind_conversation", **fields)
        response = (replied or {}).get("response")
        return isinstance(response, dict) and response.get("rewound") is True

    @property
    def forbidden_to_compact(self) -> bool:
        """Whether `set_env` has turned compaction off for this turn. If the settings turn it off, this is False."""
        return NO_COMPACTION in self.env_set and not dict(self.launch.env).get(NO_COMPACTION)

    async def boot(self) -> bool | None:
        """Wait until a spare has started up. False if it refused, None if it never will."""
        return await self._ask("initialize")

    async def claim(self, launch: Launch) -> bool | None:
        """Turn a spare into the process of this launch, which keeps the spare's session id. False if the spare refused,
        None if unknown (it may have died); in both cases it cannot be used any more.

        Afterwards the CLI is as if started in the launch's directory: the model is told so, and the transcript is in
        that directory's folder (run on 2.1.329, 50 ms).
        """
        prompt = [printable(launch.system_prompt or "")]
        if not (taken := await self._ask("claim_session", cwd=str(launch.cwd), system_prompt=prompt)):
            self._spoiled = True
            return taken
        self.launch = replace(launch, session_id=self.session_id)
        return await self._offer(launch.offers) or None

    async def _offer(self, offers: Offers) -> bool:
        """Offer these tools of the client from now on. False if this process cannot take them (see `ToolServer.takes`),
        or has ended. Raises ClaudeUnavailable if it could, and did not."""
        can_take = self._tools.takes(offers)
        try:
            accepted = await offer(
                self._tools,
                offers,
                self._ask,
                until=self._output.at_end,
                settings=self._settings,
                wait=self._answer_wait,
            )
            if can_take and not accepted and self.alive:
                cli = self.launch.capability
                self._failed("mcp_set_servers", "it did not take the client's tools")
                raise ClaudeUnavailable(f"{cli.name} did not take the client's tools: see `doctor`")
            return accepted
        except BaseException:
            self._spoiled = True  # also if cancelled half-way: which tools it has is unknown
            raise

    async def _ask(self, subtype: str, **fields: object) -> bool | None:
        """Send a control request outside a turn, or while the CLI waits for results. Returns whether it succeeded; None
        if the CLI did not answer within `ANSWER_WAIT` or, if it is working, within another `spawn_timeout`."""
        replied = await self._reply(subtype, **fields)
        return None if replied is None else replied.get("subtype") == "success"

    async def _reply(self, subtype: str, **fields: object) -> JSON | None:
        """The CLI's answer to this control request; None as in `_ask`."""
        if not (self.usable or self.waiting):
            return None
        self._requests += 1
        request_id = f"proxy-{self._requests}"
        self.busy = self._spoiled = True  # until it has answered: a turn must not begin before a late answer
        coming = self._output.reply(request_id)
        try:
            self._write(frames.control_request(request_id, subtype, **fields))
            await asyncio.wait([coming], timeout=self._answer_wait)
            if not coming.done() and await self._child.is_at_work(LOOK):  # e.g. it loads a session
                await asyncio.wait([coming], timeout=self._settings.spawn_timeout)
            if not coming.done():
                self._failed(subtype, f"it did not answer in {self._answer_wait:g} s")
                return None
            replied = coming.result()
            self._spoiled = replied is None
            if replied is not None and replied.get("subtype") != "success" and subtype not in MAY_REFUSE:
                why = redact.head(str(replied.get("error")), 200)
                self._failed(subtype, f"it refused: {why}")
            return replied
        finally:
            coming.cancel()
            self.busy = False

    def _failed(self, subtype: str, why: str) -> None:
        for name in NAMES:
            if name == subtype and not self.runs_others:
                capability.failed(self.launch.capability, name, why)

    # --- its end --------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill it with all descendants. `close` still has to be awaited."""
        self._spoiled = True
        self._child.kill()

    async def close(self) -> None:
        """End it and its descendants; killed if it is in a turn or waits for results (see `Child.end`).

        Bounded, not interrupted by a cancellation, idempotent.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._shutdown())
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as exc:
                if self._closing.cancelled():
                    raise
                cancelled = exc
        self._closing.result()
        if cancelled is not None:
            raise cancelled

    async def _shutdown(self) -> None:
        between_turns = not self.busy and self._reader is None and not self._spoiled
        if self._output.leave():  # a waiting turn gets an error
            self._spoiled = True
        try:
            await self._child.end(gently=between_turns, grace=self._settings.stop_grace)
            await self._output.drained()
        finally:
            try:
                await self._child.close()
            finally:
                await self._output.close()
                self._reader, self.told = None, []  # large, and this object may be kept until a collection
        if not self._child.gone:
            unseen = self._child.unseen
            what = "cannot be killed" if unseen is None else f"cannot be seen to be dead ({unseen})"
            raise ClaudeUnavailable(f"Claude CLI process {self.pid} {what}: look at the machine")
