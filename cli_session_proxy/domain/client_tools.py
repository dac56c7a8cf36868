"""The client's own tools: names for the CLI, which calls are passed to the client, ids of calls, and results. Pure.

A tool is offered to the model as `mcp__client__<name>`. A name that the CLI or the provider does not accept (too long,
other letters) is replaced by one with a hash; the client gets its own name back. The CLI's own tools do not have this
prefix, so a client's tool and a tool of the CLI never have the same name.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import InvalidRequest, UpstreamError
from . import limits, structured
from .blocks import contents
from .evidence import Note
from .lineage import Past
from .models import JSON, Block, Message, Tool, ToolChoice, Turn
from .system_prompts import reminded

SERVER = "client"
PREFIX = f"mcp__{SERVER}__"
# A tool's name, with the prefix, may have 64 characters: for long the Messages API's limit, and still that of other
# providers.
LONGEST_NAME = 64 - len(PREFIX)
# Characters kept of a name that is replaced; "_" and a hash of 8 characters follow.
KEPT_OF_NAME = LONGEST_NAME - 9
# The CLI cuts a longer description of an MCP tool, but never its schema (run on 2.1.329). In characters.
LONGEST_DESCRIPTION = 2048
CONTINUED = " … (the whole description is in the schema of the arguments)"
# The most characters of all results together that are passed by MCP. The CLI shows the model only 2 KB and a path of a
# longer result (run on 2.1.329: at 1 MB, whatever the settings; the CLI documents 25,000 tokens). Longer results are
# passed in the transcript, from which the model gets them whole.
LARGEST_RESULTS = 40_000

_PLAIN = re.compile(rf"[A-Za-z0-9_-]{{1,{LONGEST_NAME}}}")
_OTHER = re.compile(r"[^A-Za-z0-9_-]")

# Arguments in a client's history that are no JSON object (e.g. of a cut call) are kept as text in a field of this name,
# because the API only takes objects.
UNPARSED = "unparsed_arguments"

NOT_ANSWERED = "[The client did not answer this call.]"


def short_name(name: str) -> str:
    """A tool's name behind the prefix: the client's own or, if the CLI does not accept that, a replacement. Equal names
    have equal replacements."""
    if _PLAIN.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_OTHER.sub('_', name)[:KEPT_OF_NAME]}_{digest}"


def cli_name(name: str) -> str:
    return PREFIX + short_name(name)


def as_cli(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Blocks of an answer, with the calls of the client's tools under the CLI's names for them."""
    return tuple(
        {**block, "name": cli_name(str(block.get("name")))} if block.get("type") == "tool_use" else block
        for block in blocks
    )


# --- offered tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offers:
    """The tools of one request. `entries`: for MCP's tools/list, by short name. `names`: the tools by CLI name."""

    tools: tuple[Tool, ...] = ()
    entries: Mapping[str, JSON] = field(default_factory=dict, compare=False)
    names: Mapping[str, Tool] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(tools: Sequence[Tool]) -> Offers:
        by_name = {short_name(tool.name): tool for tool in tools}
        entries = {name: _entry(tool) for name, tool in by_name.items()}
        return Offers(tuple(tools), entries, {PREFIX + name: tool for name, tool in by_name.items()})

    def __bool__(self) -> bool:
        return bool(self.tools)

    def called(self, name: str) -> Tool | None:
        """The client's tool for the CLI's name; None for any other tool."""
        return self.names.get(name)


def _entry(tool: Tool) -> JSON:
    """The tool in MCP's tools/list. It is declared read-only, so that the CLI makes the calls of one message
    concurrently and asks for no permission."""
    description, schema = tool.description, {"type": "object", **tool.schema}
    if len(description) > LONGEST_DESCRIPTION:
        schema["description"] = "\n\n".join(filter(None, (description, schema.get("description"))))
        description = description[: LONGEST_DESCRIPTION - len(CONTINUED)] + CONTINUED
    return {
        "name": short_name(tool.name),
        "description": description,
        "inputSchema": schema,
        "annotations": {"readOnlyHint": True},
        "_meta": {"anthropic/alwaysLoad": True},
    }


def checked(tools: Sequence[Tool], where: str = "tools") -> tuple[Tool, ...]:
    """The tools, if names are unique and schemas valid. Raises `InvalidRequest`."""
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
    """The choice, if it is possible with these tools. Raises `InvalidRequest`."""
    if choice.mode == "required" and not tools:
        raise InvalidRequest(f"{where} asks for a call, and there are no tools", param=where)
    known = {tool.name for tool in tools} if choice.allowed else frozenset()
    for name in choice.allowed or ():
        if name not in known:
            raise InvalidRequest(f"{where} names {name!r}, which is not among the tools", param=where)
    return choice


def instruction(choice: ToolChoice, names: Collection[str]) -> Block:
    """A text that asks the model for a call. The CLI has no option for this, so it may still answer without one."""
    which = " or ".join(sorted(choice.allowed or names))
    return {"type": "text", "text": f"Answer this message with a call of a tool, not with words. Call: {which}."}


# --- calls that are passed to the client ------------------------------------------------------------------


# Validates the arguments of a call by a tool's JSON Schema: the error, or None.
Check = Callable[[object, JSON], Awaitable[str | None]]


class ToolPolicy:
    """Decides which calls of a turn the client gets. The proxy answers a refused call, and the model tries again."""

    def __init__(self, offers: Offers, choice: ToolChoice, check: Check) -> None:
        self._offers = offers
        self._choice = choice
        self._check = check
        self._faults: dict[str, str | None] = {}  # of strict tools' calls

    def tool(self, name: str) -> Tool | None:
        """The client's tool for this name in the CLI; None for a tool of the CLI, or an unknown one."""
        return self._offers.called(name)

    def refusal(self, tool: Tool, earlier: int) -> str | None:
        """Why the client does not get a call of this tool; it got `earlier` calls of the same message. None: it
        does."""
        if self._choice.mode == "none":
            return "No tool may be called now: answer in words."
        if self._choice.allowed is not None and tool.name not in self._choice.allowed:
            return f"This tool may not be called now. These may: {', '.join(self._choice.allowed)}."
        if earlier and not self._choice.parallel:
            return "Only one tool may be called at a time: this call was not made. Make it again when you need it."
        return None

    async def examine(self, calls: Iterable[Block]) -> None:
        """Validate the arguments of these calls; needed before `fault`.

        Raises `UpstreamError` for arguments that nest too deep, `InvalidRequest` for a schema that cannot be used.
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
        """The error in these arguments. Only those of strict tools are validated."""
        fault = self._faults[call] if tool.strict else None
        return None if fault is None else f"The arguments are not valid: {fault}. Call it again with valid ones."


# --- results ----------------------------------------------------------------------------------------------


def calls_of(blocks: Iterable[Block]) -> list[str]:
    return [str(block.get("id")) for block in blocks if block.get("type") == "tool_use"]


def answers(output: Sequence[Block], new: Sequence[Message]) -> tuple[dict[str, Block], tuple[Block, ...]]:
    """Splits the blocks of `new` into the results for the calls in `output`, by call id, and all others. `output` is
    the answer before `new`. Raises `InvalidRequest`.

    Either all calls have a result, or none. Without results the calls stay unanswered. If all other blocks are
    reminders, they become part of the last result.
    """
    open_calls = dict.fromkeys(calls_of(output))
    results: dict[str, Block] = {}
    rest: list[Block] = []
    for message in new:
        for block in message.content:
            if block.get("type") != "tool_result":
                rest.append(block)
                continue
            call = str(block.get("tool_use_id"))
            if call not in open_calls:
                why = f"there is no open call {call!r} that this result could answer"
                raise InvalidRequest(why, param="tool_call_id")
            if results.setdefault(call, block) != block:
                raise InvalidRequest(f"there are two different results for the call {call!r}", param="tool_call_id")
    if not results:
        return {}, tuple(rest)
    missing = [call for call in open_calls if call not in results]
    if missing:
        raise InvalidRequest(f"results are missing for the calls {', '.join(missing)}", param="messages")
    if rest and all(reminded(block) is not None for block in rest):
        # The CLI does the same with its own reminders. A process that waits for results accepts nothing but results.
        last = next(call for call in reversed(open_calls) if call in results)
        results[last] = {**results[last], "content": [*contents(results[last]), *rest]}
        rest = []
    return {call: results[call] for call in open_calls if call in results}, tuple(rest)


def for_waiting(results: Mapping[str, Block], prompt: Sequence[Block]) -> dict[str, JSON] | None:
    """The results in MCP's form, by call, for the process that waits for them. None if it would not pass them on
    unchanged; then they are passed in the transcript, by a new process."""
    by_call: dict[str, JSON] = {}
    for call, block in results.items():
        result = mcp_result(block)
        if result is None:
            return None
        by_call[call] = result
    size = sum(len(part.get("text", "")) for result in by_call.values() for part in result["content"])
    # The waiting process takes results and nothing else: a prompt beside them needs a new process.
    return by_call if by_call and not prompt and size <= LARGEST_RESULTS else None


def mcp_result(block: Block) -> JSON | None:
    """A `tool_result` of texts as the result of an MCP tools/call; None for any other.

    The CLI puts an image from MCP into a file and shows the model its path (run on 2.1.330). In the transcript it stays
    an image.
    """
    parts = contents(block)
    if any(part.get("type") != "text" for part in parts):
        return None
    return {
        "content": [{"type": "text", "text": part["text"]} for part in parts],
        "isError": bool(block.get("is_error")),
    }


def error_result(text: str) -> JSON:
    """An MCP result that tells the model why its call failed."""
    return {"content": [{"type": "text", "text": text}], "isError": True}


# --- ids of calls

# They are unique on a path: a result names its call by this id.
#
# Histories of clients may have an id twice: their provider numbers the calls of each turn from 1, or a part of the
# history is repeated. Run on 2.1.330: of two calls with one id the model gets only the first one, and the second result
# is lost; if "x" is an id, the result of "x_1" is lost, too. 1.0.120 sends both calls, and the API refuses them. So a
# call and its results get another id if their id is used on the path already, or is not valid for the API. The chain
# has the ids that the model is shown.
#
# The client still uses its own ids. They are not stored: its next request is matched with the last known answer, which
# has the same calls in the same order.

_VALID_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NUMBERED = re.compile(r"(.+)_[0-9]+")
# Characters that are kept of a duplicate id, with room for a number of six digits. Chains before 0.2 have "-n" instead
# of "-r", in their records but not in their turns.
_KEPT_OF_ID = 56


class CallIds:
    """The used ids of calls. `in`: whether an id is used, or would be confused with a used one."""

    def __init__(self, path: Iterable[Turn] = ()) -> None:
        """`path`: its turns' calls, including those of the CLI's own tools, are used ids."""
        self._taken: set[str] = set()
        self._stems: set[str] = set()  # ids without a "_" and digits at the end
        self._numbers = Counter[str]()  # the last number used after each beginning
        for turn in path:
            for call in (*calls_of(turn.output), *calls_of(turn.tools)):
                self.add(call)

    def __contains__(self, call: str) -> bool:
        return call in self._taken or call in self._stems or _stem(call) in self._taken

    def add(self, call: str) -> None:
        self._taken.add(call)
        if (stem := _stem(call)) is not None:
            self._stems.add(stem)

    def reserve(self, call: str) -> str:
        """Reserve this id if it is valid and unused, else one that is made from it. Returns the reserved id."""
        reserved = call if _VALID_ID.fullmatch(call) else "call"
        prefix = reserved[:_KEPT_OF_ID]
        while reserved in self:
            self._numbers[prefix] += 1
            reserved = f"{prefix}-r{self._numbers[prefix] + 1}"
        self.add(reserved)
        return reserved


def _stem(call: str) -> str | None:
    found = _NUMBERED.fullmatch(call)
    return found and found[1]


def with_unique_ids(history: Iterable[Past], path: Iterable[Turn] = ()) -> list[Past]:
    """The exchanges that follow this path, with an id of its own for each call and its results.

    Results at the start of the history already have the chain's ids.
    """
    ids = CallIds(path)
    exchanges: list[Past] = []
    clients_answer: Sequence[Block] = ()
    answer: Sequence[Block] = ()
    for past in history:
        question = in_our_ids(past.input, clients_answer, answer)
        clients_answer = past.output
        answer = tuple(
            {**block, "id": ids.reserve(str(block.get("id")))} if block.get("type") == "tool_use" else block
            for block in clients_answer
        )
        changed = sum(old != new for old, new in zip(calls_of(clients_answer), calls_of(answer), strict=True))
        notes = (*past.notes, Note("ids_rewritten", changed)) if changed else past.notes
        exchanges.append(Past(question, answer, notes))
    return exchanges


def in_our_ids(new: Sequence[Message], clients_answer: Sequence[Block], answer: Sequence[Block]) -> tuple[Message, ...]:
    """`new` with its results under the ids of the calls in `answer`. `clients_answer`: the same calls with the client's
    ids, or without ids.

    Results of calls with equal ids are assigned in order.
    """
    ours: dict[str, deque[str]] = {}  # by the client's id
    for clients_id, call in zip(calls_of(clients_answer), calls_of(answer), strict=False):
        ours.setdefault(clients_id, deque()).append(call)
    if all(list(calls) == [clients_id] for clients_id, calls in ours.items()):
        return tuple(new)

    def renamed(block: Block) -> Block:
        calls = ours.get(str(block.get("tool_use_id"))) if block.get("type") == "tool_result" else None
        if calls is None:
            return block
        return {**block, "tool_use_id": calls.popleft() if len(calls) > 1 else calls[0]}

    return tuple(Message(message.role, tuple(map(renamed, message.content))) for message in new)
