"""Agent programs in their default configuration, against `serve` over the real CLI.

Each gets an environment that is built up here: a HOME of its own, a key that is none, one address on loopback. Each
turn tells a fact and has the program read a file with its own tool; now and then the proxy is killed, every transcript
is deleted, and the program goes on by its own resume. What is judged is what reached the model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import pytest

from cli_session_proxy.domain.client_tools import cli_name
from cli_session_proxy.settings import Settings
from turnfault.provider.script import TOOL_RESULT, Behaviour, Reply, ToolUse
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings, required
from ..obedient import asked_schema, instance, newest
from ..outputs import output_of
from ..serving import serve
from .programs import MORE, PROGRAMS, Program
from .relay import Relay, share_kept

# Seconds for one turn of a program that starts Node.js and a sandbox first, on a busy machine.
TURN = 240.0
# Of what the program itself keeps of a request, the proxy keeps this share at least.
KEPT = 0.97

_FACT = re.compile(r"^Remember: secret (\d+) is value-", re.M)


class HasBody(Protocol):
    @property
    def body(self) -> dict[str, Any]: ...


Request = TypeVar("Request", bound=HasBody)


class History:
    """A conversation of one program. `behave` is the model: it has every fact's file read, and says what is in it."""

    def __init__(self, program: Program, settings: Settings, relay: Relay, cwd: Path) -> None:
        self.program = program
        self.settings = settings
        self.relay = relay
        self.cwd = cwd
        self.told = 0
        self._env = {
            "PATH": os.environ["PATH"], "HOME": str(program.home), "PWD": str(program.work), "TERM": "dumb",
            "NO_COLOR": "1", "TZ": settings.claude_env["TZ"], **program.set_up(),
        }  # fmt: skip

    def behave(self, seen: Seen) -> Behaviour:
        schema = asked_schema(newest(seen))
        if schema is not None:
            return Reply(json.dumps(instance(schema)))
        fact = _FACT.search(seen.prompt)
        tool = cli_name(self.program.tool)
        offered = any(known["name"] == tool for known in seen.body.get("tools") or ())
        if fact is None or not offered or seen.texts()[-1][1].startswith(TOOL_RESULT):
            return Reply()
        return ToolUse([(tool, self.program.read(self._file(int(fact[1]))))])

    def _file(self, number: int) -> Path:
        return self.program.work / f"note-{number}.txt"

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """A proxy that is killed at the end; then nothing of the CLI's own sessions is left."""
        async with serve(self.settings, self.cwd) as (base, process):
            host, _, port = base.removeprefix("http://").partition("/")[0].partition(":")
            self.relay.target = (host, int(port))
            yield
            process.kill()
            await process.wait()
        assert self.settings.claude_config_dir is not None
        shutil.rmtree(self.settings.claude_config_dir / "projects")

    async def tell(self) -> None:
        """The next fact, and the file that belongs to it."""
        self.told += 1
        self._file(self.told).write_text(f"{content(self.told)}\n")
        said = await self.say(f"Remember: secret {self.told} is value-{self.told}", first=self.told == 1)
        assert content(self.told) in said

    async def say(self, prompt: str, *, first: bool = False) -> str:
        """What the program printed."""
        command = self.program.command(prompt, first=first)
        return await output_of(*command, within=TURN, cwd=self.program.work, env=self._env)


def content(number: int) -> str:
    """Of a fact's file: neither the prompt, nor the call, nor another result holds it."""
    return f"content-{number}-{number * 7919}"


def conversation(requests: Sequence[Request]) -> list[Request]:
    """The requests with the same tools as the first that has any: side calls (titles, routing, memory) have others."""

    def names(data: Any) -> set[str]:
        if isinstance(data, list):
            return set().union(*map(names, data))
        if not isinstance(data, dict):
            return set()
        own: set[str] = {data["name"]} if isinstance(data.get("name"), str) else set()
        return own.union(*map(names, data.values()))

    tools = [names([request.body.get("tools"), _late_tools(request.body)]) for request in requests]
    first = next(filter(None, tools))
    return [request for request, offered in zip(requests, tools, strict=True) if offered == first]


def _late_tools(body: dict[str, Any]) -> list[Any]:
    """Codex tells its tools as an item of the conversation."""
    items = body.get("input", [])
    return [item for item in items if isinstance(item, dict) and item.get("type") == "additional_tools"]


def judge(history: History, upstream: Upstream) -> None:
    """No request was refused, every fact and every result reached the model once, and the prefix held."""
    assert not upstream.refused
    assert not history.relay.refused()
    reached = conversation(upstream.requests)
    texts = reached[-1].texts()
    for number in range(1, history.told + 1):
        assert sum(text.count(f"secret {number} is value-") for role, text in texts if role == "user") == 1, number
        assert sum(text.count(content(number)) for _, text in texts if text.startswith(TOOL_RESULT)) == 1, number
    sent = conversation(history.relay.exchanges)
    assert len(sent) == len(reached)
    shares = [
        (share_kept(sent[at - 1], sent[at]), reached[at].prefix_kept(reached[at - 1])) for at in range(1, len(sent))
    ]
    assert all(proxy >= KEPT * program for program, proxy in shares), shares


@pytest.fixture
def home() -> Iterator[Path]:
    """The program's own, not below /tmp: the sandbox that Codex runs its tools in has a /tmp of its own."""
    with tempfile.TemporaryDirectory(prefix="csp-agent-", dir="/var/tmp", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
async def history(
    request: pytest.FixtureRequest, claude_2: Path, make_settings: MakeSettings, claude_env: dict[str, str],
    upstream: Upstream, home: Path, tmp_path: Path,
) -> AsyncIterator[History]:  # fmt: skip
    # Where it is about noon now: at midnight programs tell the model another date, and their prefix is gone.
    claude_env["TZ"] = f"Etc/GMT{time.gmtime().tm_hour - 12:+d}"
    work = tmp_path / "work"
    work.mkdir()
    async with Relay() as relay:
        program = (PROGRAMS | MORE)[request.param](relay.url, home, work)
        if request.param == "claude":
            program.binary = claude_2
        required(program.binary, "make tools, or make agents", what=request.param)
        made = History(program, make_settings(claude_bin=claude_2), relay, tmp_path)
        upstream.behave = made.behave
        try:
            yield made
        finally:
            for pid in program.left():
                os.kill(pid, signal.SIGTERM)


# Each time: programs that go on by Messages and by Responses. Gemini CLI's way over generateContent is in
# wires/generate/test_gemini_cli.py; Qwen Code is Gemini CLI over Chat, which `tests/clients` has many clients of.
QUICK = frozenset({"claude", "codex"})


@pytest.mark.parametrize(
    "history",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in PROGRAMS],
    indirect=True,
)
@pytest.mark.sample(1)
async def test_a_program_goes_on_by_its_own_resume_after_a_kill_and_with_no_transcript_left(
    history: History, upstream: Upstream
) -> None:
    for _ in range(2):
        async with history.served():
            await history.tell()
    judge(history, upstream)


@pytest.mark.agents
@pytest.mark.timeout(900)
@pytest.mark.parametrize("history", [*PROGRAMS, *MORE], indirect=True)
async def test_ten_turns_with_tools_and_four_proxies(history: History, upstream: Upstream) -> None:
    for turns in (1, 3, 2, 4):
        async with history.served():
            for _ in range(turns):
                await history.tell()
    async with history.served():
        known = "; ".join(f"secret {number} is value-{number}" for number in range(1, 11))
        assert f"I remember: {known}." in await history.say("recall")
    judge(history, upstream)


@pytest.mark.agents
@pytest.mark.timeout(900)
@pytest.mark.parametrize("history", ["gptme"], indirect=True)
async def test_a_title_that_it_asks_for_is_no_agent_in_the_list(history: History, upstream: Upstream) -> None:
    async with history.served():
        await history.tell()
        async with httpx.AsyncClient(base_url=history.relay.url, trust_env=False, timeout=30) as client:
            listed = (await client.get("/v1/chains")).json()
    assert any("title" in seen.prompt for seen in upstream.requests)
    assert [row["turns"] for row in listed["data"]] == [len(conversation(upstream.requests))]
