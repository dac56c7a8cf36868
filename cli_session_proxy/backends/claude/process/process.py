"""One CLI process: started, talked to one turn at a time, always drained, and never left behind.

- What it says is read all the time, with or without a listener (see `frames.Output`).
- A turn may stop at calls of the client's tools: then the process is `waiting`, and `go_on` brings the results.
- A turn that its consumer leaves half-way spoils the process (`usable` is False): what it still says belongs to
  that turn, and must not become the answer to another.
- `close` returns when the process and its group are dead and reaped: only then may its transcript be touched.

Not its business: time limits of a turn (the caller has them), what a session holds.
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
from ....domain.client_tools import Offers, ToolPolicy, refused
from ....domain.models import JSON, Block, Usage
from ....errors import ClaudeUnavailable
from ....settings import Settings
from ...base import Called, PermissionWithdrawn
from . import capability, frames, permissions
from .child import AT_WORK, Child, Launch, check_tools
from .events import Asks, CallRefused, CliEvent, Declined, ProcessDied, Result
from .frames import FRAMES, READ_SIZE, STDERR_TAIL, End, Output, printable
from .guardian import Guardian
from .observed import NAMES
from .tool_server import ToolServer, not_taken, offer
from .turn_reader import TurnReader, calls_in

# Seconds. A CLI answers a control request in milliseconds, and says a first word some milliseconds after its prompt;
# its result comes within 50 ms of the model's last word (2.1.330). What takes longer than this does not come. With the
# start of a process, a client hears of either within 15 s.
ANSWER_WAIT = 10.0
SILENCE = 10.0
LOOK = 0.5  # how long it is looked whether it is at work
INTERRUPT_WAIT = 5.0
STOP_WAIT = 1.0  # until a turn that nobody waits for has ended; a new process is ready as soon
NOT_STOPPED = f"it did not end a turn within {INTERRUPT_WAIT:g} s when it was told to"

# Control requests that a CLI refuses where what it is asked does not fit what it runs.
MAY_REFUSE = frozenset({"set_model"})

NO_CONVERSATION = "No conversation found"
NO_COMPACTION = "DISABLE_AUTO_COMPACT"

__all__ = ["ClaudeProcess", "Launch"]

log = logs.get(__name__)


class ClaudeProcess:
    """A running CLI. Made by `spawn`; `pid` and `start_time` together name it beyond a reused pid."""

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
        self._reader: TurnReader | None = None  # of the turn that runs, or that waits for the client
        self._model: str | None = None  # the model's id, as the process itself names it
        self.runs: str | None = None  # the version that it says of itself, once it has
        self._checked: object = None  # the tools of its last `init` frame: they may be offered
        self.env_set: Mapping[str, str] = {}  # variables that `set_env` has changed since its start
        self._closing: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None  # until it says something that has to come soon
        self._waited_in_vain = False
        self._stopping: asyncio.TimerHandle | None = None  # until the turn that it was asked to end has ended
        self._unconfirmed: Callable[[], Awaitable[None]] | None = None
        self._asks: dict[str, Asks] = {}  # tools that wait for a word
        self._output = output
        output.begin(child.stderr, asked=self._serve, broken=self.kill, ended=ended)

    @classmethod
    async def spawn(
        cls, launch: Launch, settings: Settings, guardian: Guardian, ended: Callable[[], None] = lambda: None
    ) -> ClaudeProcess:
        """Raises ClaudeUnavailable (cannot be started), SandboxError (no such cwd), InvalidRequest (too large).

        `ended` is called at the end of its output, however it ended.
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
        """It has said its first word, or never will."""
        return self._output.started

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done when its output has ended: it writes nothing any more."""
        return self._output.at_end

    @property
    def usable(self) -> bool:
        """It can take a turn now."""
        ready = self.alive and not self.busy and not self._spoiled and self._closing is None and self._reader is None
        return ready and not self._child.input_ended

    @property
    def runs_others(self) -> bool:
        """An agent's programs run beside it, and may stop it or speak in its place: what it does not do then says
        nothing of the CLI that others use."""
        return self._may_take_long or self.launch.confined  # which may have left programs that an older CLI starts

    @property
    def _may_take_long(self) -> bool:
        """Its profile has it run programs before its first word, or behind its last one."""
        profile = self.launch.profile
        return bool(profile.tools or profile.setting_sources or profile.mcp_config)

    @property
    def waiting(self) -> bool:
        """It has called tools of the client and can take their results now."""
        return self.alive and self._reader is not None and not self.busy and not self._spoiled and self._closing is None

    @property
    def died(self) -> bool:
        """It ended by itself, and not in a turn. (One that serves one turn only ends after it.)"""
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
        """Why it could not write its session, where it says so: 2.1.317 does at its end, with exit code 0."""
        return self._output.writes_lost

    @property
    def stderr(self) -> str:
        """The last 16 KB of what it printed there."""
        return self._output.stderr

    async def loaded(self, confirm: Callable[[], Awaitable[None]]) -> None:
        """Have `confirm` called when it has read the session that it resumes, before it is asked anything.

        A CLI that does not tell when that is gets the turn's frame first: then `confirm` is called at the first thing
        that it says, before anything is passed on. Raises ProcessDied, and what `confirm` raises.
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
        judge: ToolPolicy | None = None,
        results: Mapping[str, JSON] | None = None,
    ) -> AsyncGenerator[CliEvent, None]:
        """Send one prompt, or bring the `results` (MCP's, by call) that it waits for; yield what follows, a `Result` or
        `Called` last. Raises ProcessDied.

        Once the `Result` is out the process is free again. Unbounded in time: the caller limits it, and closes
        or kills the process when it gives up.
        """
        if not results:
            if not self.usable:
                raise await self._unfit("the process cannot take a turn")
            lines = frames.user_frame(frame_uuid, content, self.launch.capability)
            reader = self._reader = TurnReader(frame_uuid if self.launch.capability.tags else None, judge)
        else:
            if not self.waiting or self._reader is None:
                raise await self._unfit("the process waits for no results")
            brought = [self._tools.answer(call, result) for call, result in results.items()]
            lines = b"".join(frames.line(frame) for frame in brought if frame is not None)
            reader = self._reader
            reader.go_on(judge)
        self._output.listen()
        self.busy = True
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
                if judge is not None and (calls := calls_in(frame)):
                    await judge.examine(calls)
                if results and (call := not_taken(frame, results)) is not None:
                    raise self.died_of(f"it put an error of its own in the place of the client's result for {call}")
                told = reader.feed(frame)
                if reader.untold_call:
                    why = "it made a call of a client's tool, and no frame had told of that call"
                    self._failed("mcp_set_servers", why)
                    raise self.died_of(why, retry=False)
                for event in told:
                    if isinstance(event, CallRefused):
                        reply = self._tools.answer(event.call, refused(event.why))
                        if reply is not None:
                            self._write(frames.line(reply))
                    if isinstance(event, PermissionWithdrawn):
                        self._asks.pop(event.id, None)
                    if isinstance(event, Result):
                        said = f"{event.text[:STDERR_TAIL]} {str(event.detail.get('errors', ''))[:STDERR_TAIL]}"
                        if event.is_error and NO_CONVERSATION in said:  # no turn happened
                            raise self.died_of(f'it said "{NO_CONVERSATION}"', said=said, no_conversation=True)
                        if self._child.stdin.transport.get_write_buffer_size():
                            self._spoiled = True  # it answered before it had read the prompt: the rest is on its way
                        self.session_id = event.session_id or self.session_id
                        if not self.launch.capability.warm:
                            # Not before: 1.0.120 exits at the end of stdin without waiting for its own output, and
                            # loses what the pipe has not taken (an answer of 1 MB was cut, rc 0).
                            self._child.end_input()
                        self._release()
                        complete = True
                    if isinstance(event, Called):
                        self.busy, complete = False, True
                    yield event
                if reader.said_all and not complete and not hooked:
                    why = f"it gave no result for {SILENCE:g} s after the model had answered"
                    self._alarm = later(SILENCE / 2, self._ring, why)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            if self._stopping is not None:
                self._stopping.cancel()
                self._stopping = None
            if not complete:
                self._spoiled, self.busy = True, False

    @property
    def used(self) -> Usage:
        """By the turn that runs, until now."""
        return Usage() if self._reader is None else self._reader.used

    async def stopped(self) -> bool:
        """End the turn that its consumer left half-way, and hear the rest of it: whether the process can be used again.

        Its memory holds that turn, or a part of it, until it is taken back. In about `STOP_WAIT`, or it is killed.
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
        """Half of the time is over; then the other half, and it is killed. A machine that was asleep skips one half.

        Where it was at work in that half, a busy machine is slow: it gets another one, up to `spawn_timeout` in all.
        """
        loop, now = asyncio.get_running_loop(), self._child.worked()
        if worked is None:
            until = loop.time() + self._settings.spawn_timeout
        if worked is None or (now - worked > SILENCE / 2 * AT_WORK and loop.time() < until):
            self._alarm = loop.call_later(SILENCE / 2, self._ring, why, now, until)
            return
        if why == NOT_STOPPED:
            self._failed("interrupt", why)
        self._output.failure, self._waited_in_vain = why, True
        self.kill()

    def permit(self, asked: Asks, verdict: Verdict) -> None:
        """Answer the CLI's question whether it may run a tool. What it does not wait for is dropped."""
        if self._asks.pop(asked.request_id, None) is not None:
            self._write(frames.line(permissions.answer(asked, verdict)))

    def _release(self) -> None:
        self._asks.clear()
        self._tools.forget()
        self._output.leave()
        self._reader = None
        self.busy = False
        self.last_used = time.monotonic()

    def _serve(self, request: JSON) -> None:
        """Answer a request of the CLI's, where that can be done at once.

        A CLI that asks and asks and reads no answer is killed: with the prompt, what is kept for it stays below two of
        the largest bodies.
        """
        if self._child.stdin.transport.get_write_buffer_size() > 2 * self._settings.max_body:
            log.warning("claude_does_not_read", pid=self.pid)
            self.kill()
        elif self.launch.profile.approve and self._output.listening and permissions.is_asked(request):
            # Between turns nobody could be asked: then it is told that this is not served, and runs nothing.
            asked = permissions.read(request)
            self._asks[asked.request_id] = asked
        elif (reply := self._tools.handle(request, in_turn=self._output.listening)) is not None:
            self._write(told := frames.line(reply))
            self._output.count(told)

    def _write(self, lines: bytes) -> None:
        """What the pipe does not take at once follows by itself: nobody waits for it, while its output is read.

        A dead CLI is noticed by the reader of stdout, which knows why it died.
        """
        if not self._child.input_ended and not self._child.stdin.is_closing():  # uvloop raises then
            self._child.stdin.write(lines)

    def _check_init(self, frame: JSON) -> None:
        """Check the `init` frame at the start of a turn. A CLI that offers tools that are off is killed at once.

        Raises ClaudeUnavailable; ProcessDied where it is another version than we took it for, and was started wrongly.
        """
        self._model = str(frame["model"]) if frame.get("model") else None
        known = self.launch.capability
        version = self.runs = str(frame.get("claude_code_version") or known.version)
        if version != known.version:
            if self.runs_others:  # it is asked itself, not believed
                capability.forget(known)
            else:
                capability.heard(known, version)
        if self._checked == (offered := frame.get("tools")):
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
            self.kill()  # it closed its stdout and lives on: nothing more can come
        code = self.returncode
        why = self._output.failure or ("its output ended" if code is None else f"it ended with exit code {code}")
        missing = NO_CONVERSATION in self.stderr
        if not self._output.spoke and not missing:
            refused = capability.UNKNOWN_OPTION.search(self.stderr)
            if refused is not None and not self.launch.confined:  # whose programs may have said so, before it
                capability.without(self.launch.capability, refused[1])
            else:
                capability.forget(self.launch.capability)  # perhaps a script starts another version now
        if missing:
            why = f'it said "{NO_CONVERSATION}", and {why}'
        retry = not self._waited_in_vain
        return self.died_of(f"{why} before the result" if retry else why, no_conversation=missing, retry=retry)

    def died_of(self, why: str, *, said: str = "", no_conversation: bool = False, retry: bool = True) -> ProcessDied:
        """The error of a process that gives no result any more. `said` stands in for an empty stderr."""
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
        """The error of a process that gave no answer to this control request: that it ended, if it did."""
        if not self.alive:
            return await self._death()
        self.kill()
        why = f"it did not answer the control request `{subtype}` in {self._answer_wait:g} s"
        return self.died_of(why, retry=False)

    @property
    def _answer_wait(self) -> float:
        return min(ANSWER_WAIT, self._settings.spawn_timeout)

    async def _unfit(self, why: str) -> ProcessDied:
        """The error of a process that cannot take a turn: that it ended by itself, if it did, else `why`."""
        if (not self.alive or self._child.input_ended) and not self._spoiled and self._closing is None:
            return await self._death()
        return self.died_of(why)

    async def interrupt(self) -> None:
        """Ask it to end the running turn: the turn's `Result` follows (under 50 ms on 2.1.329). Where it does not end
        it, it is killed, and `ProcessDied` follows."""
        if not self.alive:
            return
        if not self.launch.capability.does("interrupt"):
            self.kill()
            return
        if self.busy:
            self._stopping = asyncio.get_running_loop().call_later(INTERRUPT_WAIT, self._ring, NOT_STOPPED, math.inf)
        await self._child.look()
        if self._child.input_ended:  # one spawn a turn: no channel is left to ask on
            self._child.signal(signal.SIGINT)
            return
        self._requests += 1
        self._write(frames.control_request(f"proxy-{self._requests}", "interrupt"))

    async def adapt(self, launch: Launch) -> bool:
        """Serve this launch from now on: one that is equal to the present one, perhaps with another system prompt.

        The prompt is given to the running process (3 to 20 ms on 2.1.329, against 350 ms for a new process); the
        next request carries it. False when it did not take it: then the process cannot serve this launch.
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
        """The id of the model that it asks; None where it does not say."""
        if self._model is None:
            replied = await self._reply("get_settings")
            applied = ((replied or {}).get("response") or {}).get("applied") or {}
            return str(applied["model"]) if applied.get("model") else None
        return self._model

    async def set_env(self, env: Mapping[str, str]) -> bool:
        """Set these variables in its environment from its next request to the model on; variables that were set before
        and are not among them go back to their start values. Nothing is sent where nothing changes.

        False where it refused, and still has those of its start. Raises ProcessDied where it may still have others: no
        turn may run in it. Run on 2.1.329 and 2.1.330, also before `initialize` and while it waits for results
        (5 to 25 ms); the environment ends with the process.
        """
        if not env and not self.env_set:
            return True
        began = dict(self.launch.env)
        change = {
            name: env.get(name, began.get(name, ""))
            for name in (*self.env_set, *env)
            if env.get(name) != self.env_set.get(name)
        }
        if not change:
            return True
        taken = await self._ask("apply_flag_settings", settings={"env": change})
        if taken is None:
            raise await self._unanswered("apply_flag_settings")
        if not taken and self.env_set:
            raise self.died_of("it did not give up the parameters of the turn before")
        self.env_set = dict(env) if taken else {}
        return taken

    async def rewind(self, to: str, newest: str) -> bool:
        """Take the conversation back to before the prompt of the frame `to`; `newest` is the frame of its last prompt.

        Both are on the path that it holds. False where it refused, and is as it was; one that did not answer can run no
        turn any more.
        """
        fields = {"target_message_uuid": to, "last_seen_user_message_uuid": newest}
        replied = await self._reply("rewind_conversation", **fields)
        said = (replied or {}).get("response")
        return isinstance(said, dict) and said.get("rewound") is True

    @property
    def forbidden_to_compact(self) -> bool:
        """By `set_env`, for this turn, and not by the settings."""
        return NO_COMPACTION in self.env_set and not dict(self.launch.env).get(NO_COMPACTION)

    async def boot(self) -> bool | None:
        """Wait until a spare has started up. False when it refused, None when it never will."""
        return await self._ask("initialize")

    async def claim(self, launch: Launch) -> bool | None:
        """A spare becomes this launch's process, under its own session id. Else it is of no use any more: False when
        it refused, None when nobody knows (it may have died).

        From then on the CLI is as if it had been started there: the model is told that directory, and the transcript
        is in its folder (run on 2.1.329, 50 ms).
        """
        prompt = [printable(launch.system_prompt or "")]
        if not (taken := await self._ask("claim_session", cwd=str(launch.cwd), system_prompt=prompt)):
            self._spoiled = True
            return taken
        self.launch = replace(launch, session_id=self.session_id)
        return await self._offer(launch.offers) or None

    async def _offer(self, offers: Offers) -> bool:
        """Offer these tools of the client's from now on. False when this process cannot (see `ToolServer.takes`), or
        has ended. Raises ClaudeUnavailable where it should and does not."""
        able = self._tools.takes(offers)
        try:
            taken = await offer(
                self._tools,
                offers,
                self._ask,
                until=self._output.at_end,
                settings=self._settings,
                wait=self._answer_wait,
            )
            if able and not taken and self.alive:
                cli = self.launch.capability
                self._failed("mcp_set_servers", "it did not take the client's tools")
                raise ClaudeUnavailable(f"{cli.name} did not take the client's tools: see `doctor`")
            return taken
        except BaseException:
            self._spoiled = True  # left half-way: nobody knows what it offers, and what else it was told
            raise

    async def _ask(self, subtype: str, **fields: object) -> bool | None:
        """A control request of a process that is in no turn, or waits for results, and whether it succeeded.

        None where no answer came. Bounded by `ANSWER_WAIT`; where it is at work then, by `spawn_timeout` once more.
        """
        replied = await self._reply(subtype, **fields)
        return None if replied is None else replied.get("subtype") == "success"

    async def _reply(self, subtype: str, **fields: object) -> JSON | None:
        if not (self.usable or self.waiting):
            return None
        self._requests += 1
        request_id = f"proxy-{self._requests}"
        self.busy = self._spoiled = True  # until it has answered: what it says later is nobody's answer
        coming = self._output.reply(request_id)
        try:
            self._write(frames.control_request(request_id, subtype, **fields))
            await asyncio.wait([coming], timeout=self._answer_wait)
            if not coming.done() and await self._child.is_at_work(LOOK):  # it reads a long session, on a busy machine
                await asyncio.wait([coming], timeout=self._settings.spawn_timeout)
            if not coming.done():
                self._failed(subtype, f"it did not answer in {self._answer_wait:g} s")
                return None
            replied = coming.result()
            self._spoiled = replied is None
            if replied is not None and replied.get("subtype") != "success" and subtype not in MAY_REFUSE:
                why = redact.text(str(replied.get("error")))[:200]
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
        """End it at once, with everything it started. `close` still has to be awaited."""
        self._spoiled = True
        self._child.kill()

    async def close(self) -> None:
        """End it and what it started, at once where it is in a turn or waits for results (see `Child.end`).

        Bounded; not cut short by a cancellation; again is fine.
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
        if self._output.leave():  # who still waits for a result learns that there will be none
            self._spoiled = True
        try:
            await self._child.end(gently=between_turns, grace=self._settings.stop_grace)
            await self._output.drained()
        finally:
            try:
                await self._child.close()
            finally:
                await self._output.close()
        if not self._child.gone:
            unseen = self._child.unseen
            what = "cannot be killed" if unseen is None else f"cannot be seen to be dead ({unseen})"
            raise ClaudeUnavailable(f"Claude CLI process {self.pid} {what}: look at the machine")
