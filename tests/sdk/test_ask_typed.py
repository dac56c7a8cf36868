"""`ask` with `schema` and `tools`: in this process and through a running `serve`.

What `ask` asks for and gives back is its own business, whoever answers; `with_cli` has the real CLI."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, assert_type

import pytest
import pytest_asyncio
from pydantic import BaseModel, Field, field_validator

from cli_session_proxy import Episode, ask
from cli_session_proxy.domain.client_tools import NOT_ANSWERED, cli_name
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest, TurnTimeout, UpstreamError
from cli_session_proxy.sdk import runtime
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Block, Reply, Stall, ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..serving import started
from ..without_cli import engine_without_cli

WAYS = ("embedded", "served")
either_way = pytest.mark.parametrize("there", WAYS, indirect=True)


MakeEngine = Callable[[Settings], Engine]
with_cli = pytest.mark.parametrize("engines", [True], indirect=True, ids=["cli"])


@pytest.fixture
def engines(request: pytest.FixtureRequest, upstream: Upstream) -> MakeEngine:
    """With a parameter: over the real CLI."""
    return Engine if hasattr(request, "param") else partial(engine_without_cli, upstream=upstream)


@pytest.fixture
def settings(claude_2: Path, make_settings: MakeSettings, engines: MakeEngine) -> Iterator[Settings]:
    """The engine of this process runs with these; it is stopped in the end."""
    made = make_settings(claude_bin=claude_2)
    runtime.configure(made, engine_factory=engines)
    yield made
    runtime.close()


@pytest_asyncio.fixture(params=rest_in_full(*WAYS))
async def there(request: pytest.FixtureRequest, settings: Settings, engines: MakeEngine) -> AsyncIterator[str | None]:
    """`base_url` of each way: None, or a running server's."""
    if request.param == "embedded":
        yield None
        return
    async with started(engines(settings), settings) as url:
        yield url


def uses(*calls: tuple[str, dict[str, Any]]) -> Reply:
    return ToolUse([(cli_name(name), arguments) for name, arguments in calls])


def results(upstream: Upstream) -> list[Block]:
    """The results that the newest request ends with, in the order of the calls (the CLI sends them as they come)."""
    *_, called, newest = (message["content"] for message in upstream.requests[-1].body["messages"])
    order = [block["id"] for block in called if block["type"] == "tool_use"]
    found = [block for block in newest if block["type"] == "tool_result"]
    return sorted(found, key=lambda result: order.index(result["tool_use_id"]))


def text_of(result: Block) -> str:
    content = result["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# --- schema


class River(BaseModel):
    name: str
    km: int = Field(ge=1)


class City(BaseModel):
    name: str
    rivers: list[River]

    @field_validator("name")
    @classmethod
    def _not_a_village(cls, name: str) -> str:
        if name == "Camelot":
            raise ValueError("only a model")
        return name


ROME = {"name": "Rome", "rivers": [{"name": "Tiber", "km": 405}]}


async def test_a_model_as_schema_gives_an_instance_of_it(there: str | None, upstream: Upstream) -> None:
    upstream.next(Reply(json.dumps(ROME)))
    episode, city = await ask("a city, please", schema=City, base_url=there)
    assert_type(city, City)
    assert city == City(name="Rome", rivers=[River(name="Tiber", km=405)])
    assert '"km"' in upstream.requests[-1].prompt  # the model was told the whole schema
    _, text = await ask("list", episode=episode)
    assert_type(text, str)


@either_way
async def test_a_json_schema_gives_data_that_validates(there: str | None, upstream: Upstream) -> None:
    upstream.next(Reply("many"), Reply("[1, 2]"))
    wanted = {"type": "array", "items": {"type": "integer"}}
    _, data = await ask("a number, or two", schema=wanted, base_url=there)
    assert data == [1, 2]


@dataclass
class Point:
    x: int
    y: int


async def test_other_types_of_data_are_taken_too(settings: Settings, upstream: Upstream) -> None:
    upstream.next(Reply('{"x": 1, "y": 2}'))
    _, point = await ask("where is it", schema=Point)
    assert_type(point, Point)
    assert point == Point(1, 2)


async def test_an_answer_that_only_the_model_refuses_is_an_error_and_the_episode_before_goes_on(
    there: str | None, upstream: Upstream
) -> None:
    before, _ = await ask("remember a = 1", base_url=there)
    upstream.next(Reply('{"name": "Camelot", "rivers": []}'))
    with pytest.raises(UpstreamError, match=r"no City: name: .*only a model"):
        await ask("a city, please", schema=City, episode=before)
    upstream.next(Reply(json.dumps(ROME)))
    _, city = await ask("a city, please", schema=City, episode=before)  # said anew: not the refused answer again
    assert city.name == "Rome"


# --- tools


class Place(BaseModel):
    town: str


async def weather(place: Place, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """The weather of a place.

    Args:
        place: where to look
    """
    return {"town": place.town, "degrees": 21, "unit": unit}


def population(town: Annotated[str, Field(description="its English name")]) -> int:
    """How many people live in a town."""
    if town == "Atlantis":
        raise LookupError("it is under water")
    return 2_800_000


@with_cli
async def test_sync_and_async_functions_are_described_called_and_answered(
    there: str | None, upstream: Upstream
) -> None:
    upstream.when("Rome", uses(("population", {"town": "Rome"}), ("weather", {"place": {"town": "Rome"}})))
    episode, text = await ask("Tell me of Rome", tools=[weather, population], base_url=there, system="Be kind.")
    assert_type(text, str)
    assert text.startswith("The tool said: ")
    assert [text_of(result) for result in results(upstream)] == [
        "2800000",
        '{"town":"Rome","degrees":21,"unit":"C"}',
    ]
    offered = {tool["name"]: tool for tool in upstream.requests[0].body["tools"]}
    told = offered[cli_name("weather")]
    assert told["description"] == "The weather of a place.\n\nArgs:\n    place: where to look"
    assert told["input_schema"]["required"] == ["place"]
    assert offered[cli_name("population")]["input_schema"]["properties"]["town"]["description"] == "its English name"
    assert "Be kind." in json.dumps(upstream.requests[-1].body["system"])
    assert upstream.requests[-1].prefix_kept(upstream.requests[0]) == 1.0
    assert (await ask("list", episode=episode))[1].splitlines()[-1] == "2. list"


async def test_calls_of_one_answer_run_at_the_same_time(settings: Settings, upstream: Upstream) -> None:
    """Two coroutines that wait for each other, and a thread that waits for a coroutine: one by one they never end."""
    meeting = asyncio.Barrier(2)
    told = threading.Event()

    async def first() -> str:
        await meeting.wait()
        return "first"

    async def second() -> str:
        await meeting.wait()
        told.set()
        return "second"

    def third() -> str:
        assert told.wait(60)
        return "third"

    upstream.when("go", uses(("third", {}), ("first", {}), ("second", {})))
    await ask("go", tools=[first, second, third])
    assert [text_of(result) for result in results(upstream)] == ["third", "first", "second"]


@either_way
async def test_what_a_function_raises_goes_to_the_model(there: str | None, upstream: Upstream) -> None:
    async def gone() -> str:
        """Waits for something that somebody else cancelled."""
        work = asyncio.create_task(asyncio.sleep(60))
        work.cancel()
        await work
        return "never"

    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("population", {"town": "Atlantis"}),
        ("population", {"town": 7, "mayor": "x"}),
        ("weather", {"place": {"town": "Rome"}, "unit": "K"}),
        ("gone", {}),
    )
    upstream.when("Atlantis", uses(*calls))
    _, text = await ask("Tell me of Atlantis", tools=[weather, population, gone], base_url=there)
    said = [text_of(result) for result in results(upstream)]
    assert said[0] == "LookupError: it is under water"
    assert said[1].startswith("the arguments are not valid: town: Input should be a valid string; mayor: ")
    assert said[2].startswith("the arguments are not valid: unit: ")
    assert said[3] == "the tool was cancelled"
    assert "Traceback" not in json.dumps(upstream.requests[-1].body)
    if there is None:  # Responses has no mark for it
        assert all(result["is_error"] for result in results(upstream))
    assert text.startswith("The tool said: ")


@with_cli
async def test_several_rounds_and_a_typed_answer(there: str | None, upstream: Upstream) -> None:
    upstream.next(uses(("population", {"town": "Rome"})), uses(("population", {"town": "Oslo"})))
    upstream.next(Reply(json.dumps(ROME)))
    _, city = await ask("Which is larger?", tools=[population], schema=City, base_url=there)
    assert_type(city, City)
    assert city.rivers[0].km == 405
    assert len(upstream.requests) == 3


@with_cli
async def test_a_loop_of_calls_ends_at_its_bound_and_the_conversation_goes_on(
    there: str | None, upstream: Upstream
) -> None:
    ran: list[str] = []

    def again() -> None:
        ran.append("again")

    upstream.next(*(uses(("again", {})) for _ in range(3)))
    with pytest.raises(TurnTimeout, match="called tools 2 times") as caught:
        await ask("loop", tools=[again], max_rounds=2, base_url=there)
    assert ran == ["again", "again"]
    stands = Episode.from_json(caught.value.detail["episode"])
    assert (await ask("list", episode=stands))[1].splitlines()[-1].endswith("list")
    assert [text_of(result) for result in results(upstream)] == [NOT_ANSWERED]


@either_way
@pytest.mark.sample(1)
async def test_a_model_that_takes_too_long_is_a_timeout_either_way(there: str | None, upstream: Upstream) -> None:
    upstream.when("wait", Stall(), times=None)
    with pytest.raises(TurnTimeout):
        await ask("wait for it", timeout=2.0, base_url=there)


async def test_the_time_of_an_ask_holds_for_its_tools_too(settings: Settings, upstream: Upstream) -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    upstream.when("go", uses(("slow", {})))
    with pytest.raises(TurnTimeout, match="the tools took longer") as caught:
        await ask("go", tools=[slow], timeout=3.0)
    assert ended.is_set()
    assert Episode.from_json(caught.value.detail["episode"]).agent_id


@with_cli
async def test_cancelling_an_ask_ends_its_tools_and_leaves_nothing_behind(
    there: str | None, upstream: Upstream
) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    upstream.when("go", uses(("slow", {}), ("slow", {})))
    before = asyncio.all_tasks()
    asking = asyncio.create_task(ask("go", tools=[slow], agent_id="ada", base_url=there))
    await began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ended.is_set()
    if there is None:
        assert asyncio.all_tasks() == before
    _, text = await ask("remember a = 1", agent_id="ada", base_url=there)
    assert text == "Noted: a is 1."


class NotData:
    pass


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tools": [lambda town: town]}, r"tools\[0\] must be a named function"),
        ({"tools": [weather, "weather"]}, r"tools\[1\] must be a named function"),
        ({"tools": [weather, weather]}, "each tool needs its own"),
        ({"tools": [NotData]}, r"tools\[0\]"),
        ({"schema": NotData}, "schema must be a pydantic model"),
        ({"schema": {"type": "river"}}, "schema is not a JSON Schema"),
        ({"schema": "city"}, "schema must be a pydantic model"),
        ({"max_rounds": -1}, "max_rounds must not be negative"),
    ],
)
async def test_what_cannot_be_told_to_a_model_is_refused_before_anything_runs(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await ask("hello", **asked)


def starred(*towns: str) -> None: ...
def positional(town: str, /) -> None: ...
def untold(town: NotData) -> None: ...


@pytest.mark.parametrize("function", [starred, positional, untold])
async def test_arguments_that_have_no_schema_are_refused(function: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        await ask("hello", tools=[function])
