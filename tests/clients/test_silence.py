"""A model that is silent for long, before its first word and between two: what keeps the stream alive harms no client.

Each wire's signs of life go through the clients of its vendor, in Python and in JavaScript. The interval is short here;
the bytes are those of any interval.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from google import genai
from google.genai import types

from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop, Finished
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from cli_session_proxy.wires import answers

from ..conftest import ROOT, required
from ..every_wire import google_client
from ..fakes import TURN, FakeEngine, Step, started
from ..serving import serving

PACKAGES = ROOT / ".tools" / "vendors"
STREAM = Path(__file__).parent / "vendors" / "stream.mjs"
# Signs of life in each silence.
SIGNS = 3
MESSAGES: Any = [{"role": "user", "content": "hello"}]
WIRES = ("chat", "responses", "messages", "generate", "interactions", "ollama-chat", "ollama-generate")


class Silence(asyncio.Event):
    """Ends when `SIGNS` signs of life were written to the client."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = False
        self.signs = 0

    async def wait(self) -> Any:
        self.waiting = True
        return await super().wait()

    def sign(self) -> None:
        if self.waiting and not self.is_set():
            self.signs += 1
            if self.signs == SIGNS:
                self.set()


@asynccontextmanager
async def silent_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Step | None = None
) -> AsyncIterator[tuple[str, list[Silence]]]:
    """The root of a server whose model is silent twice in each answer, and the silences of the last one."""
    silences: list[Silence] = []
    write = answers.Client.write

    async def written(client: answers.Client, data: bytes, headers: dict[str, str], **how: bool) -> None:
        await write(client, data, headers, **how)
        for silence in silences:
            silence.sign()

    def script(_: Any) -> list[Step]:
        silences[:] = [Silence(), Silence()]
        first, second = (BlockDelta(0, {"type": "text_delta", "text": text}) for text in ("Hello ", "there."))
        rest: list[Step] = [ends] if ends is not None else [second, BlockStop(0), Finished(TURN)]
        return [started(), silences[0], BlockStart(0, {"type": "text", "text": ""}), first, silences[1], *rest]

    monkeypatch.setattr(answers.Client, "write", written)
    settings = Settings(var=tmp_path / "var", port=0, keepalive=0.02)
    async with serving(FakeEngine(script).as_engine(), settings) as url:
        yield url.removesuffix("/v1"), silences


def python_stream(wire: str, root: str) -> list[str | None]:
    """The pieces of an answer's text by the vendor's blocking client for Python."""
    if wire.startswith("ollama"):
        with ollama.Client(host=root, trust_env=False, timeout=30) as local:
            if wire == "ollama-generate":
                return [part.response for part in local.generate(model="sonnet", prompt="hello", stream=True)]
            return [part.message.content for part in local.chat(model="sonnet", messages=MESSAGES, stream=True)]
    if wire in ("chat", "responses"):
        with openai.OpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as gpt:
            if wire == "chat":
                chunks = gpt.chat.completions.create(model="sonnet", messages=MESSAGES, stream=True)
                return [chunk.choices[0].delta.content for chunk in chunks]
            events = gpt.responses.create(model="sonnet", input="hello", stream=True)
            return [event.delta for event in events if event.type == "response.output_text.delta"]
    if wire == "messages":
        with (
            anthropic.Anthropic(base_url=root, api_key="k", max_retries=0) as claude,
            claude.messages.stream(model="sonnet", max_tokens=99, messages=MESSAGES) as stream,
        ):
            return list(stream.text_stream)
    with (
        httpx.Client(trust_env=False, timeout=30) as http,
        genai.Client(api_key="k", http_options=types.HttpOptions(base_url=root, httpx_client=http)) as gemini,
    ):
        if wire == "interactions":
            steps: Any = gemini.interactions.create(model="sonnet", input="hello", stream=True)
            return [event.delta.text for event in steps if event.event_type == "step.delta"]
        chat = gemini.chats.create(model="sonnet")
        said = [chunk.text for chunk in chat.send_message_stream("hello")]
        kept = [part.text for content in chat.get_history(curated=True)[1:] for part in content.parts or []]
        assert kept == said
        return said


def assert_heard(pieces: list[str | None], silences: list[Silence]) -> None:
    assert "".join(piece or "" for piece in pieces) == "Hello there."
    assert [silence.signs for silence in silences] == [SIGNS, SIGNS]


@pytest.mark.parametrize("wire", WIRES)
async def test_the_vendors_client_for_python_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    async with silent_model(tmp_path, monkeypatch) as (root, silences):
        assert_heard(await asyncio.to_thread(python_stream, wire, root), silences)


async def test_googles_asynchronous_client_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent_model(tmp_path, monkeypatch) as (root, silences), google_client(root) as client:
        stream = await client.models.generate_content_stream(model="sonnet", contents="hello")
        assert_heard([chunk.text async for chunk in stream], silences)


async def test_googles_clients_are_told_of_an_error_after_a_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = silent_model(tmp_path, monkeypatch, ends=ProxyError("it broke"))
    async with broken as (root, _), google_client(root) as client:
        with pytest.raises(genai.errors.APIError, match="it broke"):
            _ = [_ async for _ in await client.models.generate_content_stream(model="sonnet", contents="hello")]


async def test_the_vendors_clients_for_javascript_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """In one program, which takes longer to load them than to ask."""
    required(PACKAGES / "node_modules" / "openai", "make tools", what="the vendors' clients for JavaScript")
    async with silent_model(tmp_path, monkeypatch) as (root, silences):
        child = await asyncio.create_subprocess_exec(
            "node", "--input-type=module", "--eval", STREAM.read_text(), root,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            cwd=PACKAGES, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            for wire in WIRES:
                child.stdin.write(f"{wire}\n".encode())
                said = await asyncio.wait_for(child.stdout.readline(), 60)
                with subtests.test(wire):
                    if not said.startswith(b"["):
                        child.stdin.close()  # else what else it says has no end
                        pytest.fail((said + await asyncio.wait_for(child.stdout.read(), 60)).decode())
                    assert_heard(json.loads(said), silences)
            child.stdin.close()
            assert await asyncio.wait_for(child.wait(), 60) == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
