"""The audit: a line for each that read, deleted or changed something, with who and from where, and no secret in it."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from cli_session_proxy.cli import main
from cli_session_proxy.commands.chatting import LocalTalk
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import NotFound, StoreUnavailable
from cli_session_proxy.http.audit import FILE, POLLED, Audit, AuditLine, action_of, audit_of, expires
from cli_session_proxy.http.keys import Keys
from cli_session_proxy.http.server import create_app
from cli_session_proxy.settings import Settings
from cli_session_proxy.wires.asgi import Address

from ..conftest import MakeSettings
from ..memory_backend import MemoryBackend
from ..serving import serving
from ..talking import ask
from .cluster import cluster

ALICE, BOB = "alice-secret-0123456789", "bob-secret-0123456789"
# Routes that make a turn, or show nothing of a conversation. Every other one is noted.
UNNOTED = {
    "POST /v1/chat/completions", "POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/responses",
    "POST /v1/responses/input_tokens", "POST /v1/responses/compact", "POST /api/chat", "POST /api/generate",
    "POST /api/show", "GET /api/tags", "GET /api/ps", "GET /api/version", "GET /", "HEAD /", "GET /healthz",
    "GET /readyz", "GET /metrics", "GET /openapi.json", "GET /ui", "GET /ui/", "GET /ui/{name}", "GET /v1/models",
    "GET /v1/models/{model}", "GET /v1beta/models", "GET /v1beta/models/{model}",
}  # fmt: skip


def keyed(tmp_path: Path, **more: Any) -> Settings:
    keys = {"alice": SecretStr(ALICE), "bob": SecretStr(BOB)}
    place: dict[str, Any] = {"var": tmp_path / "var", "claude_config_dir": tmp_path / "config"}
    return Settings(**place, port=0, keys=keys, **more)


@asynccontextmanager
async def server(settings: Settings) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    try:
        async with serving(engine, settings) as url:
            root = url.removesuffix("/v1")
            async with httpx.AsyncClient(base_url=root, trust_env=False, headers={"x-api-key": ALICE}) as http:
                yield engine, http
    finally:
        await engine.stop()


def told(settings: Settings) -> list[AuditLine]:
    audit = audit_of(settings)
    assert audit is not None
    return list(audit.lines())


def routes(settings: Settings) -> set[str]:
    app = create_app(Engine(settings), settings)
    found = {(method, one.path) for one in app.routes if isinstance(one, Address) for method in one.methods or ()}
    return {f"{method} {path.replace(':path}', '}')}" for method, path in found}


def test_every_route_is_noted_but_those_that_make_a_turn_or_show_nothing(make_settings: MakeSettings) -> None:
    every = routes(make_settings())
    unnoted = {one for one in every if action_of(*one.split(" ", 1)) is None}
    turns = {one for one in unnoted if re.match(r"POST /(v1|v1beta|v1alpha)/(models/|interactions$)", one)}
    retired = {one for one in unnoted if re.search("/(assistants|threads)", one)}
    assert unnoted - turns - retired == UNNOTED & every


async def test_who_did_what_from_where_stands_in_a_line(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    async with server(settings) as (engine, http):
        await ask(engine, "a word of the conversation", agent="ada", owner="alice")
        turn = await ask(engine, "and another", agent="ada", owner="alice")
        assert (await http.get("/v1/chains/ada", headers={"X-Request-Id": "mine"})).status_code == 200
        assert (await http.get(f"/v1/chains/ada/turns/{turn.id}")).status_code == 200
        assert (await http.post("/v1/chains/ada/rewind", json={"to": "-1"})).status_code == 200
        assert (await http.delete("/v1/chains/ada", headers={"x-api-key": BOB})).status_code == 404
        assert (await http.delete("/v1/chains/ada")).status_code == 200
        assert (await http.get("/healthz")).status_code == 200
    lines = told(settings)
    assert [(one.type, one.what, one.owner, one.key, one.status, one.address) for one in lines] == [
        ("read", "GET /v1/chains/ada", "alice", "alice", 200, "127.0.0.1"),
        ("read", f"GET /v1/chains/ada/turns/{turn.id}", "alice", "alice", 200, "127.0.0.1"),
        ("rewind", "POST /v1/chains/ada/rewind", "alice", "alice", None, "127.0.0.1"),
        ("rewind", "POST /v1/chains/ada/rewind", "alice", "alice", 200, "127.0.0.1"),
        ("delete", "DELETE /v1/chains/ada", "bob", "bob", None, "127.0.0.1"),
        ("delete", "DELETE /v1/chains/ada", "bob", "bob", 404, "127.0.0.1"),
        ("delete", "DELETE /v1/chains/ada", "alice", "alice", None, "127.0.0.1"),
        ("delete", "DELETE /v1/chains/ada", "alice", "alice", 200, "127.0.0.1"),
    ]
    assert lines[3].detail == {"was": turn.id, "head": turn.parent_id}
    assert lines[0].request_id == "mine"
    path = settings.var / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "word" not in path.read_text()


async def test_no_secret_is_in_it_whatever_is_asked(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    canary = "sk-ant-api03-" + "c4n4ry" * 8
    async with server(settings) as (_, http):
        for one in sorted(routes(settings)):
            method, path = one.split(" ", 1)
            path = re.sub(r"\{\w+\}", canary, path)
            asked = {"key": ALICE, "q": canary, "agent": canary}
            given: dict[str, Any] = (
                {} if method in ("GET", "HEAD", "DELETE") else {"json": {"to": canary, "input": canary}}
            )
            headers = {"authorization": f"Bearer {ALICE}", "x-agent-id": canary, "cookie": canary}
            async with http.stream(method, path, params=asked, headers=headers, **given) as answer:
                assert answer.status_code != 500, one
    text = (settings.var / FILE).read_text()
    assert len(text.splitlines()) > 15
    assert not [secret for secret in (ALICE, BOB, canary, "c4n4ry") if secret in text]


@pytest.mark.parametrize(
    ("more", "is_on"), [({}, False), ({"make_key": True}, False), ({"audit": Path("audit.jsonl")}, True)]
)
def test_somebody_alone_has_none_unless_a_file_is_named(tmp_path: Path, more: dict[str, Any], is_on: bool) -> None:
    assert (audit_of(Settings(var=tmp_path / "var", **more)) is not None) is is_on


async def test_without_keys_a_named_file_has_no_name_of_one(tmp_path: Path) -> None:
    place: dict[str, Any] = {"var": tmp_path / "var", "claude_config_dir": tmp_path / "config"}
    settings = Settings(**place, port=0, audit=tmp_path / "a.jsonl")
    async with server(settings) as (engine, http):
        await ask(engine, "hello", agent="ada")
        await http.get("/v1/chains/ada")
    (line,) = told(settings)
    assert (line.owner, line.key) == ("local", None)


async def test_what_a_page_asks_again_and_again_is_noted_once(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    async with server(settings) as (_, http):
        for _ in range(5):
            for path in sorted(POLLED):
                assert (await http.get(path)).status_code == 200
        await http.get("/v1/chains", headers={"x-api-key": BOB})
    assert sorted((one.owner, one.what) for one in told(settings)) == sorted(
        [*(("alice", f"GET {path}") for path in POLLED), ("bob", "GET /v1/chains")]
    )


async def test_nothing_is_shown_that_cannot_be_noted(tmp_path: Path) -> None:
    settings = keyed(tmp_path, audit=tmp_path / "audit.jsonl")
    async with server(settings) as (engine, http):
        await ask(engine, "a word of the conversation", agent="ada", owner="alice")
        (tmp_path / "audit.jsonl").mkdir()
        answer = await http.get("/v1/chains/ada")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert "word" not in answer.text
        (tmp_path / "audit.jsonl").rmdir()
        assert (await http.get("/v1/chains/ada")).status_code == 200


async def test_a_change_is_noted_before_it_is_done_and_not_done_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = keyed(tmp_path, audit=tmp_path / "audit.jsonl")
    async with server(settings) as (engine, http):
        await ask(engine, "hello", agent="ada", owner="alice")
        (tmp_path / "audit.jsonl").mkdir()
        assert (await http.delete("/v1/chains/ada")).status_code == 503
        assert await engine.store.agent("alice", "ada") is not None
        (tmp_path / "audit.jsonl").rmdir()
        seen: list[list[AuditLine]] = []
        delete = engine.delete

        async def killed(owner: str, agent_id: str) -> bool:
            seen.append(told(settings))
            await delete(owner, agent_id)
            (tmp_path / "audit.jsonl").rename(tmp_path / "aside")
            (tmp_path / "audit.jsonl").mkdir()  # the disk is full when the answer is noted
            return True

        monkeypatch.setattr(engine, "delete", killed)
        assert (await http.delete("/v1/chains/ada")).status_code == 200  # it was done, and that was noted
    assert [[(one.type, one.owner, one.status) for one in lines] for lines in seen] == [[("delete", "alice", None)]]


async def test_every_proxy_of_a_cluster_notes_what_it_was_asked(postgres_url: str, tmp_path: Path) -> None:
    keys = {"local": SecretStr(ALICE)}
    given = {"x-api-key": ALICE}
    async with cluster(postgres_url, tmp_path, keys=keys) as (one, two):
        assert (await one.chat("hello", headers=given)).status_code == 200
        assert (await one.http.get("/v1/chains/a", headers=given)).status_code == 200
        assert (await two.http.delete("/v1/chains/a", headers=given)).status_code == 200
        here, there = told(one.settings), told(two.settings)
    assert [(line.type, line.key, line.status) for line in here] == [("read", "local", 200)]
    assert [(line.type, line.key, line.status) for line in there] == [
        ("delete", "local", None),
        ("delete", "local", 200),
    ]


def line(what: str) -> AuditLine:
    return AuditLine("read", 1_790_000_000.0, "http", what, "alice", "alice", "10.0.0.2", "req_1", 200)


def test_it_is_only_appended_to_and_goes_on_when_it_is_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    one, two = Audit(path), Audit(path)
    one.write(line("GET /1"))
    two.write(line("GET /2"))
    path.rename(tmp_path / "audit.jsonl.1")
    one.write(line("GET /3"))
    two.write(line("GET /4"))
    with path.open("a") as file:
        file.write('{"type":"read","at":1')  # torn: a full disk, or a machine without power
    three = Audit(path)
    three.write(line("GET /5"))
    three.close()
    assert [told.what for told in one.lines()] == ["GET /1", "GET /2", "GET /3", "GET /4", "GET /5"]
    for audit in (one, two):
        audit.close()


def test_a_line_behind_one_that_a_full_disk_cut_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit, write, room = Audit(tmp_path / "audit.jsonl"), os.write, [20]

    def full(fd: int, data: bytes) -> int:
        return write(fd, data[: room.pop()] if room else data)

    monkeypatch.setattr("cli_session_proxy.http.audit.os.write", full)
    with pytest.raises(StoreUnavailable, match="full"):
        audit.write(line("GET /1"))
    audit.write(line("GET /2"))
    audit.close()
    assert [one.what for one in audit.lines()] == ["GET /2"]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(StoreUnavailable):
        Audit(tmp_path / "audit.jsonl").write(line("GET /1"))
    assert not (tmp_path / "other").exists()


def test_changed_keys_are_noted_by_name_without_what_would_tell_them(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    audit = audit_of(settings)
    assert audit is not None

    def note(**keys: str) -> dict[str, Any]:
        now = settings.model_copy(update={"keys": {name: SecretStr(secret) for name, secret in keys.items()}})
        audit.keys(settings.var, Keys(now).secrets)
        return {name: told(settings)[-1].detail[name] for name in ("added", "removed", "changed")}

    assert note(alice=ALICE, bob=BOB) == {"added": ["alice", "bob"], "removed": [], "changed": []}
    assert note(alice=ALICE, bob=BOB)["added"] == ["alice", "bob"]  # nothing new is written
    assert len(told(settings)) == 1
    assert note(alice=BOB[::-1], carl=ALICE) == {"added": ["carl"], "removed": ["bob"], "changed": ["alice"]}
    text = (settings.var / FILE).read_text()
    assert ALICE not in text
    assert BOB not in text
    audit.close()


def test_commands_are_noted_and_audit_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLI_SESSION_PROXY_AUDIT", str(tmp_path / "audit.jsonl"))
    var = ("--var", str(tmp_path / "var"))
    with pytest.raises(SystemExit):
        main(["delete", "ada", "--yes", "--owner", "alice", *var])
    with pytest.raises(SystemExit) as ended:
        main(["audit", "--json", *var])
    assert ended.value.code == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["type"], first["what"], first["owner"], first["by"]) == ("delete", "delete ada", "alice", "command")
    assert first["address"]
    assert (second["type"], second["what"]) == ("read", "audit")
    with pytest.raises(SystemExit):
        main(["audit", "--type", "delete", *var])
    assert "delete   alice from" in capsys.readouterr().out


def test_behind_a_gateway_commands_are_noted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLI_SESSION_PROXY_TRUSTED_HEADER", "X-User")
    monkeypatch.setenv("CLI_SESSION_PROXY_TRUSTED_HEADER_FROM", '["10.1.2.3"]')
    with pytest.raises(SystemExit):
        main(["delete", "ada", "--yes", "--owner", "alice", "--var", str(tmp_path / "var")])
    lines = map(json.loads, (tmp_path / "var" / FILE).read_text().splitlines())
    assert [(one["what"], one["owner"]) for one in lines] == [("delete ada", "alice")]


async def test_what_goes_by_itself_after_retention_days_is_noted(tmp_path: Path) -> None:
    settings = keyed(tmp_path, retention_days=1.0)
    audit = audit_of(settings)
    assert audit is not None
    async with server(settings) as (engine, _):
        engine.forgetting.expires = partial(expires, audit)  # as `serve` does
        await ask(engine, "hello", agent="ada", owner="alice")
        await engine.forgetting.idle(-1.0)
        assert await engine.store.agent("alice", "ada") is None
    assert [(one.type, one.by, one.what, one.owner) for one in told(settings)] == [
        ("delete", "serve", "retention_days ada", "alice")
    ]
    audit.close()


async def test_a_persons_word_in_a_chat_without_a_server_is_noted(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    async with server(settings) as (engine, _):
        await ask(engine, "hello", agent="ada", owner="alice")
        chat = LocalTalk(engine, "alice", "ada", "sonnet", audit_of(settings))
        with pytest.raises(NotFound):
            await chat.decide("appr_1", "deny", "a word")
        await chat.rewind("-1")
    assert [(one.type, one.by, one.what, one.owner, one.detail) for one in told(settings)] == [
        ("approve", "command", "chat ada", "alice", {"approval": "appr_1", "outcome": "denied"}),
        ("rewind", "command", "chat ada", "alice", {}),
    ]
    assert "a word" not in (settings.var / FILE).read_text()


def test_audit_without_one_says_how_to_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "--var", str(tmp_path / "var")])
    assert ended.value.code == 2
    assert "set audit =" in capsys.readouterr().err
