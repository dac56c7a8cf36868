"""A new wire is one object and one line: this one is written here, and spoken over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from cli_session_proxy.domain.lineage import answer_text
from cli_session_proxy.domain.models import JSON, BlockDelta, Finished, Message, Turn, TurnEvent
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import Overloaded, ProxyError
from cli_session_proxy.settings import Settings
from cli_session_proxy.wires.answers import answered
from cli_session_proxy.wires.asgi import RouteDoc, Table, add
from cli_session_proxy.wires.base import ANY, AddressClaim, ErrorShape, Wire
from cli_session_proxy.wires.common import Naming, WireCall
from cli_session_proxy.wires.fields import required
from cli_session_proxy.wires.registry import WIRES
from cli_session_proxy.wires.schemas import TEXT, body

from ..fakes import FakeEngine, hello, started, text
from ..serving import serving

ASKED = body({"ask": TEXT})


def read(given: JSON, naming: Naming) -> WireCall:
    said = required(given, "ask", str)
    asked = naming.request("toy", given, "sonnet", (Message.user(said),))
    return WireCall(request=asked, stream=bool(given.get("stream")))


def written(turn: Turn) -> JSON:
    return {"said": answer_text(turn.output)}


class Words:
    """A stream of plain text: each piece as it comes, a dot where nothing is said."""

    media_type = "text/x-toy"

    def feed(self, event: TurnEvent) -> Iterable[bytes]:
        if isinstance(event, BlockDelta):
            return [str(event.delta["text"]).encode()]
        return [b"\n"] if isinstance(event, Finished) else []

    def error(self, error: ProxyError) -> Iterable[bytes]:
        return [f"!{error.code}\n".encode()]

    def keep_alive(self, words: str = "") -> bytes:
        return b"."


def routes(app: Starlette, engine: Engine, settings: Settings) -> None:
    ask = answered(engine, settings, read, written, lambda *_: Words())
    add(app, "POST", "/toy/ask", ask, RouteDoc(ASKED, media=("application/json", Words.media_type), turn=True))


TOY = Wire(
    name="toy",
    claims=(AddressClaim("/toy"),),
    errors=ErrorShape("toy", lambda error, _: {"oh no": error.message}, body({"oh no": TEXT})),
    routes=routes,
    bases=("/toy/",),
)


@asynccontextmanager
async def toy(tmp_path: Path, keepalive: float = 15) -> AsyncIterator[tuple[FakeEngine, httpx.AsyncClient]]:
    engine = FakeEngine()
    settings = Settings(var=tmp_path / "var", port=0, keepalive=keepalive)
    async with (
        serving(engine.as_engine(), settings, (*WIRES, TOY)) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as client,
    ):
        yield engine, client


async def test_it_reads_answers_and_streams(tmp_path: Path) -> None:
    async with toy(tmp_path) as (engine, client):
        whole = await client.post("/toy/ask", json={"ask": "hello"})
        assert (whole.status_code, whole.json()) == (200, {"said": "Hello there."})
        assert whole.headers["x-turn-id"] == "turn_1"
        streamed = await client.post("/toy/ask", json={"ask": "hello", "stream": True})
        assert (streamed.text, streamed.headers["content-type"]) == ("Hello there.\n", Words.media_type)
        assert [request.wire for request in engine.requests] == ["toy", "toy"]
        assert engine.answers[-1].acknowledged


async def test_errors_are_in_its_own_shape(tmp_path: Path) -> None:
    async with toy(tmp_path) as (engine, client):
        for refused, status in (
            (await client.post("/toy/ask", json={}), 400),
            (await client.put("/toy/ask", json={}), 405),
            (await client.get("/toy/nothing"), 404),
            (await client.post("/toy/ask", json={"ask": "hello"}, headers={"Host": "evil.example"}), 400),
            (await client.post("/agents/%ff/toy/ask", json={"ask": "hello"}), 400),
        ):
            assert (refused.status_code, list(refused.json())) == (status, ["oh no"])
        engine.script = lambda _: [started(), *text("Hel")[:2], Overloaded("busy")]
        assert (await client.post("/toy/ask", json={"ask": "hello", "stream": True})).text == "Hel!overloaded\n"


async def test_silence_is_filled_in_its_own_way(tmp_path: Path) -> None:
    async with toy(tmp_path, keepalive=0.01) as (engine, client):
        said = asyncio.Event()
        engine.script = lambda _: [started(), said, *hello()[1:]]
        wanted: Any = {"ask": "hello", "stream": True}
        async with client.stream("POST", "/toy/ask", json=wanted) as answer:
            pieces = answer.aiter_text()
            assert await anext(pieces) == "."
            said.set()
            rest = "".join([piece async for piece in pieces])
        assert rest.lstrip(".") == "Hello there.\n"


async def test_it_is_in_the_document_and_the_others_are_as_they_were(tmp_path: Path) -> None:
    async with toy(tmp_path) as (_, client):
        document = (await client.get("/openapi.json")).json()
        operation = document["paths"]["/toy/ask"]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"] == ASKED
        assert operation["responses"]["default"]["content"]["application/json"]["schema"] == {
            "anyOf": [{"$ref": "#/components/schemas/ToyError"}]
        }
        assert document["components"]["schemas"]["ToyError"] == TOY.errors.schema
        assert "error" in (await client.post("/v1/chat/completions", json={})).json()


def test_the_rest_of_the_addresses_belongs_to_one_wire() -> None:
    with pytest.raises(ValueError, match=ANY):
        Table([TOY])
