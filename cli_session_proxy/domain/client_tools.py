"""The client's own tools: how they are named for the CLI, which calls of them come out, what answers them. Pure.

A tool is offered to the model as `mcp__client__<name>`. A name that the CLI or the provider would not take (too
long, other letters) goes under one made of it and a hash, and comes back as the client wrote it. So no name of a
client's can ever be one of the CLI's own tools: those have no such prefix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import InvalidRequest, UpstreamError
from . import limits, structured
from .models import JSON, Block, Message, Tool, ToolChoice
from .parameters import Parameters
from .reminders import reminded

SERVER = "client"
PREFIX = f"mcp__{SERVER}__"
# A tool's whole name had at most 64 characters in the Messages API for long, and still has on other providers.
LONGEST = 64 - len(PREFIX)
# Kept of a name that is too long; the rest is "_" and the hash.
KEPT = LONGEST - 9
# The CLI cuts a longer description of a tool behind MCP (run on 2.1.329), but leaves schemas alone.
DESCRIPTION = 2048
CONTINUED = " … (the whole description is in the schema of the arguments)"
# Of a longer result behind MCP the model is shown 2 KB and a path (run on 2.1.329: at 1 MB, whatever the settings;
# 25,000 tokens is what the CLI documents), but one in the transcript is passed on whole. Characters of all results.
LARGEST = 40_000

_PLAIN = re.compile(rf"[A-Za-z0-9_-]{{1,{LONGEST}}}")
_OTHER = re.compile(r"[^A-Za-z0-9_-]")

# Arguments in a client's history that are no JSON object, such as those of a call that was cut off: kept as text under
# this name, because the API takes nothing but an object.
UNPARSED = "unparsed_arguments"

NOT_ANSWERED = "[The client did not answer this call.]"


def short_name(name: str) -> str:
    """The name behind the prefix: always the same for the same name."""
    if _PLAIN.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_OTHER.sub('_', name)[:KEPT]}_{digest}"


def cli_name(name: str) -> str:
    return PREFIX + short_name(name)


def as_cli(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Blocks of an answer with the calls under the names that the model knows."""
    return tuple(
        {**block, "name": cli_name(str(block.get("name")))} if block.get("type") == "tool_use" else block
        for block in blocks
    )


# --- what is offered --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offers:
    """The tools of one request. `entries` are those of MCP's tools/list, by short name; `names` are the CLI's."""

    tools: tuple[Tool, ...] = ()
    entries: Mapping[str, JSON] = field(default_factory=dict, compare=False)
    names: Mapping[str, Tool] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(tools: Sequence[Tool]) -> Offers:
        named = {short_name(tool.name): tool for tool in tools}
        entries = {name: _entry(tool) for name, tool in named.items()}
        return Offers(tuple(tools), entries, {PREFIX + name: tool for name, tool in named.items()})

    def __bool__(self) -> bool:
        return bool(self.tools)

    def called(self, name: str) -> Tool | None:
        """The client's tool behind a name of the CLI's; None for any other tool."""
        return self.names.get(name)


def _entry(tool: Tool) -> JSON:
    """Read-only for the CLI: so calls of one message are made at once, and no permission is asked for."""
    description, schema = tool.description, {"type": "object", **tool.schema}
    if len(description) > DESCRIPTION:
        schema["description"] = "\n\n".join(filter(None, (description, schema.get("description"))))
        description = description[: DESCRIPTION - len(CONTINUED)] + CONTINUED
    return {
        "name": short_name(tool.name),
        "description": description,
        "inputSchema": schema,
        "annotations": {"readOnlyHint": True},
        "_meta": {"anthropic/alwaysLoad": True},
    }


def checked(tools: Sequence[Tool], where: str = "tools") -> tuple[Tool, ...]:
    """The tools, when each has a name of its own and a schema that is one. Raises `InvalidRequest`."""
    limits.at_most(tools, limits.TOOLS, where)
    names: dict[str, int] = {}
    for at, tool in enumerate(tools):
        here = f"{where}[{at}]"
        if not tool.name.strip():
            raise InvalidRequest(f"{here}: a tool needs a name", param=here)
        if (first := names.setdefault(short_name(tool.name), at)) != at:
            raise InvalidRequest(f"{here} has the name of {where}[{first}]: each tool needs its own", param=here)
        structured.checked_schema(tool.schema, f"{here}'s schema")
        if tool.schema.get("type", "object") != "object":
            raise InvalidRequest(f"{here}: the schema of a tool's arguments must be of type object", param=here)
    return tuple(tools)


def checked_choice(choice: ToolChoice, tools: Sequence[Tool], where: str = "tool_choice") -> ToolChoice:
    """The choice, when the tools allow it. Raises `InvalidRequest`."""
    if choice.mode == "required" and not tools:
        raise InvalidRequest(f"{where} asks for a call, and there are no tools", param=where)
    known = {tool.name for tool in tools} if choice.allowed else frozenset()
    for name in choice.allowed or ():
        if name not in known:
            raise InvalidRequest(f"{where} names {name!r}, which is not among the tools", param=where)
    return choice


# --- what a turn wants of them ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What the model is to be offered, what it may call, and the texts before which its answer ends."""

    offers: Offers = field(default_factory=Offers)
    choice: ToolChoice = field(default_factory=ToolChoice)
    stop: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=Parameters)


def instruction(choice: ToolChoice, names: Collection[str]) -> Block:
    """The words that ask for a call: the CLI has no option for it, so the model may still answer without one."""
    which = " or ".join(sorted(choice.allowed or names))
    return {"type": "text", "text": f"Answer this message with a call of a tool, not with words. Call: {which}."}


# --- which calls come out ---------------------------------------------------------------------------------


# Holds the arguments of a call against a tool's JSON Schema: what is wrong with them, None where nothing is.
Check = Callable[[object, JSON], Awaitable[str | None]]


class ToolPolicy:
    """Decides about the calls of one turn. A refused call is answered by the proxy, and the model tries again."""

    def __init__(self, offers: Offers, choice: ToolChoice, check: Check) -> None:
        self._offers = offers
        self._choice = choice
        self._check = check
        self._faults: dict[str, str | None] = {}  # of strict tools' calls

    def tool(self, name: str) -> Tool | None:
        """The client's tool of this name of the CLI's; None for a tool of the CLI's own, or none at all."""
        return self._offers.called(name)

    def refusal(self, tool: Tool, earlier: int) -> str | None:
        """Why a call of this tool does not come out; `earlier` calls of the same message did."""
        if self._choice.mode == "none":
            return "No tool may be called now: answer in words."
        if self._choice.allowed is not None and tool.name not in self._choice.allowed:
            return f"This tool may not be called now. These may: {', '.join(self._choice.allowed)}."
        if earlier and not self._choice.parallel:
            return "Only one tool may be called at a time: this call was not made. Make it again when you need it."
        return None

    async def examine(self, calls: Iterable[Block]) -> None:
        """Look at the arguments of these calls; only then `fault` may be asked.

        Raises `UpstreamError` for arguments that no dump could show, `InvalidRequest` for a schema that cannot be used.
        """
        for block in calls:
            call, tool = str(block.get("id")), self.tool(str(block.get("name")))
            if tool is None or call in self._faults:
                continue
            if limits.is_deeper(block.get("input")):
                raise UpstreamError(
                    f"the model called {tool.name!r} with arguments nested deeper than {limits.DEPTH} levels: send it "
                    "again"
                )
            if tool.strict:
                self._faults[call] = await self._check(block.get("input"), tool.schema)

    def fault(self, tool: Tool, call: str) -> str | None:
        """Why these arguments do not come out; only a strict tool's are held against its schema."""
        fault = self._faults[call] if tool.strict else None
        return None if fault is None else f"The arguments are not valid: {fault}. Call it again with valid ones."


# --- what answers them ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BroughtResults:
    """The results that a request brings (`tool_result` blocks by call), and what else its user says."""

    results: Mapping[str, Block] = field(default_factory=dict)
    rest: tuple[Block, ...] = ()


def calls_of(blocks: Iterable[Block]) -> list[str]:
    return [str(block.get("id")) for block in blocks if block.get("type") == "tool_use"]


def answers(output: Sequence[Block], new: Sequence[Message]) -> BroughtResults:
    """What `new` says to the calls in `output`, the answer before it. Raises `InvalidRequest`.

    With one result every call needs one; with none at all the calls stay without an answer. Reminders beside results
    are part of the last one.
    """
    wanted = dict.fromkeys(calls_of(output))
    results: dict[str, Block] = {}
    rest: list[Block] = []
    for message in new:
        for block in message.content:
            if block.get("type") != "tool_result":
                rest.append(block)
                continue
            call = str(block.get("tool_use_id"))
            if call not in wanted:
                why = f"there is no open call {call!r} that this result could answer"
                raise InvalidRequest(why, param="tool_call_id")
            if results.setdefault(call, block) != block:
                raise InvalidRequest(f"there are two different results for the call {call!r}", param="tool_call_id")
    if not results:
        return BroughtResults(rest=tuple(rest))
    missing = [call for call in wanted if call not in results]
    if missing:
        raise InvalidRequest(f"results are missing for the calls {', '.join(missing)}", param="messages")
    if rest and all(reminded(block) is not None for block in rest):
        # Told with the last result, as the CLI does with its own: a process that waits for results takes nothing else.
        last = next(call for call in reversed(wanted) if call in results)
        content = results[last].get("content")
        said = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        results[last] = {**results[last], "content": [*said, *rest]}
        rest = []
    return BroughtResults({call: results[call] for call in wanted if call in results}, tuple(rest))


def brought(answers: BroughtResults) -> dict[str, JSON] | None:
    """The results as a waiting process takes them; None where it would not pass them on as they are."""
    out: dict[str, JSON] = {}
    for call, block in answers.results.items():
        result = mcp_result(block)
        if result is None:
            return None
        out[call] = result
    size = sum(len(part.get("text", "")) for result in out.values() for part in result["content"])
    # Only with nothing but results a process that waits for them can go on.
    return out if out and not answers.rest and size <= LARGEST else None


def mcp_result(block: Block) -> JSON | None:
    """A `tool_result` of words as the result of an MCP tools/call; None for any other.

    An image that comes behind MCP is put into a file by the CLI, and the model is told its path (run on 2.1.330). In
    the transcript it is just the image.
    """
    content = block.get("content")
    parts: list[Block] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    if any(part.get("type") != "text" for part in parts):
        return None
    return {
        "content": [{"type": "text", "text": part["text"]} for part in parts],
        "isError": bool(block.get("is_error")),
    }


def refused(text: str) -> JSON:
    return {"content": [{"type": "text", "text": text}], "isError": True}
