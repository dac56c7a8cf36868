"""A server behind a URL, which is known by nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import httpx

from ..errors import TargetError
from ..provider.upstream import Upstream
from ..talk import RequestRefused, Talk
from .base import FAKE_KEY, START, TURN, Surface
from .program import Program

WireName = Literal["chat", "responses", "messages", "generate", "ollama"]

POLL = 0.05
MAX_TOKENS = 1024


@dataclass
class ServerTarget:
    """A server behind `url`, in which `{agent}` stands for the conversation's name; or `agent_header` carries it.

    `history_url`: where a client asks that sends its whole history, where that is another address.

    `start` is its command; without one it runs already, and cannot be restarted. `config` is where its CLI keeps
    transcripts, where that is known.
    """

    url: str
    wire: WireName
    upstream: Upstream
    folder: Path
    history_url: str | None = None
    agent_header: str | None = None
    key: str | None = None
    model: str = "sonnet"
    start: str | None = None
    stop: str | None = None
    config: Path | None = None
    _program: Program | None = field(default=None, repr=False)

    @property
    def surfaces(self) -> frozenset[Surface]:
        found: set[Surface] = set()
        if self.history_url is not None or "{agent}" not in self.url:
            found.add("history")
        if "{agent}" in self.url or self.agent_header or self.wire == "responses":
            found.add("id")
        if self.start is not None:
            found.add("process")
        if self.config is not None:
            found.add("files")
        return frozenset(found)

    def talk(self, agent: str, *, by_id: bool) -> ServerTalk:
        return ServerTalk(self, agent, by_id=by_id)

    async def up(self) -> None:
        at = urlsplit(self.url)
        if self.start is not None:
            self._program = Program(self.start, self.upstream, self.folder, self.config, self.stop)
            await self._program.start()
        deadline = time.monotonic() + START
        while True:
            try:
                _, writer = await asyncio.open_connection(at.hostname, at.port or 80)
            except OSError as exc:
                program = self._program
                ended = program is not None and program.process is not None and program.process.returncode is not None
                if ended or time.monotonic() > deadline:
                    said = "" if program is None else program.said()
                    raise TargetError(f"nothing takes connections at {self.url}: start it first. {said}") from exc
                await asyncio.sleep(POLL)
            else:
                writer.close()
                return

    async def down(self, *, kill: bool = False) -> None:
        if self._program is not None:
            await self._program.end(by_kill=kill)

    def kill_clis(self) -> bool:
        return self._program is not None and self._program.kill_clis()


class ServerTalk(Talk):
    """A conversation with a server. `by_id`: only what is new is sent; else all of it, and no name."""

    def __init__(self, server: ServerTarget, agent: str, *, by_id: bool) -> None:
        super().__init__(server.upstream, server.model)
        self.server = server
        self.agent = agent
        self.by_id = by_id
        self.history: list[tuple[str, str]] = []  # what the client keeps: (words, answer)
        self.previous: str | None = None

    async def _say(self, said: str) -> str:
        count = len(self.upstream.requests)
        path, body = self._body(said)
        base = self.server.url if self.by_id else self.server.history_url or self.server.url
        base = base.replace("{agent}", quote(self.agent, safe=""))
        headers = {"Authorization": f"Bearer {self.server.key or FAKE_KEY}"}
        if self.server.agent_header and self.by_id:
            headers[self.server.agent_header] = quote(self.agent, safe="")
        data = await self.unless_left(_post(base.rstrip("/") + path, body, headers))
        answer = _answer(self.server.wire, data)
        if self.server.wire == "responses":
            self.previous = data.get("id")
        self.history.append((said, answer))
        self.noted(said, count)
        return answer

    def _body(self, said: str) -> tuple[str, dict[str, Any]]:
        """(path, body) of a request on the target's wire."""
        turns: list[tuple[str, str]] = []
        for words, answer in () if self.by_id else self.history:
            turns += [("user", words), ("assistant", answer)]
        turns.append(("user", said))
        messages = [{"role": role, "content": text} for role, text in turns]
        match self.server.wire:
            case "chat":
                return "/chat/completions", {"model": self.model, "messages": messages}
            case "messages":
                return "/messages", {"model": self.model, "max_tokens": MAX_TOKENS, "messages": messages}
            case "responses":
                more = {"previous_response_id": self.previous} if self.by_id and self.previous else {}
                return "/responses", {"model": self.model, "input": messages, **more}
            case "generate":
                names = {"user": "user", "assistant": "model"}
                contents = [{"role": names[role], "parts": [{"text": text}]} for role, text in turns]
                return f"/models/{self.model}:generateContent", {"contents": contents}
            case "ollama":
                return "/api/chat", {"model": self.model, "messages": messages, "stream": False}


async def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    raw = json.dumps(body).encode()
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=TURN) as http:
            got = await http.post(url, content=raw, headers={**headers, "Content-Type": "application/json"})
    except httpx.TimeoutException as exc:
        raise RequestRefused("no answer in time") from exc
    except httpx.HTTPError as exc:
        raise RequestRefused("connection lost") from exc
    if got.status_code != 200:
        raise RequestRefused(f"HTTP {got.status_code}")
    try:
        data = got.json()
    except ValueError as exc:
        raise RequestRefused("no JSON") from exc
    return data if isinstance(data, dict) else {}


def _answer(wire: WireName, data: Mapping[str, Any]) -> str:
    """The words of an answer. Raises `RequestRefused` where it has none, such as an error that is sent as 200."""
    try:
        match wire:
            case "chat":
                text = data["choices"][0]["message"]["content"]
            case "messages":
                text = "".join(block.get("text", "") for block in data["content"])
            case "responses":
                text = "".join(part.get("text", "") for item in data["output"] for part in item.get("content") or ())
            case "ollama":
                text = data["message"]["content"]
            case "generate":
                text = "".join(part.get("text", "") for part in data["candidates"][0]["content"]["parts"])
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise RequestRefused("an answer without words") from exc
    if not text:
        raise RequestRefused("an empty answer")
    return str(text)
