"""A conversation that goes from model to model, and what each upstream was shown of it."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from cli_session_proxy.domain.models import Block, Message, Tool, Turn
from cli_session_proxy.engine.engine import Engine
from turnfault.provider.script import Reply as Thought
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ...talking import ask
from .servers import Provider, Reply, texts

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "The weather of a city", SCHEMA)
# What the CLI adds by itself: reminders, and where it put an image.
OF_THE_CLI = ("<system-reminder>", "[Image: source:")
MODELS = ("sonnet", "gpt", "gemini")


def picture(number: int) -> Block:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


class Talk:
    """Tells facts to one agent, by any model. `path` is what the chain has acknowledged, as (role, text) pairs."""

    def __init__(self, engine: Engine, upstream: Upstream, provider: Provider) -> None:
        self.engine = engine
        self.upstream = upstream
        self.provider = provider
        self.path: list[tuple[str, str]] = []
        self.turns: list[Turn] = []
        self.number = 0
        self.open: Block | None = None

    async def tell(self, model: str, *, image: bool = False, call: bool = False, **more: Any) -> Turn:
        """One turn. An open call is answered first; `call`: the model calls the client's tool again."""
        self.number += 1
        blocks: list[Block] = []
        if self.open is not None:
            result = {"type": "tool_result", "tool_use_id": self.open["id"], "content": f"result {self.number}"}
            blocks.append(result)
            self.path.append(("result", f"result {self.number}"))
        else:
            blocks.append({"type": "text", "text": f"fact {self.number}"})
            if image:
                blocks.append(picture(self.number))
            self.path += [("user", f"fact {self.number}"), *([("image", "")] if image else [])]
        said = f"noted {self.number} by {model}"
        if model == "sonnet":
            if call:
                use = ToolUse([("mcp__client__get_weather", {"city": f"c{self.number}"})], text=said)
                self.upstream.next(use)
            else:
                self.upstream.next(Thought(said, thinking="a sealed thought"))
        else:
            calls: Any = [(None, "get_weather", {"city": f"c{self.number}"})] if call else []
            if call and model == "gpt":
                calls = [
                    ("call_0", "get_weather", {"city": f"c{self.number}"})
                ]  # the same id each time, as some give it
            self.provider.next(Reply(said, calls=calls, thinking=f"pondering {self.number}"))
        turn = await ask(self.engine, Message("user", tuple(blocks)), model=model, tools=(WEATHER,), **more)
        assert turn.status == ("requires_action" if call else "completed"), turn.error
        self.path.append(("assistant", said))
        self.open = None
        if call:
            (self.open,) = (block for block in turn.output if block["type"] == "tool_use")
            self.path.append(("call", f"c{self.number}"))
        self.turns.append(turn)
        return turn

    def shown(self, model: str) -> list[tuple[str, str]]:
        """What the last request to this model told of the conversation, in the words of `path`."""
        if model == "sonnet":
            return claude_told(self.upstream.requests[-1].messages)
        wire = self.provider.openai if model == "gpt" else self.provider.gemini
        names = {"tool": "result"}
        out = []
        for role, text in texts(wire[-1])[1 if model == "gpt" else 0 :]:
            if text == "<image_url>":
                out.append(("image", ""))
            elif role == "call":
                out.append(("call", text.partition('"city": "')[2].partition('"')[0]))
            elif role == "tool":
                out.append(("result", _result(text)))
            else:
                out.append((names.get(role, role), text))
        return out

    def told(self) -> list[tuple[str, str]]:
        """The path without the answer to the last turn."""
        end = max(at for at, (role, _) in enumerate(self.path) if role in ("user", "image", "result"))
        return self.path[: end + 1]


def claude_told(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for message in messages:
        if message["role"] == "system":  # the CLI's own, where it runs
            continue
        content: Any = message["content"]
        blocks: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in blocks:
            if block["type"] == "text" and not block["text"].startswith(OF_THE_CLI):
                out.append((message["role"], block["text"]))
            elif block["type"] == "image":
                out.append(("image", ""))
            elif block["type"] == "tool_use":
                out.append(("call", block["input"]["city"]))
            elif block["type"] == "tool_result":
                inner = block["content"]
                out.append(("result", inner if isinstance(inner, str) else inner[0]["text"]))
    return out


def _result(text: str) -> str:
    return text if text.startswith("result") else next(part for part in text.split('"') if part.startswith("result"))
