"""Who may ask at all: by the name that a request calls us, and by the page that it comes from."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from cli_session_proxy import logs
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.http.server import create_app
from cli_session_proxy.settings import Settings, load

from ..fakes import AGENT, FakeEngine, turn
from .test_server import HELLO, SOON, Door, Serving, serving

__all__ = ["serving"]  # a fixture

ALICE = "alices-secret-0123456789"
EXTENSION = "chrome-extension://abcdefghijklmnopabcdefghijklmnop"
ALLOWED = ("http://localhost:5173", "https://app.example", EXTENSION)


async def posted(door: Door, **headers: str) -> httpx.Response:
    return await door.post(headers=headers)


# --- the name that it calls us


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:8787", "localhost", "LOCALHOST:1", "[::1]", "[::1]:8787", "127.8.9.1:65535",
    ],
)  # fmt: skip
async def test_a_loopback_name_is_ours(serving: Serving, host: str) -> None:
    async with serving() as door:
        assert (await posted(door, Host=host)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil@127.0.0.1", "evil:x@localhost", "evil@localhost:8787", "127.0.0.1.", "localhost.", "localhost..",
        "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:80:80", "127.0.0.1 evil.example",
        "127.0.0.1/evil", "127.0.0.1#evil", "127.0.0.1?evil", "127.0.0.1\\evil", "localhost,evil.example", "::1",
        "[::1", "[::1]x", "[::1%25lo]", "[::1%lo]:80", "[127.0.0.1]", "[]", ":80", "0x7f.1", "2130706433", "127.1",
        "http://127.0.0.1", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example", "", "%6cocalhost",
    ],
)  # fmt: skip
async def test_no_other_spelling_of_it_is(serving: Serving, host: str) -> None:
    async with serving() as door:
        answer = await posted(door, Host=host)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Host")
        assert door.engine.requests == []


@pytest.mark.parametrize(
    "head", [b"", b"Host: localhost\r\nHost: evil.example\r\n", b"Host: localhost\r\nHost: localhost\r\n"]
)
async def test_a_request_has_one_host(serving: Serving, head: bytes) -> None:
    async with serving() as door:
        reader, writer = await door.raw(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + head + b"\r\n")
        assert (await asyncio.wait_for(reader.readline(), SOON)).startswith(b"HTTP/1.1 400")
        writer.close()


LENGTHS = (
    b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"Content-Length: 2\r\nContent-Length: 3\r\n",
    b"Content-Length: +2\r\n", b"Content-Length: 2, 2\r\n", b"Transfer-Encoding: chunked, identity\r\n",
    b"Content-Length : 2\r\n", b"Transfer-Encoding: xchunked\r\n",
)  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS)
async def test_a_request_has_one_length(serving: Serving, lengths: bytes) -> None:
    """Of two, a proxy in front may take the other one: the rest would be somebody else's request."""
    async with serving() as door:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        reader, writer = await door.raw(head + lengths + b"\r\n{}")
        assert (await asyncio.wait_for(reader.readline(), SOON)).startswith(b"HTTP/1.1 400")
        assert door.engine.requests == []
        writer.close()


# --- the page that it comes from


async def test_only_the_very_origin_that_was_asked_is_our_own_page(serving: Serving) -> None:
    """`http://localhost:5173` is every developer's dev server: it posted turns."""
    async with serving() as door:
        own = f"http://127.0.0.1:{door.port}"
        assert (await posted(door, Origin=own)).status_code == 200
        foreign = (
            "http://localhost:5173", "http://127.0.0.1", "http://127.0.0.1:80", f"https://127.0.0.1:{door.port}",
            f"http://localhost:{door.port}", "null", "*", "", "http://evil.example", f"{own}/", f"{own}.evil.example",
            f"http://evil@127.0.0.1:{door.port}", EXTENSION, "file://",
        )  # fmt: skip
        for origin in foreign:
            answer = await posted(door, Origin=origin)
            assert (origin, answer.status_code, answer.json()["error"]["param"]) == (origin, 400, "Origin")
            assert "access-control-allow-origin" not in answer.headers
            assert "allowed_origins" in answer.json()["error"]["message"]
        assert len(door.engine.requests) == 1


async def test_a_page_served_on_the_default_port_is_our_own(serving: Serving) -> None:
    async with serving() as door:
        for host, origin in (
            ("localhost", "http://localhost"),
            ("localhost:80", "http://localhost"),
            ("[::1]", "http://[::1]"),
        ):
            assert (await posted(door, Host=host, Origin=origin)).status_code == 200


@pytest.mark.parametrize("origin", ALLOWED)
async def test_an_allowed_origin_is_served_and_may_read_the_answer(serving: Serving, origin: str) -> None:
    async with serving(allowed_origins=ALLOWED) as door:
        answer = await posted(door, Origin=origin, **{"Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert "Origin" in answer.headers["vary"]
        assert "X-Turn-Id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        wrong = await door.http.post("/v1/chat/completions", json={"model": 5}, headers={"Origin": origin})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, origin)
        other = await posted(door, Origin="http://localhost:5174")
        assert (other.status_code, other.headers.get("access-control-allow-origin")) == (400, None)


async def test_a_preflight_is_answered_for_allowed_origins_alone_and_needs_no_key(serving: Serving) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-agent-id"}
    async with serving(allowed_origins=ALLOWED, keys={"alice": ALICE}) as door:
        allowed = await door.http.options("/v1/chat/completions", headers={"Origin": ALLOWED[0], **asks})
        assert (allowed.status_code, allowed.content) == (204, b"")
        said = allowed.headers
        assert said["access-control-allow-origin"] == ALLOWED[0]
        assert "POST" in said["access-control-allow-methods"]
        assert said["access-control-allow-headers"] == "authorization,x-agent-id"
        assert said["vary"] == "Origin"
        for origin in ("http://evil.example", "null", "*"):
            refused = await door.http.options("/v1/chat/completions", headers={"Origin": origin, **asks})
            assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (400, None)
        strange = {**asks, "Access-Control-Request-Headers": "x\x01y, z"}
        odd = await door.http.options("/v1/chat/completions", headers={"Origin": ALLOWED[0], **strange})
        assert "access-control-allow-headers" not in odd.headers
        assert (await posted(door, Origin=ALLOWED[0])).status_code == 401


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "", "localhost:5173", "http://*.example", "http://a.example/", "http://a.example/x", "http://u@a.example",
     "HTTP://", "http://a.example:99999", "http://a b"],
)  # fmt: skip
def test_an_origin_is_allowed_exactly_or_not_at_all(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        load(allowed_origins=[origin])


def test_a_default_port_and_capitals_are_the_same_origin() -> None:
    assert load(allowed_origins=["HTTPS://App.Example:443"]).allowed_origins == ("https://app.example",)


# --- what a browser says of itself


@pytest.mark.parametrize("site", ["cross-site", "same-site", "unheard-of"])
async def test_a_fetch_from_another_site_reads_and_runs_nothing(serving: Serving, site: str) -> None:
    """An <img>, a <script> or a form has no Origin."""
    engine = FakeEngine()
    engine.fake_store.agents["a"] = AGENT
    async with serving(engine=engine) as door:
        for path in ("/v1/chains/a", "/v1/chains/a?format=html", "/v1/chains", "/metrics", "/v1/models", "/ui/main.js"):
            answer = await door.http.get(path, headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})
            assert (path, answer.status_code) == (path, 400)
        framed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        assert (await door.http.get("/ui", headers=framed)).status_code == 400
        assert (await posted(door, **{"Sec-Fetch-Site": site})).status_code == 400
        # a person who follows a link to the page
        followed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert (await door.http.get("/ui", headers=followed)).status_code == 200
        dump = await door.http.get("/v1/chains/a?format=html", headers=followed)
        assert dump.status_code == 400
        for own in ("same-origin", "none"):
            assert (await door.http.get("/v1/chains/a", headers={"Sec-Fetch-Site": own})).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]
)
async def test_what_a_form_can_send_is_no_body_of_a_browser(serving: Serving, kind: str | None) -> None:
    async with serving(allowed_origins=ALLOWED) as door:
        content = {} if kind is None else {"Content-Type": kind}
        data = json.dumps(HELLO).encode()
        for said in (
            {"Origin": f"http://127.0.0.1:{door.port}"},
            {"Origin": ALLOWED[0]},
            {"Sec-Fetch-Site": "same-origin"},
        ):
            answer = await door.http.post("/v1/chat/completions", content=data, headers={**content, **said})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Type")
            for good in ("application/json", "application/json; charset=utf-8", "application/x+json"):
                headers = {"Content-Type": good, **said}
                answer = await door.http.post("/v1/chat/completions", content=data, headers=headers)
                assert answer.status_code == 200


async def test_programs_need_no_content_type(serving: Serving) -> None:
    """`curl -d` says that it sends a form."""
    async with serving() as door:
        for content in ({}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}):
            data = json.dumps(HELLO).encode()
            answer = await door.http.post("/v1/chat/completions", content=data, headers=content)
            assert answer.status_code == 200


# --- what an answer tells a browser


@pytest.mark.parametrize("format", ["json", "markdown", "mermaid", "html"])
async def test_a_dump_cannot_be_framed_sniffed_or_embedded(serving: Serving, format: str) -> None:
    engine = FakeEngine()
    engine.fake_store.agents["a"] = AGENT
    engine.fake_store.rows = [turn(1)]
    async with serving(engine=engine) as door:
        dump = await door.http.get("/v1/chains/a", params={"format": format})
        assert dump.status_code == 200
        assert "frame-ancestors 'none'" in dump.headers["content-security-policy"]
        assert dump.headers["x-content-type-options"] == "nosniff"
        assert dump.headers["cross-origin-resource-policy"] == "same-origin"
        assert ("sandbox" in dump.headers["content-security-policy"]) == (format == "html")


async def test_every_other_answer_carries_them_too(serving: Serving) -> None:
    async with serving() as door:
        for path in ("/v1/models", "/healthz", "/metrics", "/nowhere", "/ui", "/ui/main.js", "/openapi.json"):
            answer = await door.http.get(path)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            (policy,) = answer.headers.get_list("content-security-policy")
            for part in ("default-src 'none'", "base-uri 'none'", "frame-ancestors 'none'"):
                assert part in policy
            assert answer.headers["referrer-policy"] == "no-referrer"
            kept = "no-cache" if path.startswith("/ui") else "no-store"
            assert answer.headers["cache-control"] == kept
        streamed = await door.post({**HELLO, "stream": True})
        assert "no-store" in streamed.headers["cache-control"]


async def test_a_method_that_mirrors_the_request_is_not_served(serving: Serving) -> None:
    async with serving() as door:
        answer = await door.http.request("TRACE", "/v1/models", headers={"X-Mine": "secret-of-mine"})
        assert answer.status_code == 405
        assert "secret-of-mine" not in answer.text


async def test_who_was_refused_is_noted_without_what_they_presented(serving: Serving, tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var")
    logs.configure(settings)
    try:
        async with serving(keys={"alice": ALICE}) as door:
            await door.http.get("/v1/chains", headers={"x-api-key": "guessed-by-a-stranger"})
            await posted(door, Origin="http://evil.example")
            await posted(door, Host="evil.example")
    finally:
        logs.shut_down()
    lines = [json.loads(line) for line in logs.file_of(settings).read_text().splitlines()]
    noted = [(line["code"], line["param"]) for line in lines if line["event"] == "refused"]
    assert noted == [("unauthorized", None), ("invalid_request", "Origin"), ("invalid_request", "Host")]
    assert all(line["request_id"] for line in lines)
    assert not [line for line in lines if "guessed" in str(line) or "evil" in str(line)]


# --- keys in an address


async def test_a_key_stands_in_the_address_of_googles_routes_alone(serving: Serving) -> None:
    """An address ends up in logs and histories; only Google's clients know no other way."""
    async with serving(keys={"alice": ALICE}) as door:
        for path in (
            "/v1/chains",
            "/metrics",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/conversations/x",
            "/api/tags",
        ):
            assert (path, (await door.http.get(f"{path}?key={ALICE}")).status_code) == (path, 401)
        for path in ("/v1beta/models", "/v1/models", "/v1beta/interactions/x", "/v1/interactions/x"):
            assert (path, (await door.http.get(f"{path}?key={ALICE}")).status_code) != (path, 401)


# --- whatever is no HTTP request


class Sent:
    """What an ASGI app says to the server."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def receive(self) -> Any:
        return {"type": "websocket.connect"}


def socket_scope(path: str = "/v1/chat/completions", *, words: bool, **headers: str) -> dict[str, Any]:
    given = {"host": "127.0.0.1:8787", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return {
        "type": "websocket", "scheme": "ws", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "extensions": {"websocket.http.response": {}} if words else {}, "subprotocols": [], "state": {},
    }  # fmt: skip


def app_of(**options: Any) -> Starlette:
    return create_app(FakeEngine().as_engine(), Settings(**options))


REFUSED: tuple[tuple[dict[str, str], str], ...] = (
    ({"host": "evil.example"}, "Host"),
    ({"origin": "http://localhost:5173"}, "Origin"),
    ({"sec_fetch_site": "cross-site"}, "Origin"),
    ({}, "key"),
    ({"authorization": f"Bearer {ALICE}"}, "WebSocket"),
)


@pytest.mark.parametrize(("headers", "why"), REFUSED)
async def test_a_websocket_passes_the_same_gate_and_is_refused_in_words(headers: dict[str, str], why: str) -> None:
    sent = Sent()
    await app_of(keys={"alice": ALICE})(socket_scope(words=True, **headers), sent.receive, sent.send)
    start, body = sent.messages
    assert (start["type"], body["type"]) == ("websocket.http.response.start", "websocket.http.response.body")
    error = json.loads(body["body"])["error"]
    assert why in error["message"] or why == error["param"]
    assert start["status"] == {"key": 401, "WebSocket": 404}.get(why, 400)


@pytest.mark.parametrize(("headers", "why"), REFUSED)
async def test_without_words_a_websocket_is_closed(headers: dict[str, str], why: str) -> None:
    sent = Sent()
    await app_of(keys={"alice": ALICE})(socket_scope(words=False, **headers), sent.receive, sent.send)
    (close,) = sent.messages
    assert (close["type"], close["code"]) == ("websocket.close", 1008)
    assert why
    assert close["reason"]
    assert len(close["reason"].encode()) <= 123


async def test_what_is_no_request_at_all_is_no_way_in() -> None:
    sent = Sent()
    with pytest.raises(RuntimeError, match="webtransport"):
        await app_of()({"type": "webtransport", "headers": []}, sent.receive, sent.send)
    assert sent.messages == []


async def test_over_the_wire_a_websocket_handshake_passes_the_gate(serving: Serving) -> None:
    nonce = base64.b64encode(b"0123456789abcdef")
    wish = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
        + nonce
        + b"\r\n"
    )
    async with serving() as door:
        for origin, status in ((b"http://evil.example", b"400"), (b"http://127.0.0.1:%d" % door.port, b"101")):
            head = b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nOrigin: %b\r\n" % (door.port, origin)
            reader, writer = await door.raw(head + wish + b"\r\n")
            assert (await asyncio.wait_for(reader.readline(), SOON)).split()[1] == status
            writer.close()
