"""Histories whose calls share ids: each call reaches the model with its arguments, and its own result behind it."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cli_session_proxy.domain.client_tools import calls_of, cli_name
from cli_session_proxy.domain.models import Block, Message, Tool, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.script import ToolUse
from turnfault.provider.seen import Seen, parts, spoken
from turnfault.provider.upstream import Upstream

from ..conftest import CLI_ENV, MakeSettings
from ..every_wire import proxied
from ..matrix import rest_in_full
from ..talking import ask, text
from ..without_cli import engine_without_cli, proxied_without_cli

JSON = dict[str, Any]
# ("user" or "assistant", a text); ("call", id, argument); ("result", id, text)
Item = tuple[str, ...]
TOOL = "look"


def told(seen: Seen) -> list[Item]:
    """What a request says in order; a call with its argument and the one result that stands in the next message."""
    out: list[Item] = []
    waiting: dict[str, int] = {}
    known: set[str] = set()
    for message in seen.messages:
        if message["role"] == "system":
            continue
        called: dict[str, int] = {}
        for block in parts(message["content"]):
            if block["type"] == "text" and (said := spoken(block["text"])) is not None:
                out.append((message["role"], said))
            elif block["type"] == "tool_use":
                assert block["id"] not in known
                known.add(block["id"])
                called[block["id"]] = len(out)
                out.append(("call", str(block["input"].get("q"))))
            elif block["type"] == "tool_result":
                at = waiting.pop(block["tool_use_id"])
                out[at] = (*out[at], " ".join(part["text"] for part in parts(block["content"])))
        assert not waiting, "a call without a result"
        waiting = called
    return out


def expected(history: Sequence[Item]) -> list[Item]:
    """The same of a history, where the results of an answer stand behind it in any order. Calls that share an id in one
    answer are answered in their order."""
    out: list[Item] = []
    waiting: list[tuple[str, int]] = []
    for kind, *said in history:
        if kind == "call":
            waiting.append((said[0], len(out)))
            out.append(("call", said[1]))
        elif kind == "result":
            place = next(one for one in waiting if one[0] == said[0])
            waiting.remove(place)
            out[place[1]] = (*out[place[1]], said[1])
        else:
            out.append((kind, *said))
    return out


# --- the same history on each wire


def grouped(history: Sequence[Item]) -> Iterator[tuple[str, list[Item]]]:
    """Calls in a row are one message, results in a row too."""
    group: list[Item] = []
    for item in [*history, ("end",)]:
        if group and (item[0] != group[0][0] or item[0] in ("user", "assistant")):
            yield group[0][0], group
            group = []
        group.append(item)


def chat(history: Sequence[Item]) -> tuple[str, JSON]:
    messages: list[JSON] = []
    for kind, group in grouped(history):
        if kind == "call":
            calls = [
                {"id": name, "type": "function", "function": {"name": TOOL, "arguments": json.dumps({"q": q})}}
                for _, name, q in group
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif kind == "result":
            messages += [{"role": "tool", "tool_call_id": name, "content": said} for _, name, said in group]
        else:
            messages.append({"role": kind, "content": group[0][1]})
    return "/v1/chat/completions", {"model": "sonnet", "messages": messages}


def messages(history: Sequence[Item]) -> tuple[str, JSON]:
    out: list[JSON] = []
    for kind, group in grouped(history):
        if kind == "call":
            blocks = [{"type": "tool_use", "id": name, "name": TOOL, "input": {"q": q}} for _, name, q in group]
            out.append({"role": "assistant", "content": blocks})
        elif kind == "result":
            blocks = [{"type": "tool_result", "tool_use_id": name, "content": said} for _, name, said in group]
            out.append({"role": "user", "content": blocks})
        else:
            out.append({"role": kind, "content": group[0][1]})
    return "/v1/messages", {"model": "sonnet", "max_tokens": 1000, "messages": out}


def generate(history: Sequence[Item]) -> tuple[str, JSON]:
    contents: list[JSON] = []
    some: list[JSON]
    for kind, group in grouped(history):
        if kind == "call":
            some = [{"functionCall": {"id": name, "name": TOOL, "args": {"q": q}}} for _, name, q in group]
        elif kind == "result":
            some = [
                {"functionResponse": {"id": name, "name": TOOL, "response": {"output": said}}}
                for _, name, said in group
            ]
        else:
            some = [{"text": group[0][1]}]
        contents.append({"role": "model" if kind in ("call", "assistant") else "user", "parts": some})
    return "/v1beta/models/sonnet:generateContent", {"contents": contents}


def ollama(history: Sequence[Item]) -> tuple[str, JSON]:
    out: list[JSON] = []
    for kind, group in grouped(history):
        if kind == "call":
            calls = [{"id": name, "function": {"name": TOOL, "arguments": {"q": q}}} for _, name, q in group]
            out.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif kind == "result":
            out += [
                {"role": "tool", "tool_name": TOOL, "tool_call_id": name, "content": said} for _, name, said in group
            ]
        else:
            out.append({"role": kind, "content": group[0][1]})
    return "/api/chat", {"model": "sonnet", "messages": out, "stream": False}


def responses(history: Sequence[Item]) -> tuple[str, JSON]:
    items: list[JSON] = []
    for kind, *said in history:
        if kind == "call":
            arguments = json.dumps({"q": said[1]})
            items.append({"type": "function_call", "call_id": said[0], "name": TOOL, "arguments": arguments})
        elif kind == "result":
            items.append({"type": "function_call_output", "call_id": said[0], "output": said[1]})
        else:
            items.append({"role": kind, "content": said[0]})
    return "/v1/responses", {"model": "sonnet", "input": items}


def interactions(history: Sequence[Item]) -> tuple[str, JSON]:
    steps: list[JSON] = []
    for kind, *said in history:
        if kind == "call":
            steps.append({"type": "function_call", "id": said[0], "name": TOOL, "arguments": {"q": said[1]}})
        elif kind == "result":
            steps.append({"type": "function_result", "call_id": said[0], "name": TOOL, "result": said[1]})
        else:
            named = "user_input" if kind == "user" else "model_output"
            steps.append({"type": named, "content": [{"type": "text", "text": said[0]}]})
    return "/v1beta/interactions", {"model": "sonnet", "input": steps}


Wire = Callable[[Sequence[Item]], tuple[str, JSON]]
WIRES: list[Wire] = [chat, messages, generate, ollama, responses, interactions]


def words_of(answer: JSON) -> str:
    """The text of an answer, on any of them."""
    found = [one for one in walk(answer) if one.startswith("You said")]
    return found[0]


def walk(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(one)


FIRST: list[Item] = [
    ("user", "u1"), ("call", "call_1", "a"), ("result", "call_1", "result a"), ("assistant", "a1"), ("user", "u2"),
]  # fmt: skip
AGAIN: list[Item] = [
    ("user", "u3"), ("call", "call_1", "b"), ("result", "call_1", "result b"), ("assistant", "a3"), ("user", "u4"),
]  # fmt: skip


# By which wire calls come makes no difference to the CLI: each time one with it, and the others without.
WITH_CLI = [(chat, "claude_2")]
WITHOUT = [(wire, None) for wire in (generate, messages, ollama, responses, interactions)]
IN_FULL = [(wire, cli) for wire in WIRES for cli in ("claude_2", "claude_1") if (wire, cli) not in WITH_CLI]


@pytest.mark.parametrize(("wire", "cli"), rest_in_full(*WITH_CLI, *WITHOUT, *IN_FULL, quick=len(WIRES)))
@pytest.mark.sample(3)
async def test_a_provider_that_numbers_its_calls_anew_each_turn(
    wire: Wire, cli: str | None, make_settings: MakeSettings, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    settings = make_settings() if cli is None else make_settings(claude_bin=request.getfixturevalue(cli))
    through = proxied_without_cli(settings, upstream) if cli is None else proxied(settings)
    async with through as (_, root), httpx.AsyncClient(base_url=root) as http:

        async def say(history: Sequence[Item]) -> Item:
            path, body = wire(history)
            response = await http.post(path, json=body, timeout=60)
            assert response.status_code == 200, response.text
            said = expected(history)
            if wire is generate:
                said = [(*one[:2], json.dumps({"output": one[2]})) if one[0] == "call" else one for one in said]
            assert told(upstream.requests[-1]) == said
            return ("assistant", words_of(response.json()))

        history = [*FIRST]
        history.append(await say(history))
        history += AGAIN
        history.append(await say(history))
        history += [*AGAIN[:-1], *AGAIN[1:]]  # a third and a fourth of that id
        history.append(await say(history))
        await say([*history, ("user", "and now?")])


# --- the same over the core, with calls of our own, restarts and lost transcripts


def as_messages(history: Sequence[Item]) -> list[Message]:
    def block(kind: str, *said: str) -> Block:
        if kind == "call":
            return {"type": "tool_use", "id": said[0], "name": TOOL, "input": {"q": said[1]}}
        if kind == "result":
            return {"type": "tool_result", "tool_use_id": said[0], "content": said[1]}
        return {"type": "text", "text": said[0]}

    roles = {"call": "assistant", "result": "user"}
    return [Message(roles.get(kind, kind), (block(kind, *said),)) for kind, *said in history]  # type: ignore[arg-type]


class Client:
    """It keeps the whole history and sends all of it each time; what reaches the model is compared each time."""

    def __init__(self, config: Settings, upstream: Upstream, *, cli: bool) -> None:
        self.config, self.upstream, self.cli = config, upstream, cli
        self.history: list[Item] = []
        self.turn: Turn | None = None
        self.numbers = itertools.count(1)
        self.engine: Engine

    def word(self) -> str:
        return f"w{next(self.numbers)}."

    async def __aenter__(self) -> Client:
        self.engine = Engine(self.config) if self.cli else engine_without_cli(self.config, self.upstream)
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()

    async def restart(self) -> None:
        await self.engine.stop()
        await self.__aenter__()

    def lose_transcripts(self) -> None:
        for transcript in Path(str(self.config.claude_config_dir)).glob("projects/*/*.jsonl"):
            transcript.unlink()

    def foreign(self, ids: Sequence[str], order: Sequence[int] = ()) -> None:
        """An exchange of elsewhere: calls with these ids, their results in this order, an answer."""
        self.history.append(("user", self.word()))
        self.calls(ids)
        self.results(ids, order)
        self.history.append(("assistant", self.word()))

    def calls(self, ids: Sequence[str]) -> None:
        self.history += [("call", one, self.word()) for one in ids]

    def results(self, ids: Sequence[str], order: Sequence[int] = ()) -> None:
        said = [("result", one, self.word()) for one in ids]
        self.history += [said[at] for at in order or range(len(said))]

    async def say(self, *, calls: int = 0, ids: Sequence[str] | None = None) -> Turn:
        """Send the history. The model answers with words, or with so many calls: the client keeps them under `ids`."""
        if calls:
            self.upstream.next(ToolUse([(cli_name(TOOL), {"q": self.word()}) for _ in range(calls)]))
        self.turn = await ask(self.engine, *as_messages(self.history), agent=None, tools=(Tool(TOOL),))
        assert told(self.upstream.requests[-1]) == expected(self.history)
        if calls:
            asked = [block["input"]["q"] for block in self.turn.output if block["type"] == "tool_use"]
            self.history += [
                ("call", name, q) for name, q in zip(ids or calls_of(self.turn.output), asked, strict=True)
            ]
        else:
            self.history.append(("assistant", text(self.turn)))
        return self.turn


@pytest.fixture(params=["claude_2", None], ids=str)
async def client(request: pytest.FixtureRequest, make_settings: MakeSettings, upstream: Upstream) -> Any:
    """Over a CLI that takes a client's tools, and over the core alone."""
    binary = {"claude_bin": request.getfixturevalue(request.param)} if request.param else {}
    async with Client(make_settings(**binary), upstream, cli=bool(request.param)) as made:
        yield made


@pytest.mark.sample(1)
async def test_a_history_that_repeats_an_exchange_of_ours(client: Client) -> None:
    client.history = [("user", "u1")]
    await client.say(calls=2)
    client.results(calls_of(client.turn.output), [1, 0])  # type: ignore[union-attr]
    await client.say()
    exchange = [*client.history]
    client.history += [*exchange, ("user", "u2")]
    first = await client.say()
    client.lose_transcripts()
    client.history += [*exchange, *exchange, ("user", "u3")]
    last = await client.say()
    assert last.agent_key == first.agent_key
    assert last.placed.matched == len(as_messages([*exchange, *exchange])) + 2


async def test_the_newest_results_answer_calls_that_share_an_id_with_older_ones(client: Client) -> None:
    client.foreign(["call_1", "call_2"])
    client.history.append(("user", "u2"))
    client.calls(["call_2", "call_1", "call_1"])
    client.results(["call_2", "call_1", "call_1"], [1, 2, 0])
    await client.say()
    client.history.append(("user", "u3"))
    before = client.upstream.requests[-1]
    await client.say()
    assert client.upstream.requests[-1].prefix_kept(before) == 1.0


@pytest.mark.sample(1)
async def test_a_client_that_names_our_calls_anew_is_understood_after_a_restart_and_a_lost_transcript(
    client: Client,
) -> None:
    client.foreign(["call_1"])
    client.history.append(("user", "u2"))
    await client.say(calls=2, ids=["call_1", "call_1"])
    await client.restart()
    client.results(["call_1", "call_1"])
    await client.say()
    # The answer of another model to calls of ours: it is brought in behind them.
    client.history.append(("user", "u3"))
    await client.say(calls=2, ids=["call_2", "call_1"])
    client.lose_transcripts()
    client.results(["call_2", "call_1"], [1, 0])
    client.history += [("assistant", "of another"), ("user", "u4")]
    await client.say()
    client.lose_transcripts()
    client.history.append(("user", "u5"))
    before = client.upstream.requests[-1]
    await client.say()
    assert client.upstream.requests[-1].prefix_kept(before) == 1.0


@pytest.mark.sample(1)
async def test_the_same_history_again_is_known_and_nothing_comes_in_twice(client: Client) -> None:
    client.foreign(["call_1"])
    client.foreign(["call_1"])
    client.history += [("user", "u")]
    first = await client.say()
    client.history.pop()
    again = await client.say()
    assert again.parent_id == first.parent_id
    turns = [one async for one in client.engine.store.turns(first.agent_key)]
    assert len(turns) == 6  # an exchange with a call is two of them


IDS = ("call_1", "call_2", "no id", "call", "call_1_7", "call_1-r2")


@dataclass(frozen=True)
class Round:
    """What stands behind the last answer of ours, and what happens before it is sent."""

    foreign: tuple[tuple[str, ...], ...]
    repeats: bool
    newest: tuple[str, ...]  # calls whose results are the newest message; none: words
    calls: int
    renamed: tuple[str, ...]
    before: Literal["", "restart", "lost"]
    seed: int


ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=3).map(tuple)
rounds = st.builds(
    Round,
    foreign=st.lists(ids, max_size=2).map(tuple),
    repeats=st.booleans(),
    newest=st.one_of(st.just(()), ids),
    calls=st.integers(0, 2),
    renamed=st.one_of(st.just(()), st.lists(st.sampled_from(IDS), min_size=2, max_size=2).map(tuple)),
    before=st.sampled_from(["", "", "restart", "lost"]),
    seed=st.integers(0, 5),
)


async def go_through(client: Client, plan: Sequence[Round]) -> None:
    waiting: Sequence[str] = ()
    for one in plan:
        if waiting:
            client.results(waiting, list(itertools.permutations(range(len(waiting))))[one.seed % len(waiting)])
            if one.foreign:
                client.history.append(("assistant", client.word()))
        for some in one.foreign:
            client.foreign(some, list(itertools.permutations(range(len(some))))[one.seed % len(some)])
        if one.repeats and not waiting:
            client.history += client.history
        if not waiting or one.foreign:
            client.history.append(("user", client.word()))
            if one.newest:
                client.calls(one.newest)
                client.results(one.newest)
        if one.before == "restart":
            await client.restart()
        elif one.before == "lost":
            client.lose_transcripts()
        renamed = one.renamed[: one.calls]
        turn = await client.say(calls=one.calls, ids=renamed)
        waiting = (renamed or calls_of(turn.output)) if one.calls else ()


def check(plan: Sequence[Round], binary: Path | None = None) -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="csp-") as folder:
            async with Upstream() as upstream:
                env = CLI_ENV | {
                    "ANTHROPIC_BASE_URL": upstream.url, "HOME": f"{folder}/home", "CLAUDE_CODE_MAX_RETRIES": "0",
                }  # fmt: skip
                config = Settings(
                    var=Path(folder, "var"), claude_config_dir=Path(folder, "config"), claude_env=env, spares=0,
                    turn_timeout=60.0, claude_bin=binary,
                )  # fmt: skip
                async with Client(config, upstream, cli=binary is not None) as client:
                    await go_through(client, plan)

    asyncio.run(scenario())


@pytest.mark.parametrize("examples", rest_in_full(25, 150))
def test_random_histories_reach_the_model_whole(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.lists(rounds, min_size=1, max_size=4))
    def without_the_cli(plan: list[Round]) -> None:
        check(plan)

    without_the_cli()


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=(pytest.mark.full, pytest.mark.timeout(900)))])
@pytest.mark.full
def test_random_histories_reach_the_model_whole_over_the_real_cli(examples: int, claude_2: Path) -> None:
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.lists(rounds, min_size=2, max_size=3))
    def over_the_cli(plan: list[Round]) -> None:
        check(plan, claude_2)

    over_the_cli()
