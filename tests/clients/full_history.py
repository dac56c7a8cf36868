"""The vendors' own clients, each on its wire, each with its whole history as its SDK keeps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
from google.genai import types
from google.genai.client import AsyncClient
from openai.lib.streaming.chat import ChatCompletionStreamState

from ..every_wire import google_client, ollama_client

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = "get_weather"
RESULT = "it is sunny"
JOIN = "\n\n"


class Historian(ABC):
    """A conversation that the client resends with every request. `words` and `calls` are the last answer's."""

    def __init__(self, client: Any, *, stream: bool, tools: bool) -> None:
        self.client = client
        self.stream = stream
        self.tools = tools
        self.history: list[Any] = []
        self.words = ""
        self.calls: list[Any] = []

    @abstractmethod
    async def ask(self, text: str) -> None: ...

    @abstractmethod
    async def bring(self) -> None:
        """The results of the calls."""


class Chat(Historian):
    async def ask(self, text: str) -> None:
        await self._say({"role": "user", "content": text})

    async def bring(self) -> None:
        await self._say(*({"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in self.calls))

    async def _say(self, *new: Any) -> None:
        self.history += new
        function = {"name": TOOL, "description": "weather", "parameters": SCHEMA}
        tools: Any = [{"type": "function", "function": function}] if self.tools else openai.omit
        wanted: Any = {"model": "sonnet", "messages": self.history, "tools": tools}
        if self.stream:
            state: Any = ChatCompletionStreamState()
            async for chunk in await self.client.chat.completions.create(**wanted, stream=True):
                state.handle_chunk(chunk)
            message = state.get_final_completion().choices[0].message
        else:
            message = (await self.client.chat.completions.create(**wanted)).choices[0].message
        self.history.append(message.model_dump(exclude_none=True))
        self.words, self.calls = message.content or "", message.tool_calls or []


class Responses(Historian):
    async def ask(self, text: str) -> None:
        await self._say({"role": "user", "content": text})

    async def bring(self) -> None:
        results = ({"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in self.calls)
        await self._say(*results)

    async def _say(self, *new: Any) -> None:
        self.history += new
        function = {"type": "function", "name": TOOL, "parameters": SCHEMA, "strict": False}
        wanted: Any = {"model": "sonnet", "input": self.history, "tools": [function] if self.tools else openai.omit}
        if self.stream:
            async with self.client.responses.stream(**wanted) as events:
                streamed = [event.item async for event in events if event.type == "response.output_item.done"]
                response = await events.get_final_response()
            assert [item.id for item in streamed] == [item.id for item in response.output]
        else:
            response = await self.client.responses.create(**wanted)
        self.history += [item.to_dict() for item in response.output]
        said = [item for item in response.output if item.type == "message"]
        self.words = JOIN.join(part.text for item in said for part in item.content)
        self.calls = [item for item in response.output if item.type == "function_call"]


class Messages(Historian):
    async def ask(self, text: str) -> None:
        await self._say(text)

    async def bring(self) -> None:
        await self._say([{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in self.calls])

    async def _say(self, content: Any) -> None:
        self.history.append({"role": "user", "content": content})
        tools: Any = [{"name": TOOL, "input_schema": SCHEMA}] if self.tools else anthropic.omit
        wanted: Any = {"model": "sonnet", "max_tokens": 1000, "messages": self.history, "tools": tools}
        if self.stream:
            async with self.client.messages.stream(**wanted) as events:
                message = await events.get_final_message()
        else:
            message = await self.client.messages.create(**wanted)
        self.history.append({"role": "assistant", "content": message.content})
        self.words = JOIN.join(block.text for block in message.content if block.type == "text")
        self.calls = [block for block in message.content if block.type == "tool_use"]


class Generate(Historian):
    def __init__(self, client: Any, *, stream: bool, tools: bool) -> None:
        super().__init__(client, stream=stream, tools=tools)
        function = types.FunctionDeclaration(name=TOOL, description="weather", parameters_json_schema=SCHEMA)
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[function])] if tools else None,
            thinking_config=types.ThinkingConfig(include_thoughts=True),
        )
        self.chat = client.chats.create(model="sonnet", config=config)

    async def ask(self, text: str) -> None:
        await self._say(text)

    async def bring(self) -> None:
        results = [
            types.FunctionResponse(id=call.id, name=call.name, response={"result": RESULT}) for call in self.calls
        ]
        await self._say([types.Part(function_response=result) for result in results])

    async def _say(self, message: Any) -> None:
        if self.stream:
            answers = [chunk async for chunk in await self.chat.send_message_stream(message)]
        else:
            answers = [await self.chat.send_message(message)]
        parts = [part for answer in answers for part in answer.parts or []]
        self.words = "".join(part.text for part in parts if part.text and not part.thought)
        self.calls = [part.function_call for part in parts if part.function_call]


class Interactions(Historian):
    async def ask(self, text: str) -> None:
        await self._say({"type": "user_input", "content": [{"type": "text", "text": text}]})

    async def bring(self) -> None:
        await self._say(
            *({"type": "function_result", "call_id": call["id"], "name": TOOL, "result": RESULT} for call in self.calls)
        )

    async def _say(self, *new: Any) -> None:
        self.history += new
        wanted: Any = {"model": "sonnet", "input": self.history, "generation_config": {"thinking_summaries": "auto"}}
        if self.tools:
            wanted["tools"] = [{"type": "function", "name": TOOL, "description": "weather", "parameters": SCHEMA}]
        if self.stream:
            steps = [step async for step in _steps(await self.client.interactions.create(**wanted, stream=True))]
        else:
            made = await self.client.interactions.create(**wanted)
            steps = [step.model_dump(exclude_none=True, by_alias=True) for step in made.steps]
        self.history += steps
        said = [step["content"] for step in steps if step["type"] == "model_output"]
        self.words = JOIN.join(part["text"] for content in said for part in content)
        self.calls = [step for step in steps if step["type"] == "function_call"]


class Ollama(Historian):
    """Its history has no ids of calls: the client drops them."""

    async def ask(self, text: str) -> None:
        await self._say({"role": "user", "content": text})

    async def bring(self) -> None:
        results = ({"role": "tool", "tool_name": call.function.name, "content": RESULT} for call in self.calls)
        await self._say(*results)

    async def _say(self, *new: Any) -> None:
        self.history += new
        function = {"name": TOOL, "description": "weather", "parameters": SCHEMA}
        wanted: Any = {"model": "sonnet", "messages": self.history, "tools": None}
        if self.tools:
            wanted["tools"] = [{"type": "function", "function": function}]
        if self.stream:
            messages = [part.message async for part in await self.client.chat(**wanted, stream=True)]
        else:
            messages = [(await self.client.chat(**wanted)).message]
        self.words = "".join(message.content or "" for message in messages)
        self.calls = [call for message in messages for call in message.tool_calls or []]
        self.history.append({"role": "assistant", "content": self.words, "tool_calls": self.calls or None})


async def _steps(events: AsyncIterator[Any]) -> AsyncIterator[dict[str, Any]]:
    """The steps of a streamed interaction, of its deltas."""
    step: dict[str, Any] = {}
    async for event in events:
        if event.event_type == "step.start":
            step = event.step.model_dump(exclude_none=True, by_alias=True)
        elif event.event_type == "step.delta" and event.delta.type == "text":
            parts = step.setdefault("content", [])
            if not parts:
                parts.append({"type": "text", "text": ""})
            parts[0]["text"] += event.delta.text
        elif event.event_type == "step.stop":
            yield step


WIRES: dict[str, type[Historian]] = {
    "chat": Chat, "responses": Responses, "messages": Messages, "generate": Generate, "interactions": Interactions,
    "ollama": Ollama,
}  # fmt: skip


@asynccontextmanager
async def historian(wire: str, root: str, *, stream: bool, tools: bool = False) -> AsyncIterator[Historian]:
    """A client of this wire at a served proxy, whose address without `/v1` is `root`. It never retries."""
    client: openai.AsyncOpenAI | anthropic.AsyncAnthropic | AsyncClient
    if wire in ("chat", "responses"):
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as client:
            yield WIRES[wire](client, stream=stream, tools=tools)
    elif wire == "messages":
        async with anthropic.AsyncAnthropic(base_url=root, api_key="k", max_retries=0) as client:
            yield WIRES[wire](client, stream=stream, tools=tools)
    elif wire == "ollama":
        async with ollama_client(root) as lines:
            yield Ollama(lines, stream=stream, tools=tools)
    else:
        async with google_client(root) as client:
            yield WIRES[wire](client, stream=stream, tools=tools)
