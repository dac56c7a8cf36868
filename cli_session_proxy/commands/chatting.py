"""`chat`: a conversation in the terminal, over the engine itself or the server that runs on the same `var`.

    Enter   sends the line         Ctrl-C   cancels the running turn           Ctrl-D   leaves
    /help   lists the commands     a backslash at the end of a line: it goes on with the next one

The chain is an ordinary agent's: the next `chat` continues it.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
import json
import os
import signal
import sys
import termios
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import httpx
from rich.console import Console

from ..domain.approvals import OUTCOMES, Decision, Verdict
from ..domain.models import JSON, BlockDelta, Message, TurnRequest
from ..engine.engine import Engine
from ..errors import ProxyError, UpstreamError, from_dict
from ..export import feed
from ..http.audit import Action, Audit, audit_of, note
from ..http.served import served_at
from ..http.ui import views
from ..selfcheck.service import SelfChecks
from ..settings import Settings
from ..wires.common import encoded_agent_id
from .asking import alive, client_of, key_of
from .following import LOOK, progress_of
from .rendering import AnswerView
from .stored import engine_in

Write = Callable[[str], None]

# The steps of a turn that are shown.
SHOWN_STEPS = frozenset({"lane", "lease", "slot", "retry", "approval", "limit", "tool"})
SHOWN_LINKS = frozenset({"rebuilt", "moved", "adopted"})
READ = 4096
PROMPT = "› "
MORE = "… "
HELP = """\
/help          this
/rewind [N]    take the last N turns (1) off the path: the next one branches before them
/show          the newest turn: its session, and what was repaired
/model [NAME]  the model that answers from now on
Where a tool waits for your approval: y allows it once, t for this turn, n WORDS refuses it and tells the model why.
A backslash at the end of a line continues it on the next one. Ctrl-C cancels a turn, Ctrl-D leaves.
Any other line is sent to the agent.
"""


class ChatTalk(Protocol):
    """A connection to the agent. `model` answers the next line."""

    model: str

    async def rewind(self, to: str) -> JSON:
        """Move the head back, as the route does. Raises `ProxyError`."""

    def say(self, text: str) -> AsyncGenerator[str, None]:
        """The answer, piece by piece. Closed before its end, the turn is cancelled. Raises `ProxyError`."""

    def progress(self) -> AsyncGenerator[Sequence[JSON], None]:
        """The running turns as in `progress` events, at each change. Never raises."""

    async def decide(self, approval_id: str, decision: Decision, word: str | None) -> None:
        """Say whether a tool may run. Raises `ProxyError`."""

    async def last(self) -> JSON | None:
        """The newest turn with its links, in the form of the dump. Raises `ProxyError`."""


async def chat(settings: Settings, owner: str, agent_id: str, model: str | None, write: Write) -> None:
    """Talk until the input ends. Raises `ProxyError` if it cannot begin."""
    async with _talk(settings, owner, agent_id, model or settings.default_model) as (talk, where):
        lines = Lines(sys.stdin.fileno())
        terminal = sys.stdin.isatty()
        if terminal:
            write(f"agent {printable(agent_id)} over {where}. Ctrl-C cancels a turn, Ctrl-D leaves.\n")
        with Interrupts() as interrupts:
            while True:
                if terminal:
                    write(PROMPT)
                interrupts.action = lambda: write(f"\n{PROMPT}")
                line = await lines.next()
                while line is not None and line.endswith("\\"):
                    if terminal:
                        write(MORE)
                    more = await lines.next()
                    line = f"{line[:-1]}\n{more or ''}"
                if line is None:
                    write("\n" if terminal else "")
                    return
                if line.split(" ")[0].strip() in COMMANDS:
                    await _command(talk, line, write)
                elif line.strip():
                    await _turn(talk, line, write, interrupts, lines if terminal else None)


COMMANDS = frozenset({"/help", "/rewind", "/show", "/model"})


async def _command(talk: ChatTalk, line: str, write: Write) -> None:
    """Run one of `COMMANDS`; an error is printed."""
    name, _, rest = line.strip().partition(" ")
    try:
        if name == "/help":
            write(HELP)
        elif name == "/show":
            turn = await talk.last()
            write("nothing was said yet\n" if turn is None else f"turn {turn['number']} {turn['id']}\n{_footer(turn)}")
        elif name == "/model":
            talk.model = rest.strip() or talk.model
            write(f"model {printable(talk.model)}\n")
        else:
            done = await talk.rewind(f"-{rest.strip() or 1}")
            write(f"{done['turns']} off the path: the next line continues before them\n")
    except ProxyError as exc:
        write(f"error: {printable(exc.message)}\n")


async def _turn(talk: ChatTalk, line: str, write: Write, interrupts: Interrupts, person: Lines | None) -> None:
    """One question and its answer. Ctrl-C cancels it, an error is printed, and the chat goes on. `person` approves
    tools; None: nobody can."""
    task = asyncio.create_task(_answer(talk, line, write, person))
    interrupts.action, interrupts.pressed = task.cancel, False
    try:
        await task
    except asyncio.CancelledError:
        if not interrupts.pressed:
            task.cancel()
            await asyncio.wait([task])
            raise
        write("\n(cancelled: the conversation is as before)\n")
    except ProxyError as exc:
        write(f"\nerror: {printable(exc.message)}\n")


async def _answer(talk: ChatTalk, line: str, write: Write, person: Lines | None) -> None:
    """Send the line, and write the answer as it comes, then a footer. A terminal shows its Markdown."""
    view = AnswerView(Console(highlight=False)) if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None
    write_note, write_piece = (write, write) if view is None else (view.note, view.add)
    watching = asyncio.create_task(_watch(talk, write_note, person))
    try:
        async with aclosing(talk.say(line)) as pieces:
            async for piece in pieces:
                write_piece(printable(piece))
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        if view is not None:
            view.end()
    if view is None:
        write("\n")
    turn = await talk.last()
    if turn is not None:
        write(_footer(turn))


async def _watch(talk: ChatTalk, write: Write, person: Lines | None) -> None:
    """Show what the turn waits for, and ask the person to approve tools, one after the other."""
    shown, asked = "", set[str]()
    asking: asyncio.Task[None] | None = None
    try:
        async with aclosing(talk.progress()) as progress:
            async for turns in progress:
                text = next((str(one["says"]) for one in turns if one["doing"] in SHOWN_STEPS), "")
                if text and text != shown:
                    write(f"  [{printable(text)}]\n")
                shown = text
                approvals = {one["id"]: one for turn in turns for one in turn.get("approvals", ())}
                if asking is not None and not asking.done() and asking.get_name() not in approvals:
                    asking.cancel()
                    write("\n  [answered elsewhere, or over]\n")
                    asking = None
                unasked = [one for name, one in approvals.items() if name not in asked]
                if person is not None and unasked and (asking is None or asking.done()):
                    asked.add(unasked[0]["id"])
                    asking = asyncio.create_task(_ask_approval(talk, unasked[0], write, person), name=unasked[0]["id"])
    finally:
        if asking is not None:
            asking.cancel()
            await asyncio.wait([asking])


# The words that a person types, and what they decide.
DECISIONS: Mapping[str, Decision] = {"y": "allow", "yes": "allow", "t": "allow_for_turn", "n": "deny", "no": "deny"}


async def _ask_approval(talk: ChatTalk, request: JSON, write: Write, person: Lines) -> None:
    """Ask the person whether this tool may run, until the answer is understood, and pass it on."""
    lines = [f"{request['tool']}{' of a sub-agent' if request['sub_agent'] else ''} waits for your approval:"]
    lines += [f"  {line}" for line in request["text"].split("\n")]
    answers = "y once, t for this turn, n WORDS no"
    if request["left_out"]:  # nobody allows what they have not been shown
        lines.append(f"and {request['left_out']} more characters: to allow it, read all of it on the page")
        answers = "n WORDS no"
    if request["before"] is not None:
        lines.append("The same call was allowed in an earlier attempt of this turn: it may have run already.")
    write("".join(f"  {printable(line)}\n" for line in lines))
    while True:
        person.forget()  # typed before the question was shown: no answer to it
        write(f"  may it? {answers} {PROMPT}")
        line = await person.next()
        if line is None:
            return
        typed, _, reason = line.strip().partition(" ")
        decision = DECISIONS.get(typed.lower())
        if decision == "deny" or (decision is not None and not reason and not request["left_out"]):
            break
    try:
        await talk.decide(request["id"], decision, reason.strip() or None)
    except ProxyError as exc:
        write(f"  error: {printable(exc.message)}\n")


def _footer(turn: JSON) -> str:
    """A line with the kind of continuation, the session and the cost; one for the tools; one for each repair."""
    cost = "" if turn["cost_usd"] is None else f", ${turn['cost_usd']:.4f}"
    out = [f"  [{turn['continuity']}, session {(turn['session_id'] or 'none')[:8]}{cost}]"]
    if turn["tools"]:
        out.append(f"  [used {printable(', '.join(turn['tools']))}]")
    repairs = [link["says"] for link in turn["links"] if link["reason"] in SHOWN_LINKS]
    out += [f"  [{printable(text)}]" for text in (*repairs, *turn["says"])]
    return "".join(f"{line}\n" for line in out)


def printable(text: str) -> str:
    """The answer without control characters that steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


# --- the two kinds of connection


@asynccontextmanager
async def _talk(settings: Settings, owner: str, agent_id: str, model: str) -> AsyncIterator[tuple[ChatTalk, str]]:
    """A connection to the server that runs on this `var`, else to an engine of this process; and its name."""
    served = served_at(settings.var)
    if served is not None and await alive(served):
        timeout = httpx.Timeout(settings.turn_timeout, connect=10)
        async with client_of(served, timeout, key_of(settings, owner)) as http:
            yield RemoteTalk(http, agent_id, model), str(served)
        return
    async with engine_in(settings, log_to_file=True) as engine:
        if any(profile.approve for profile in settings.profiles.values()):
            # A stored self-check says whether this CLI asks for approvals.
            await SelfChecks(settings, engine.store, lambda _text: None).recall()
        yield LocalTalk(engine, owner, agent_id, model, audit_of(settings)), "an engine of its own"


class LocalTalk:
    """A connection to an engine in this process."""

    def __init__(self, engine: Engine, owner: str, agent_id: str, model: str, audit: Audit | None) -> None:
        self._engine = engine
        self._audit = audit
        self._owner = owner
        self._agent_id = agent_id
        self.model = model
        self._turn_id = ""

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        # A line that is typed twice is two turns, so no two requests may look alike.
        unique = hashlib.sha256(uuid.uuid4().bytes).hexdigest()
        request = TurnRequest(self.model, (Message.user(text),), unique, self._owner, self._agent_id)
        answer = await self._engine.submit(request)
        self._turn_id = answer.turn_id
        done = False
        try:
            async for event in answer.events():
                if isinstance(event, BlockDelta) and event.delta.get("type") == "text_delta":
                    yield str(event.delta["text"])
            answer.acknowledge()
            done = True
        finally:
            if not done:
                answer.cancel()
            answer.leave()

    async def progress(self) -> AsyncGenerator[Sequence[JSON], None]:
        last: Sequence[JSON] = ()
        while True:
            now = feed.progress([one for one in self._engine.progress() if one.turn.id == self._turn_id])
            if now != last:
                yield now
            last = now
            await asyncio.sleep(LOOK)

    async def decide(self, approval_id: str, decision: Decision, word: str | None) -> None:
        verdict = Verdict(OUTCOMES[decision], self._owner, word)
        self._note("approve", approval=approval_id, outcome=verdict.outcome)
        await self._engine.approve(self._owner, self._agent_id, approval_id, verdict)

    def _note(self, action: Action, **detail: object) -> None:
        if self._audit is not None:
            note(self._audit, action, "command", f"chat {self._agent_id}", self._owner, **detail)

    async def rewind(self, to: str) -> JSON:
        self._note("rewind")
        return (await self._engine.rewind(self._owner, self._agent_id, to)).as_json()

    async def last(self) -> JSON | None:
        agent = await self._engine.store.agent(self._owner, self._agent_id)
        if agent is None:
            return None
        rows: list[JSON] = views.page(agent, await self._engine.store.page(agent.key, before_seq=None, limit=1))["data"]
        return rows[0] if rows else None


class RemoteTalk:
    """A connection to a running server. If an answer is not read to its end, the server ends the turn after
    `disconnect_grace`; a turn that waits for a limit is cancelled."""

    def __init__(self, http: httpx.AsyncClient, agent_id: str, model: str) -> None:
        self._http = http
        self._agent_id = agent_id
        self._agent = encoded_agent_id(agent_id)
        self.model = model

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        body = {"model": self.model, "stream": True, "messages": [{"role": "user", "content": text}]}
        headers = {"X-Agent-Id": self._agent}
        cancel: JSON | None = None  # the request that cancels the turn, if only that ends it
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise _error(await answer.aread())
                if "retry-after" in answer.headers:
                    cancel = {"turn": answer.headers["x-turn-id"]}
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        chunk = json.loads(line.removeprefix("data:"))
                        if "error" in chunk:
                            raise from_dict(chunk["error"])
                        yield "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
            cancel = None
        except httpx.HTTPError as exc:
            raise UpstreamError("the server ended in the middle of the answer: send it again") from exc
        finally:
            if cancel is not None:
                with contextlib.suppress(httpx.HTTPError):  # the turn has begun, or the server is gone
                    await self._http.post(f"/v1/chains/{self._agent}/cancel", json=cancel)

    def progress(self) -> AsyncGenerator[Sequence[JSON], None]:
        return progress_of(self._http, self._agent_id)

    async def decide(self, approval_id: str, decision: Decision, word: str | None) -> None:
        await self._post("approve", {"approval": approval_id, "decision": decision, "word": word})

    async def rewind(self, to: str) -> JSON:
        return await self._post("rewind", {"to": to})

    async def _post(self, what: str, body: JSON) -> JSON:
        try:
            answer = await self._http.post(f"/v1/chains/{self._agent}/{what}", json=body)
        except httpx.HTTPError as exc:
            raise UpstreamError("the server went away") from exc
        if answer.status_code != 200:
            raise _error(answer.content)
        done: JSON = answer.json()
        return done

    async def last(self) -> JSON | None:
        try:
            answer = await self._http.get(f"/v1/chains/{self._agent}/turns", params={"limit": 1})
        except httpx.HTTPError as exc:
            raise UpstreamError("the server ended after its answer") from exc
        rows: list[JSON] = answer.json()["data"] if answer.status_code == 200 else []
        return rows[0] if rows else None


def _error(body: bytes) -> ProxyError:
    try:
        return from_dict(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return UpstreamError("the program at this address is not a cli-session-proxy server: see serve.json in --var")


# --- the terminal


class Lines:
    """Lines of a file descriptor. A thread reads one when it is asked for, so that the event loop never blocks on a
    key.

    A daemon thread on the bare descriptor: it is left in its read when the program ends.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Semaphore(0)
        self._got: asyncio.Queue[str | None] = asyncio.Queue(1)
        self._coming: asyncio.Task[str | None] | None = None  # a read under way; its caller may be gone
        threading.Thread(target=self._read, daemon=True, name="chat-input").start()

    async def next(self) -> str | None:
        """The next line without its end; None at the end of input. After a cancellation the next caller gets the
        line."""
        if self._coming is None:
            self._wanted.release()
            self._coming = asyncio.create_task(self._got.get())
        line = await asyncio.shield(self._coming)
        self._coming = None
        return line

    def forget(self) -> None:
        """Drop the lines typed so far."""
        termios.tcflush(self._fd, termios.TCIFLUSH)

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        buffer, ended = "", False
        while True:
            self._wanted.acquire()
            while "\n" not in buffer and not ended:
                data = os.read(self._fd, READ)
                ended = not data
                buffer += decoder.decode(data, ended)
            line, _, buffer = buffer.partition("\n")
            self._loop.call_soon_threadsafe(self._got.put_nowait, line if line or not ended or buffer else None)


class Interrupts:
    """While it is entered, Ctrl-C sets `pressed` and calls `action`."""

    def __init__(self) -> None:
        self.action: Callable[[], object] = lambda: None
        self.pressed = False

    def __enter__(self) -> Interrupts:
        def on_signal() -> None:
            self.pressed = True
            self.action()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
