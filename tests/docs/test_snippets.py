"""Every snippet of the README and docs/ does what it says: real CLI, scripted model, one running server for all.

A comment right above a block tells what the test needs to know and a reader need not see:

    <!-- prints: colour is teal. -->     its output holds this
    <!-- not run: needs docker -->       and why

Blocks of one document run from top to bottom, as somebody would who follows it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tomllib
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from cli_session_proxy.domain.client_tools import cli_name
from cli_session_proxy.settings import load
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import CLI_ENV, ROOT, required
from . import forking

# Documents beside the test's own limit: a heavy client needs seconds to be imported on a busy machine (s).
START_TIMEOUT = STOP_TIMEOUT = 60.0
SNIPPET_TIMEOUT = 120.0
# All clients at once, which take ten seconds of a processor.
IMPORT_TIMEOUT = 400.0

ADDRESS = "127.0.0.1:8787"
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = ("python", "sh", "js", "toml")
# What the programs of the documents import.
LIBRARIES = (
    "openai", "anthropic", "google.genai", "ollama", "litellm", "langchain_openai", "agents",
    "pydantic_ai.models.openai", "pydantic_ai.providers.openai", "claude_agent_sdk", "cli_session_proxy.provider",
)  # fmt: skip
# shown, not executed
SHOWN = ("", "text", "json", "mermaid", "yaml")

_BLOCK = re.compile(
    r"(?P<marks>(?:^[ ]*<!--[^\n]*-->\n)*)^(?P<indent>[ ]*)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.M | re.S,
)
_MARK = re.compile(r"<!-- (not run|prints): (.+?) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """`place` is `file:line` of its first line of code. `not_run` says why not."""

    place: str
    language: str
    code: str
    not_run: str | None
    prints: str | None


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    found = []
    for block in _BLOCK.finditer(text):
        marks = dict(_MARK.findall(block["marks"]))
        line = text.count("\n", 0, block.start("code")) + 1
        code = re.sub(rf"^{block['indent']}", "", block["code"], flags=re.M)
        place = f"{document.relative_to(ROOT)}:{line}"
        found.append(Block(place, block["language"].strip(), code, marks.get("not run"), marks.get("prints")))
    return found


def runs(block: Block) -> bool:
    return block.language in RUN and block.not_run is None


# Every document may speak of an agent that its reader has talked to.
ADA = Block(
    "the first words to ada",
    "sh",
    f"curl -sS --fail-with-body http://{ADDRESS}/agents/ada/v1/chat/completions -H 'Content-Type: application/json'"
    """ -d '{"model": "sonnet", "messages": [{"role": "user", "content": "Remember: the tree is ash"}]}'""",
    not_run=None,
    prints="Noted: tree is ash.",
)


class Python:
    """Runs programs one after the other, as `python -` would (`forking`)."""

    def __init__(self, env: dict[str, str], output: Path) -> None:
        self._env, self._output = env, output
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, code: str, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
        """Its exit status, and all that it said."""
        modules = [name for name in LIBRARIES if re.search(rf"(?:from|import) {name.partition('.')[0]}\b", code)]
        asked = {"code": code, "cwd": str(cwd), "env": env, "output": str(self._output), "modules": modules}
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, forking.__file__, stdin=PIPE, stdout=PIPE, env=self._env
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        pid = (await self._told(IMPORT_TIMEOUT))["pid"]
        try:
            status = (await self._told())["status"]
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            await self._told()
            raise
        return status, self._output.read_text(errors="replace")

    async def _told(self, within: float = SNIPPET_TIMEOUT) -> dict[str, int]:
        assert self._process is not None
        assert self._process.stdout is not None
        told: dict[str, int] = json.loads(await asyncio.wait_for(self._process.stdout.readline(), within))
        return told

    async def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder as a reader's checkout, the running server's address, and the environment of what is run there."""

    folder: Path
    address: str
    env: dict[str, str]
    python: Python
    done: list[tuple[str, str | None]] = field(default_factory=list)

    async def run(self, block: Block) -> None:
        """The same words again are the same command: "look at `doctor`"."""
        if (block.code, block.prints) in self.done:
            return
        if block.language == "toml":
            load(**tomllib.loads(block.code))  # a ConfigError names what is wrong
            return
        code = block.code.replace(ADDRESS, self.address)
        status: int | None
        if block.language == "python":
            env = {**self.env, "CLI_SESSION_PROXY_VAR": str(self.folder / "own-var")}
            status, output = await self.python.run(code, self.folder, env)
        else:
            status, output = await self._run(block.language, code)
        assert status == 0, f"{block.place} ended with {status}:\n{output}"
        assert block.prints is None or block.prints in output, f"{block.place} printed:\n{output}"
        self.done.append((block.code, block.prints))

    async def _run(self, language: str, code: str) -> tuple[int | None, str]:
        command, cwd = ["bash", "-eu", "-o", "pipefail"], self.folder
        if language == "js":
            command, cwd = ["node", "--input-type=module", "-"], ROOT / ".tools" / "ai-sdk"
            required(cwd / "node_modules" / "ai", "make tools", what="the Vercel AI SDK")
        child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, cwd=cwd, env=self.env, start_new_session=True
        )
        try:
            said, _ = await asyncio.wait_for(child.communicate(code.encode()), SNIPPET_TIMEOUT)
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)  # a snippet of sh has children
                await child.wait()
        return child.returncode, said.decode(errors="replace")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(claude_2: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    """`cli-session-proxy serve` on a free port, under an environment of its own."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "home").mkdir()
    for name, target in ((".venv", Path(sys.prefix)), ("docs", ROOT / "docs")):
        (folder / name).symlink_to(target)
    async with Upstream() as upstream:
        # What a real model would say where the scripted one has no words for it.
        upstream.when('"title":"City"', Reply('{"name": "Oslo", "people": 717710}'), times=None)
        upstream.when("umbrella", ToolUse([(cli_name("weather"), {"city": "Oslo"})]), times=None)
        env = _environment(folder, claude_2, upstream.url)
        python = Python(env, folder / "said")
        server = await asyncio.create_subprocess_exec(
            "cli-session-proxy", "serve", "--port", "0", stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, cwd=folder, env=env
        )
        assert server.stdout is not None
        told = asyncio.create_task(server.stdout.readline())
        try:
            line = (await asyncio.wait_for(told, START_TIMEOUT)).decode()
            listening = re.match(r"listening on http://(\S+)", line)
            assert listening, line
            reading = asyncio.create_task(server.stdout.read())  # a line a repair: nobody may wait for a full pipe
            yield Place(folder, listening[1], env, python)
            await python.close()
            server.terminate()
            await asyncio.wait_for(reading, STOP_TIMEOUT)
        finally:
            if server.returncode is None:
                server.terminate()
            await asyncio.wait_for(server.wait(), STOP_TIMEOUT)


def _environment(folder: Path, claude: Path, upstream: str) -> dict[str, str]:
    home = str(folder / "home")
    for_claude = CLI_ENV | {"ANTHROPIC_BASE_URL": upstream, "HOME": home, "CLAUDE_CODE_MAX_RETRIES": "0"}
    tools = {str(Path(found).parent) for name in ("node", "curl", "bash") if (found := shutil.which(name))}
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), *sorted(tools)]),
        "HOME": home,
        "LANG": "C.UTF-8",
        "CLI_SESSION_PROXY_VAR": str(folder / "var"),
        "CLI_SESSION_PROXY_CLAUDE_BIN": str(claude),
        "CLI_SESSION_PROXY_CLAUDE_CONFIG_DIR": str(folder / "claude-config"),
        "CLI_SESSION_PROXY_CLAUDE_ENV": json.dumps(for_claude),
        "CLI_SESSION_PROXY_SPARES": "0",
        "CLI_SESSION_PROXY_SELF_CHECK": "false",
        # no price list, no warnings for the terminal
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "AI_SDK_LOG_WARNINGS": "false",
    }


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "document",
    [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS if any(map(runs, blocks_of(path)))],
)
async def test_every_snippet_runs(document: Path, place: Place, subtests: pytest.Subtests) -> None:
    for block in [ADA, *(block for block in blocks_of(document) if runs(block))]:
        with subtests.test(msg=block.place):
            await place.run(block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_block_is_run_or_says_why_not(document: Path) -> None:
    blocks = blocks_of(document)
    unknown = [f"{block.place}: {block.language}" for block in blocks if block.language not in RUN + SHOWN]
    assert not unknown, f"neither run ({', '.join(RUN)}) nor only shown ({', '.join(SHOWN[1:])})"
    # A mark that stands above nothing that could run, or a fence that the pattern missed, would hide a snippet.
    text = document.read_text()
    marks = sum((block.not_run is not None) + (block.prints is not None) for block in blocks if block.language in RUN)
    assert len(_MARK.findall(text)) == marks
    assert len(re.findall(r"^ *(?:```|~~~)", text, re.M)) == 2 * len(blocks)
