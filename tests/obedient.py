"""A small obedient model for programs and suites that ask for more than words: `Upstream(behave=Obedient())`.

It answers by the schemas that it is given, calls the tools that it has to or that are spoken of, keeps to `max_tokens`
and stop sequences, says exactly what it is told to, counts, calculates, and knows what it was told. What it has no rule
for, the scripted model answers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from cli_session_proxy.domain.client_tools import PREFIX
from turnfault.provider.rules import BYTES_PER_TOKEN
from turnfault.provider.script import TOOL_RESULT, Block, Reply, ToolUse, scripted_answer
from turnfault.provider.seen import Seen, parts

JSON = dict[str, Any]

THOUGHT = (
    "The user asks for something small. I go through it step by step, and then I say it in as few words as I can. " * 3
)

# The proxy's own words in front of a schema that an answer has to fit (domain/structured.py).
_ASKS_FOR_JSON = re.compile(
    r"one JSON (?:object|value that validates against this JSON Schema), and nothing else.*", re.S
)
_KEY = re.compile(r'"(\w+)" \((?:an? )?(string|number|integer)')
_BARE_KEYS = re.compile(r"keys? ['`\"](\w+)['`\"](?:,? and ['`\"](\w+)['`\"])?|'(\w+)' and '(\w+)' keys", re.I)
_EXACTLY = re.compile(r"\b(?:exactly|word for word)\b[^:\n]*:\s*(.+)", re.I | re.S)
_ALWAYS = re.compile(r'reply with exactly the word "(\w+)"', re.I)
_COUNT = re.compile(r"count from (\d+) to (\d+)", re.I)
_SUM = re.compile(r"(\d+)\s*([-+*×])\s*(\d+)")
_ADD = re.compile(r"add (\d+) to your last answer", re.I)
_MINE = re.compile(r"\bmy ([\w' ]+?) is (?:called )?(\w+)", re.I)
_WHOSE = re.compile(r"what(?:'s| is) my ([\w' ]+?)\?", re.I)
_LONG = re.compile(r"\b(essay|at length|story|poem)\b", re.I)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_QUOTED = re.compile(r"'([^']+)'")
_NAME = re.compile(r"(?<=[a-z,:] )[A-Z]\w+(?: [A-Z]\w+)*")


@dataclass(frozen=True, slots=True)
class Obedient:
    """`thinks`: before each answer, where the request allows it."""

    thinks: bool = False

    def __call__(self, seen: Seen) -> Reply:
        body = seen.body
        calls = called(seen)
        content = ToolUse(calls).content if calls else [{"type": "text", "text": said(seen)}]
        assert not isinstance(content, str)
        blocks: list[Block] = list(content or ())
        reason, stop = ("tool_use" if calls else "end_turn"), None
        if not calls:
            text = blocks[0]["text"]
            ends = [(text.find(mark), mark) for mark in body.get("stop_sequences") or () if mark in text]
            if ends:
                at, stop = min(ends)
                blocks[0] = {"type": "text", "text": text[:at]}
                reason = "stop_sequence"
        thinking = (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")
        thought = THOUGHT if self.thinks and thinking else ""
        left = body["max_tokens"] * BYTES_PER_TOKEN - len(thought)
        if left <= 0:
            thought, blocks, reason, stop = thought[:left], [], "max_tokens", None
        elif not calls and len(blocks[0]["text"]) > left:
            blocks, reason, stop = [{"type": "text", "text": blocks[0]["text"][:left]}], "max_tokens", None
        size = len(thought) + sum(len(block.get("text") or json.dumps(block.get("input"))) for block in blocks)
        if thought:
            blocks.insert(0, {"type": "thinking", "thinking": thought})
        tokens = -(-size // BYTES_PER_TOKEN)
        return Reply(blocks, stop_reason=reason, stop_sequence=stop, usage={"output_tokens": max(1, tokens)})


def asked_schema(text: str) -> JSON | None:
    """The schema that the prompt demands of the answer, {} for any object; None where it demands none."""
    found = _ASKS_FOR_JSON.search(text)
    if found is None:
        return None
    start = found[0].find("\n\n{")
    schema: JSON = {} if start < 0 else json.JSONDecoder().raw_decode(found[0][start + 2 :])[0]
    return schema


def instance(schema: Any, told: str = "", root: JSON | None = None) -> Any:
    """The smallest value that fits a JSON Schema, with all properties that it requires; numbers and names as told."""
    if not isinstance(schema, dict):
        return None
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return instance(target, told, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return next((value for value in schema["enum"] if str(value) in told), schema["enum"][0])
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return instance(schema[name][0], told, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    numbers, names = _NUMBER.findall(told), _NAME.findall(told) + _QUOTED.findall(told)
    if kind == "object":
        properties: JSON = schema.get("properties", {})
        required: list[str] = schema.get("required", list(properties))
        return {name: instance(properties.get(name, {}), told, root) for name in required}
    if kind == "array":
        return [instance(schema.get("items", {}), told, root) for _ in range(schema.get("minItems", 1))]
    if kind == "integer":
        return int(float(numbers[0])) if numbers else schema.get("minimum", 1)
    if kind == "number":
        return float(numbers[0]) if numbers else schema.get("minimum", 1)
    if kind in ("boolean", "null"):
        return True if kind == "boolean" else None
    return (names[-1] if names else "x").ljust(schema.get("minLength", 1), "x")


def called(seen: Seen) -> list[tuple[str, JSON]]:
    """The calls that this request asks for: of the tool that it forces, or of those that its newest text speaks of."""
    choice = seen.body.get("tool_choice") or {}
    tools = [tool for tool in seen.body.get("tools") or () if tool["name"].startswith(PREFIX)]
    told = newest(seen)
    forced = choice.get("type") in ("any", "tool")
    if not tools or choice.get("type") == "none" or (answered(seen) and not forced):
        return []
    if choice.get("type") == "tool":
        chosen = [tool for tool in tools if tool["name"] == choice["name"]]
    else:
        chosen = [tool for tool in tools if _spoken_of(tool["name"].removeprefix(PREFIX), told)]
        chosen = chosen or (tools[:1] if forced else [])
    if choice.get("disable_parallel_tool_use"):
        chosen = chosen[:1]
    return [(tool["name"], instance(tool["input_schema"], told)) for tool in chosen]


def _spoken_of(name: str, text: str) -> bool:
    words = [word for word in re.split(r"[_-]", name) if word not in ("get", "set", "the", "a")]
    return name in text or any(re.search(rf"\b{word}\b", text, re.I) for word in words if len(word) > 2)


def answered(seen: Seen) -> bool:
    """The request ends with the result of a tool."""
    texts = seen.texts()
    return bool(texts) and texts[-1][1].startswith(TOOL_RESULT)


def newest(seen: Seen) -> str:
    """All that the user says since the last answer, without the results of tools."""
    texts: list[str] = []
    for role, text in reversed(seen.texts()):
        if role != "user":
            break
        if not text.startswith(TOOL_RESULT):
            texts.insert(0, text)
    return "\n\n".join(texts)


def said(seen: Seen) -> str:
    """Its words."""
    told = newest(seen)
    schema = asked_schema(told)
    if schema == {}:
        keys = {name: "Ada" if kind == "string" else 36 for name, kind in _KEY.findall(told)}
        bare = {name: "yes" for found in _BARE_KEYS.findall(told) for name in found if name}
        return json.dumps(keys or bare or {"answer": "yes"})
    if schema is not None:
        return json.dumps(instance(schema, told.partition("Answer this message with")[0]), ensure_ascii=False)
    system = "\n".join(part.get("text", "") for part in parts(seen.body.get("system")))
    if always := _ALWAYS.search(f"{system}\n{told}"):
        return always[1]
    if answered(seen):
        return scripted_answer(seen.texts())
    if exact := _EXACTLY.search(told):
        return exact[1].strip()
    if count := _COUNT.search(told):
        return ", ".join(map(str, range(int(count[1]), int(count[2]) + 1)))
    if more := _ADD.search(told):
        before = [number for role, text in seen.texts() if role == "assistant" for number in _NUMBER.findall(text)]
        return str(int(before[-1]) + int(more[1]))
    if found := _SUM.search(told):
        left, right = int(found[1]), int(found[3])
        return str({"+": left + right, "-": left - right}.get(found[2], left * right))
    if whose := _WHOSE.search(told):
        mine: dict[str, str] = {name: value for text in seen.user_texts() for name, value in _MINE.findall(text)}
        return mine.get(whose[1], f"I do not know your {whose[1]}.")
    if _LONG.search(told):
        return "The sea is wide and the sky above it is blue. " * 40
    return scripted_answer(seen.texts())
