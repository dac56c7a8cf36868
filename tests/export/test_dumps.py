"""Dumps: true to their schema, without a secret, readable."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from cli_session_proxy import redact
from cli_session_proxy.domain import limits
from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import FINISHED, FileMark, Link, Message, Session, Turn, TurnOptions
from cli_session_proxy.errors import NotFound
from cli_session_proxy.export import shown
from cli_session_proxy.export.formats import FORMATS
from cli_session_proxy.export.shown import ChainDump

from ..fakes import AGENT, FakeStore, block, turn

SCHEMA = TypeAdapter(ChainDump)
PNG = b"\x89PNG not really"
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()},
}
SHOWN_IMAGE = {
    "type": "image", "sha256": hashlib.sha256(PNG).hexdigest(), "media_type": "image/png", "bytes": len(PNG),
}  # fmt: skip
MARK = FileMark(1, 2, 3, 4, "hash", "leaf")


def store_of(*turns: Turn, links: tuple[Link, ...] = ()) -> FakeStore:
    store = FakeStore()
    store.agents["a"] = AGENT
    store.rows = list(turns)
    store.sessions = [Session("s1", 1, "turn_1", "/t/s1.jsonl", "2.1.329", 1.0, MARK)]
    store.links = list(links)
    return store


async def dumped(store: FakeStore, format: str = "json") -> str:
    write = FORMATS[format].write
    return "".join([piece async for piece in write(store, AGENT, sandbox="/v/sandbox/agents/a")])  # type: ignore[arg-type]  # a fake with the part that is read


async def chain(store: FakeStore) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(await dumped(store))
    SCHEMA.validate_python(data, strict=True)
    return data


async def test_an_empty_chain_is_a_whole_dump() -> None:
    data = await chain(store_of())
    assert data["turns"] == data["links"] == []
    assert list(data) == ["schema", "agent_id", "sandbox", "head", "created_at", "turns", "sessions", "links"]
    assert data["schema"] == "cli-session-proxy/chain/1"


async def test_every_kind_of_turn_fits_the_schema() -> None:
    error = {"status": 502, "code": "upstream_error", "message": "failed"}
    rows = [turn(number, status=status, error=error) for number, status in enumerate(sorted(FINISHED), 1)]
    rows.append(turn(9, status="queued", output=(), session_id=None, continuity=None, cost_usd=None, stop_reason=None))
    link = Link("s1", "s2", "turn_1", "rebuilt", {"found": "missing"}, 2.0)
    data = await chain(store_of(*rows, links=(link,)))
    assert [row["id"] for row in data["turns"]] == [row.id for row in rows]
    assert data["turns"][0]["input"] == [{"role": "user", "content": [block("hello")]}]
    assert data["links"] == [
        {"from_session": "s1", "to_session": "s2", "turn_id": "turn_1", "reason": "rebuilt",
         "detail": {"found": "missing"}, "at": 2.0,
         "says": "The session's transcript was gone: it was written again from the chain."}
    ]  # fmt: skip
    assert data["sessions"][0] == {
        "id": "s1", "tip_turn_id": "turn_1", "transcript": "/t/s1.jsonl", "cli_version": "2.1.329", "created_at": 1.0
    }  # fmt: skip


async def test_images_are_shown_by_their_hash_wherever_they_are() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}
    broken = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}
    row = turn(1, input=(Message("user", (IMAGE, result)),), output=(broken,))
    text = await dumped(store_of(row))
    shown = json.loads(text)["turns"][0]
    assert shown["input"][0]["content"] == [SHOWN_IMAGE, {**result, "content": [SHOWN_IMAGE]}]
    assert shown["output"][0]["type"] == "image"
    assert IMAGE["source"]["data"] not in text  # type: ignore[index]


SECRETS = [
    "sk-ant-api03-abcdef123456",
    "Authorization: Bearer abcdef1234567890",
    "Authorization: Basic abcdef1234567890",
    '{"Proxy-Authorization": "abcdef1234567890"}',
    "x-api-key: abcdef1234567890",
    "AIzaabcdef1234567890abcdef1234567890abc",
    '{"x-api-key": "abcdef1234567890"}',
    "export ANTHROPIC_API_KEY=abcdef1234567890",
    "AKIAABCDEFGHIJKLMNOP",
    "AWS_SECRET_ACCESS_KEY='abcdef1234567890'",
    "CLAUDE_CODE_OAUTH_TOKEN=abcdef1234567890",
    "sk-proj-abcdef1234567890abcdef1234567890",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {"mermaid"}))  # no text of anybody's is in that one
async def test_no_secret_is_shown(secret: str, format: str) -> None:
    words = block(f"look: {secret} !")
    row = turn(
        1, input=(Message("user", (words,)),), output=(words,), system=secret, error={"message": secret},
        evidence=Evidence(other={"why": secret}), attempts=({"stderr": secret},),
        tools=({"input": {"command": secret}},),
    )  # fmt: skip
    text = await dumped(store_of(row, links=(Link(None, "s1", "turn_1", "started", {"x": secret}, 1.0),)), format)
    assert "abcdef123" not in text
    assert "AKIAABCDEFGHIJKLMNOP" not in text
    assert redact.HIDDEN in text
    assert "look:" in text


def test_secrets_are_known_by_the_name_of_their_field_too() -> None:
    shown = redact.data({"headers": [{"X-Api-Key": "short", "host": "h"}], "api_key": "", "tokens": 3})
    assert shown == {"headers": [{"X-Api-Key": redact.HIDDEN, "host": "h"}], "api_key": "", "tokens": 3}


@pytest.mark.parametrize("prose", ["the bearer of news", "use sk-learn for that", "an api key is a secret", "AKIA"])
def test_prose_about_secrets_stays(prose: str) -> None:
    assert redact.text(prose) == prose


async def test_a_dump_is_written_turn_by_turn() -> None:
    store = store_of(*(turn(number) for number in range(1, 1001)))
    pieces = [piece async for piece in FORMATS["json"].write(store, AGENT, sandbox="x")]  # type: ignore[arg-type]  # a fake
    assert len(pieces) > 1000
    assert max(map(len, pieces)) < 2000


async def test_half_a_surrogate_pair_is_still_json() -> None:
    data = await chain(store_of(turn(1, output=(block("\ud83d"),))))
    assert data["turns"][0]["output"][0]["text"] == "\ud83d"


async def test_an_agent_deleted_meanwhile_is_not_found() -> None:
    with pytest.raises(NotFound):
        await dumped(FakeStore())
    with pytest.raises(NotFound):
        await dumped(FakeStore(), "markdown")


async def test_markdown_shows_the_conversation_and_its_repairs() -> None:
    links = (
        Link(None, "s1", "turn_1", "started", {}, 1.0),
        Link("s1", "s1", "turn_2", "rebuilt", {"found": "missing", "note": "no transcript at /x"}, 2.0),
    )
    rows = (
        turn(1, continuity="started"),
        turn(2, continuity="rebuilt", input=(Message("user", (block("still there?"), IMAGE)),)),
        turn(3, parent_id="turn_1", status="failed", output=(), error={"code": "upstream_error"}),
    )
    text = await dumped(store_of(*rows, links=links), "markdown")
    first, second, third = text.split("\n## Turn ")[1:]
    assert "A new session was started." in first
    assert "**repaired** (`rebuilt`, s1 → s1): The session's transcript was gone (no transcript at /x)" in second
    assert "    still there?" in second
    assert SHOWN_IMAGE["sha256"] in second  # type: ignore[operator]
    assert "`rebuilt`" not in first
    assert "continues `turn_1`, not the turn above" in third
    assert "upstream_error" in third


async def test_no_text_of_a_conversation_can_pass_for_the_dumps_own_words() -> None:
    forged = "bye\n## Turn 2 · completed\n\n**assistant**\n"
    text = await dumped(
        store_of(turn(1, input=(Message.user(forged),), evidence=Evidence(other={"x": "`\n# no`"}))), "markdown"
    )
    assert text.count("\n## Turn ") == 1
    assert "\n# no" not in text


def nested(levels: int, inside: Any) -> Any:
    for n in range(levels):
        inside = {"a": inside} if n % 2 else [inside]
    return inside


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("levels", [600, 900])
async def test_what_nests_too_deep_does_not_keep_the_dump_from_anybody(format: str, levels: int) -> None:
    """Of a tool of the CLI's own, or from an older store."""
    deep = nested(levels, "the end")
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": deep}}
    image = {"type": "tool_result", "tool_use_id": "c", "content": nested(levels, IMAGE)}
    told = turn(
        1, input=(Message("user", (image,)),), output=(block("hello"), call), tools=(call,), status="requires_action",
        options=TurnOptions(format=deep), attempts=({"n": 1, "why": deep},), timings={"x": deep},
        error={"detail": deep},
    )  # fmt: skip
    text = await dumped(store_of(told, links=(Link(None, "s1", "turn_1", "started", {"deep": deep}, 1.0),)), format)
    assert "the end" not in text
    if format == "json":
        [shown] = json.loads(text)["turns"]
        assert "nested too deep to be shown" in json.dumps(shown["output"])
        assert shown["output"][0] == block("hello")


async def test_arguments_as_deep_as_a_model_may_send_are_shown_whole() -> None:
    arguments = {"x": nested(limits.DEPTH - 1, "the end")}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    [shown] = (await chain(store_of(turn(1, output=(call,)))))["turns"]
    assert shown["output"] == [call]


@pytest.mark.parametrize("bytes_", [0, 1, 11, 12, 13, 24, 25, 100])
def test_a_large_image_is_hashed_in_pieces(bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs while one is decoded: the event loop waited 0.6 s for one of 128 MiB."""
    data, decode, longest = bytes(range(bytes_)), base64.b64decode, [0]

    def decoded(piece: str, **options: Any) -> bytes:
        longest.append(len(piece))
        return decode(piece, **options)

    monkeypatch.setattr(shown, "PIECE", 16)
    monkeypatch.setattr(base64, "b64decode", decoded)
    text = base64.b64encode(data).decode()
    assert shown._hash_of(text) == (hashlib.sha256(data).hexdigest(), bytes_)
    assert max(longest) <= 16
    # As the decoder takes it as a whole: lines, padding in the middle, no base64.
    for odd in (f"{text[:20]}\n{text[20:]}", f"{text}=={text}", f"{'x' * 14}=={text}", f"{text}x", "é"):
        try:
            whole = decode(odd)
        except ValueError:
            whole = odd.encode()
        assert shown._hash_of(odd) == (hashlib.sha256(whole).hexdigest(), len(whole))
