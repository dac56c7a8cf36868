"""A file that somebody gave us: nothing in it names a path, a status or a reason that we would not have made ourselves.

Each proof first: the files below, taken in, made a turn or a `delete` write and remove outside the agent's folders.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.commands import moving, verifying
from cli_session_proxy.domain.limits import LINE_VALUES, TURN_VALUES
from cli_session_proxy.domain.models import Conversation, Item, Link, Message, Record, Session, Turn
from cli_session_proxy.errors import InvalidRequest, ProxyError, SandboxError
from cli_session_proxy.export import incoming, shapes
from cli_session_proxy.export.formats import FORMATS
from cli_session_proxy.sandbox import Sandboxes, make_private
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import ChainPart, NewChain, WholeTurn
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..fakes import turn
from ..talking import ask, running
from .test_dumps import store_of

SESSION = "5e551011-0000-4000-8000-000000000001"
TURN_1, TURN_2 = "turn_" + "1" * 32, "turn_" + "2" * 32
# From `<config>/projects/<folder>/` up to a file beside the configuration.
CLIMBS = "../../../victim"
HEADER: dict[str, Any] = {
    "schema": "cli-session-proxy/export/3", "exported_at": 1.0, "head": TURN_1, "sandbox": "/x",
    "agent": {"agent_id": "a", "named": True, "created_at": 1.0},
}  # fmt: skip


def turn_line(**more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": TURN_1, "parent_id": None, "status": "completed", "model": "sonnet", "created_at": 1.0,
        "input": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "system": None, "effort": None,
        "profile": None, "output": [{"type": "text", "text": "Hi."}], "stop_reason": "end_turn",
        "session_id": SESSION, "continuity": "started", "placed": {}, "options": {},
        "evidence": {}, "stop_sequence": None, "backend": None, "answered_by": None, "usage": {},
        "cost_usd": None, "error": None, "attempts": [], "timings": {}, "tools": [],
        "delivery": "delivered", "origin": "chat", "frame_uuid": None,
        "path_hash": "ab", "depth": 1, "started_at": 1.0, "finished_at": 2.0, "call": None,
    }  # fmt: skip
    return {"turn": made | more}


def session_line(**more: Any) -> dict[str, Any]:
    made = {"id": SESSION, "tip_turn_id": TURN_1, "cli_version": "2.1.329", "created_at": 1.0, "cost_total_usd": 0.0}
    return {"session": made | more}


def link_line(**more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "from_session": None,
        "to_session": SESSION,
        "turn_id": TURN_1,
        "reason": "started",
        "detail": {},
        "at": 1.0,
    }
    return {"link": made | more}


def record_line(line: str = "{}", **more: Any) -> dict[str, Any]:
    return {"record": line, "uuid": None, "synthetic": False} | more


def file_line(name: str, data: bytes = b"owned\n") -> dict[str, Any]:
    kept = {"type": "cli-session-proxy/file", "name": name, "data": base64.b64encode(data).decode()}
    return record_line(json.dumps(kept, separators=(",", ":")))


def sealed(path: Path, *lines: dict[str, Any], **header: Any) -> Path:
    """An export whose sum is right, as anybody can make one."""
    every = [HEADER | header, *lines]
    body = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in every)
    counts = {"lines": len(every)} | {f"{kind}s": sum(kind in line for line in every) for kind in ("turn", "record")}
    end = {"end": counts | {"sha256": hashlib.sha256(body).hexdigest()}}
    path.write_bytes(body + json.dumps(end, separators=(",", ":")).encode() + b"\n")
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")


@pytest.fixture
def victim(tmp_path: Path) -> Callable[[], bool]:
    """Whether a file and a folder outside everything of the agent's are still as they were."""
    file, folder = tmp_path / "victim.jsonl", tmp_path / "victim"
    file.write_text("mine")
    folder.mkdir()
    (folder / "key").write_text("mine")
    return lambda: file.read_text() == "mine" and (folder / "key").read_text() == "mine"


async def refused(settings: Settings, path: Path, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        await moving.import_(settings, "local", path, None)
    assert await verifying.verify(settings, None, None) == []


# --- ids that climb out


@pytest.mark.parametrize(
    "lines",
    [
        (turn_line(session_id=CLIMBS), session_line()),
        (turn_line(), session_line(id=CLIMBS)),
        (turn_line(), session_line(), link_line(to_session=CLIMBS)),
        (turn_line(), session_line(), link_line(from_session=CLIMBS)),
    ],
    ids=["turn", "session", "link to", "link from"],
)
async def test_a_session_id_that_climbs_out_is_refused_wherever_it_stands(
    settings: Settings, tmp_path: Path, lines: tuple[dict[str, Any], ...]
) -> None:
    await refused(settings, sealed(tmp_path / "x.jsonl", *lines), "session")


async def test_nothing_outside_is_removed_with_an_agent_that_was_brought(
    settings: Settings, tmp_path: Path, victim: Callable[[], bool]
) -> None:
    """The proof: import, then delete. It removed `victim.jsonl` and the folder `victim`."""
    path = sealed(tmp_path / "x.jsonl", turn_line(session_id=CLIMBS), session_line())
    with contextlib.suppress(InvalidRequest):
        await moving.import_(settings, "local", path, None)
    async with running(settings) as engine:
        # the folder that the climbing starts from
        project(settings, "a").mkdir(parents=True)
        await engine.delete("local", "a")
    assert victim()


async def test_another_agents_session_that_a_turn_names_is_left_alone(settings: Settings, tmp_path: Path) -> None:
    """The proof: import, then delete. It removed the backups of that session, and ended its process."""
    own = sealed(tmp_path / "own.jsonl", turn_line(), session_line())
    await moving.import_(settings, "local", own, "mine")
    await moving.import_(settings, "local", sealed(tmp_path / "x.jsonl", turn_line(id=TURN_2), head=TURN_2), "brought")
    (settings.var / "salvage").mkdir()
    backup = settings.var / "salvage" / f"{SESSION}-1.jsonl"
    backup.touch()
    async with running(settings) as engine:
        await engine.delete("local", "brought")
        assert backup.exists()
        await engine.delete("local", "mine")
    assert not backup.exists()


def project(settings: Settings, directory: str) -> Path:
    from cli_session_proxy.backends.claude import transcript  # noqa: PLC0415 - the one test that needs it

    return transcript.project_dir(environment.config_dir(settings), Sandboxes(settings).path(directory))


async def brought_earlier(settings: Settings, session_id: str) -> None:
    """A chain as an earlier version took it in: its session has this id."""
    make_private(settings.var)
    store = SqliteStore(settings.var / FILE)
    await store.open()
    row = Turn(TURN_1, 0, 0, None, "completed", "sonnet", (Message.user("hello"),), 1.0, session_id=SESSION)
    parts: list[ChainPart] = [WholeTurn(row, (Record("{}"),)), Session(SESSION, 0, TURN_1, "", "2.1.329", 1.0)]
    await store.import_chain(NewChain("local", "a", "a", True, 1.0, 2.0, lambda: TURN_1), parts)
    await store.close()
    with sqlite3.connect(settings.var / FILE) as conn:
        conn.execute("UPDATE sessions SET id = ?", (session_id,))
        conn.execute("UPDATE turns SET session_id = ?", (session_id,))
    conn.close()


async def test_a_chain_that_an_earlier_version_took_in_can_be_deleted_and_nothing_else_goes(
    settings: Settings, victim: Callable[[], bool]
) -> None:
    await brought_earlier(settings, CLIMBS)
    project(settings, "a").mkdir(parents=True)
    async with running(settings) as engine:
        assert await engine.delete("local", "a")
        assert await engine.store.agent("local", "a") is None
    assert victim()


async def test_a_turn_on_such_a_chain_writes_nothing_outside(
    claude_2: Path, make_settings: MakeSettings, tmp_path: Path, upstream: Upstream, victim: Callable[[], bool]
) -> None:
    """The proof: one turn replaced `victim.jsonl` (a home's `.ssh/authorized_keys` in the review)."""
    settings = make_settings(claude_bin=claude_2, claude_config_dir=tmp_path / "config")
    await brought_earlier(settings, CLIMBS)
    project(settings, "a").mkdir(parents=True)
    async with running(settings) as engine:
        with pytest.raises(SandboxError, match="no session id"):
            await ask(engine, "hello again")
    assert victim()
    assert upstream.requests == []


async def test_the_store_takes_no_such_chain_by_another_way_either(settings: Settings) -> None:
    make_private(settings.var)
    store = SqliteStore(settings.var / FILE)
    await store.open()
    row = Turn(TURN_1, 0, 0, None, "completed", "sonnet", (Message.user("hello"),), 1.0)
    bad: list[list[ChainPart]] = [
        [WholeTurn(Turn(TURN_1, 0, 0, None, "completed", "s", row.input, 1.0, session_id=CLIMBS), ())],
        [WholeTurn(row, ()), Session(CLIMBS, 0, TURN_1, "", "", 1.0)],
        [WholeTurn(row, ()), Link(None, CLIMBS, TURN_1, "started", {}, 1.0)],
        [WholeTurn(row, ()), Link(CLIMBS, SESSION, TURN_1, "started", {}, 1.0)],
    ]
    for parts in bad:
        with pytest.raises(InvalidRequest, match="nothing was changed"):
            await store.import_chain(NewChain("local", "a", "a", True, 1.0, 2.0, lambda: TURN_1), parts)
    assert await store.agent("local", "a") is None
    await store.close()


# --- names of files


@pytest.mark.parametrize(
    "name",
    [
        "../../../victim/key", "/etc/x", f"{SESSION}/../../x", f"{SESSION}/../{SESSION}/x", "top-level.jsonl",
        f"{SESSION}.jsonl", "memory/MEMORY.md", f"{SESSION}//x", f"{SESSION}/./x", f"{SESSION}/", "", f"{SESSION}/a\0b",
    ],
)  # fmt: skip
@pytest.mark.sample(4)
async def test_a_file_of_an_export_has_its_place_below_a_sessions_own_folder(
    settings: Settings, tmp_path: Path, name: str
) -> None:
    await refused(settings, sealed(tmp_path / "x.jsonl", turn_line(), file_line(name), session_line()), "file")


@pytest.mark.parametrize("line", ["{}\n{}", "{}\r"])
async def test_a_record_is_one_line(settings: Settings, tmp_path: Path, line: str) -> None:
    await refused(settings, sealed(tmp_path / "x.jsonl", turn_line(), record_line(line), session_line()), "record")


# --- values that only we give

BAD_TURNS: dict[str, Any] = {
    "id": "<b>", "parent_id": "x' onclick='y", "status": 'x"];click b1 href "javascript:alert(1)"',
    "model": "--dangerously-skip-permissions", "continuity": "<b>", "delivery": "<b>", "origin": "a b",
    "effort": "--x", "stop_reason": "<b>", "profile": 7, "depth": -1, "created_at": "now", "finished_at": 1e300,
    "usage": {"input_tokens": 2**70}, "cost_usd": "1", "input": [{"role": "system", "content": []}],
    "output": [{"type": "text", "text": 5}], "attempts": [7], "placed": {"messages": -1},
    "options": {"tools": [7]}, "evidence": {"repaired": "x"}, "stop_sequence": 5, "backend": "<b>", "answered_by": "-x",
    "error": {"message": 5},
    "tools": ["x"], "timings": {"total": "x"}, "frame_uuid": "../x", "path_hash": 5, "system": 5, "call": {"shown": 5},
}  # fmt: skip


@pytest.mark.parametrize(("field", "told"), [("depth", 2**31 - 1), ("created_at", 1e11), ("finished_at", 1e12)])
async def test_what_a_turn_counts_leaves_room_for_the_next_one_and_its_times_can_be_written(
    settings: Settings, tmp_path: Path, field: str, told: float
) -> None:
    """The next turn of the agent failed for ever, or the overview of all agents."""
    await refused(settings, sealed(tmp_path / "x.jsonl", turn_line(**{field: told}), session_line()), field)


@pytest.mark.parametrize("field", BAD_TURNS)
@pytest.mark.sample(10)
async def test_a_turn_of_an_export_has_only_values_of_ours(settings: Settings, tmp_path: Path, field: str) -> None:
    path = sealed(tmp_path / "x.jsonl", turn_line(**{field: BAD_TURNS[field]}), session_line())
    await refused(settings, path, f"line 2: turn.{field}")


ODD_BLOCKS: list[Any] = [
    {}, {"type": ["text"]}, {"type": "thinking"}, {"type": "tool_result"}, {"type": "tool_result", "tool_use_id": 5},
    {"type": "tool_use", "id": "a", "name": "b"}, {"type": "tool_use", "id": 5, "name": "b", "input": {}},
    {"type": "image"}, {"type": "image", "source": "x"}, {"type": "image", "source": {"type": "url"}},
    {"type": "document", "source": {"type": "url", "url": "http://h"}},
    {"type": "document", "source": {"media_type": "text/plain", "data": "x"}},
]  # fmt: skip


@pytest.mark.parametrize("block", ODD_BLOCKS, ids=json.dumps)
@pytest.mark.sample(4)
async def test_a_block_has_what_every_wire_shows_of_it(settings: Settings, tmp_path: Path, block: Any) -> None:
    """The items of a response, of a conversation or of an interaction were a 500."""
    asked = sealed(tmp_path / "x.jsonl", turn_line(input=[{"role": "user", "content": [block]}]), session_line())
    await refused(settings, asked, "line 2: turn.input.0.content.0")
    await refused(settings, sealed(asked, turn_line(output=[block]), session_line()), "line 2: turn.output.0")


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("evidence", {"notes": [{"code": "<b>", "count": 1}]}), ("evidence", {"unmet": [5]}),
        ("options", {"parameters": {"max_tokens": "many"}}), ("options", {"window": "wide"}),
    ],
)  # fmt: skip
async def test_so_has_what_is_inside_of_them(settings: Settings, tmp_path: Path, field: str, told: Any) -> None:
    path = sealed(tmp_path / "x.jsonl", turn_line(**{field: told}), session_line())
    await refused(settings, path, f"line 2: turn.{field}")


BAD_LINKS: dict[str, Any] = {
    "reason": 'rebuilt|b1\nclick b1 href "javascript:alert(1)"', "detail": {"also_at": [5]}, "at": None,
    "turn_id": "click", "to_session": None,
}  # fmt: skip


@pytest.mark.parametrize("field", BAD_LINKS)
async def test_a_link_of_an_export_has_only_values_of_ours(settings: Settings, tmp_path: Path, field: str) -> None:
    path = sealed(tmp_path / "x.jsonl", turn_line(), session_line(), link_line(**{field: BAD_LINKS[field]}))
    await refused(settings, path, f"line 4: link.{field}")


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (session_line(cli_version="<b>"), "session.cli_version"),
        (session_line(created_at=-1), "session.created_at"),
        (record_line(uuid=5), "record.uuid"),
        ({"conversation": {"metadata": [], "removed": []}}, "conversation.metadata"),
        ({"item": {"id": "<b>", "data": {}, "turn_id": None}}, "item.id"),
        ({"image": "x", "data": "AAAA"}, "image"),
        ({"something": 1}, "something"),
    ],
)
async def test_every_other_line_too(settings: Settings, tmp_path: Path, line: dict[str, Any], where: str) -> None:
    await refused(settings, sealed(tmp_path / "x.jsonl", turn_line(), line, session_line()), f"line 3: {where}")


@pytest.mark.parametrize(
    "header",
    [
        {"agent": {"agent_id": 5, "named": True, "created_at": 1.0}}, {"agent": None}, {"head": "nobody"},
        {"agent": {"agent_id": "x" * 257, "named": True, "created_at": 1.0}},
        {"agent": {"agent_id": "a", "named": True, "created_at": float("nan")}},
    ],
)  # fmt: skip
async def test_its_head_too(settings: Settings, tmp_path: Path, header: dict[str, Any]) -> None:
    await refused(settings, sealed(tmp_path / "x.jsonl", turn_line(), session_line(), **header), "line 1|header")


@pytest.mark.parametrize("levels", [500, 900, 100_000])
async def test_a_line_nested_without_end_is_refused(settings: Settings, tmp_path: Path, levels: int) -> None:
    """Of 900 levels it was read, and the turns behind it were not."""
    path = sealed(tmp_path / "x.jsonl", turn_line(tools=[{"input": "DEEP"}]), session_line())
    raw = path.read_bytes().replace(b'"DEEP"', b"[" * levels + b"]" * levels)
    body, _, end = raw.rpartition(b'{"end"')
    sums = json.loads(b'{"end"' + end)
    sums["end"]["sha256"] = hashlib.sha256(body).hexdigest()
    path.write_bytes(body + json.dumps(sums, separators=(",", ":")).encode() + b"\n")
    await refused(settings, path, "nested")


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ((turn_line(tools=[{"input": [{}] * TURN_VALUES}]),), "line 2 has more than 2,000,000 JSON values"),
        ((turn_line(), record_line(json.dumps({"a": [{}] * LINE_VALUES}))), "line 3: record"),
        (
            (turn_line(), {"item": {"id": "msg_1", "data": {"a": [[]] * LINE_VALUES}, "turn_id": None}}),
            "line 3 has more than 500,000 JSON values",
        ),
    ],
    ids=["turn", "record", "item"],
)
async def test_a_line_of_very_many_values_is_refused(
    settings: Settings, tmp_path: Path, lines: tuple[dict[str, Any], ...], where: str
) -> None:
    """60 MB of `{},` in one line took 1.7 GB of memory."""
    await refused(settings, sealed(tmp_path / "x.jsonl", *lines, session_line()), where)


async def test_a_file_that_begins_with_half_a_character_is_refused(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"\\ud800":1}\n')
    await refused(settings, path, "no header")


def test_every_field_that_goes_out_is_checked_when_it_comes_in() -> None:
    own = {"seq", "agent_key", "instance", "fingerprint", "limit_wait", "mark", "transcript"}
    for row, kind in (
        (Turn, "turn"),
        (Session, "session"),
        (Link, "link"),
        (Item, "item"),
        (Conversation, "conversation"),
    ):
        checked = {field.alias for field in shapes.SHAPES[kind].model_fields.values()}
        assert {field.name for field in dataclasses.fields(row)} - own == checked, row


async def test_a_sound_file_comes_in(settings: Settings, tmp_path: Path) -> None:
    lines = (
        turn_line(),
        record_line('{"a":1}'),
        file_line(f"{SESSION}/tool-results/x.txt"),
        session_line(),
        link_line(),
    )
    done = await moving.import_(settings, "local", sealed(tmp_path / "x.jsonl", *lines), None)
    assert (done.turns, done.records) == (1, 2)


async def test_a_graph_is_never_syntax_of_a_strangers() -> None:
    """An earlier version may have taken such a chain in: mermaid took `click … javascript:` out of a reason."""
    hostile: Any = 'x|b1\n  click b1 href "javascript:alert(1)"\n  b1 -->|y'
    links = (Link(SESSION, SESSION, "turn_2", hostile, {}, 1.0),)
    rows = (turn(1), turn(2, status=hostile))
    (agent,) = (store := store_of(*rows, links=links)).agents.values()
    drawn = "".join([part async for part in FORMATS["mermaid"].write(store, agent, sandbox="x")])  # type: ignore[arg-type]
    assert not [line for line in drawn.splitlines() if line.strip().startswith("click")]
    assert "javascript:" not in drawn


# --- a transcript to adopt


def transcript_of(path: Path, session_id: str) -> Path:
    base = {"sessionId": session_id, "version": "2.1.329", "timestamp": "2026-11-20T10:00:00.000Z"}
    asked = {"type": "user", "uuid": "u1", "parentUuid": None, "message": {"role": "user", "content": "one"}}
    said = {
        "type": "assistant", "uuid": "a1", "parentUuid": "u1",
        "message": {"role": "assistant", "id": "m1", "model": "m", "content": [{"type": "text", "text": "x"}]},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(base | line) + "\n" for line in (asked, said)))
    return path


async def test_an_adopted_transcript_names_no_path(
    settings: Settings, tmp_path: Path, victim: Callable[[], bool]
) -> None:
    """The proof: its records said `sessionId: ../../../victim`, and `delete` removed that."""
    source = transcript_of(tmp_path / "given" / f"{SESSION}.jsonl", CLIMBS)
    done = await moving.adopt(settings, "local", str(source), "a")
    assert done.from_session == SESSION
    project(settings, "a").mkdir(parents=True, exist_ok=True)
    async with running(settings) as engine:
        assert await engine.delete("local", "a")
    assert victim()


@pytest.mark.parametrize("kind", ["image", "document"])
@pytest.mark.parametrize("data", ["\ud800", "\u00e4"])
async def test_a_medium_that_is_no_base64_is_left_out_of_an_adopted_transcript(
    settings: Settings, tmp_path: Path, kind: str, data: str
) -> None:
    source = transcript_of(tmp_path / f"{SESSION}.jsonl", SESSION)
    media = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": data}}
    asked = json.dumps([{"type": "text", "text": "look"}, media])
    source.write_text(source.read_text().replace('"content": "one"', f'"content": {asked}'))
    assert (await moving.adopt(settings, "local", str(source), "a")).turns == 1


@pytest.mark.parametrize("name", ["~nobody-has-this-name/x.jsonl", f"{'x' * 5000}.jsonl"])
async def test_a_name_that_no_file_can_have_is_not_found(settings: Settings, name: str) -> None:
    with pytest.raises(ProxyError, match="there is no file"):
        await moving.adopt(settings, "local", name, "a")


async def test_a_transcript_without_any_session_id_is_refused(settings: Settings, tmp_path: Path) -> None:
    source = transcript_of(tmp_path / "given" / "notes.jsonl", CLIMBS)
    with pytest.raises(ProxyError, match="rename"):
        await moving.adopt(settings, "local", str(source), "a")


async def test_only_files_are_copied_from_beside_an_adopted_transcript(
    settings: Settings, tmp_path: Path, victim: Callable[[], bool]
) -> None:
    """The proof: a link beside it was copied as it was, and files put back later were written where it led."""
    source = transcript_of(tmp_path / "given" / f"{SESSION}.jsonl", SESSION)
    beside = source.with_suffix("")
    (beside / "subagents").mkdir(parents=True)
    (beside / "subagents" / "agent-1.jsonl").write_text("{}")
    (beside / "tool-results").symlink_to(tmp_path / "victim")
    (beside / "subagents" / "link.txt").symlink_to(tmp_path / "victim" / "key")
    os.mkfifo(beside / "subagents" / "pipe")
    done = await asyncio.wait_for(moving.adopt(settings, "local", str(source), "a"), 60)
    new = project(settings, "a") / done.session_id
    assert [str(path.relative_to(new)) for path in new.rglob("*") if not path.is_dir()] == ["subagents/agent-1.jsonl"]
    assert done.files == 1
    assert not [path for path in new.rglob("*") if path.is_symlink()]


async def test_a_folder_beside_a_transcript_that_is_a_link_is_not_followed(settings: Settings, tmp_path: Path) -> None:
    source = transcript_of(tmp_path / "given" / f"{SESSION}.jsonl", SESSION)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    source.with_suffix("").symlink_to(tmp_path / "secret")
    done = await moving.adopt(settings, "local", str(source), "a")
    assert done.files == 0
    assert not list((tmp_path / "config").rglob("key"))


# --- what an image is put into: the offsets are the file's own, and so is what stands there


def image(data: str) -> tuple[str, dict[str, Any]]:
    sha256 = hashlib.sha256(data.encode()).hexdigest()
    return sha256, {"image": sha256, "data": data}


@pytest.mark.parametrize(
    ("into", "data"),
    [('"status":"completed', "AAAA"), ('"created_at":1.0', "e999"), ('"continuity":"started', "AAAA"),
     ('"depth":1', "0000"), ('"finished_at":2.0', "e300")],
)  # fmt: skip
async def test_an_image_changes_nothing_that_was_checked(
    settings: Settings, tmp_path: Path, into: str, data: str
) -> None:
    """It was put in after the line was looked at, wherever the file said."""
    sha256, line = image(data if into != '"depth":1' else data * 8)
    told = turn_line()
    offset = json.dumps(told["turn"], separators=(",", ":")).index(into) + len(into)
    lines = (line, told | {"images": [[offset, sha256]]}, session_line())
    await refused(settings, sealed(tmp_path / "x.jsonl", *lines), "line 3|no number")


@pytest.mark.parametrize("places", [[[0, 51]], [[9, 1], [5, 1]], [[-3, 1], [-9, 1]]], ids=["many", "back", "below"])
async def test_images_make_no_more_of_a_line_than_a_line_may_be(
    settings: Settings, tmp_path: Path, places: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte that a hundred bytes name a million times."""
    monkeypatch.setattr(incoming, "MAX_LINE", 50_000_000)
    sha256, line = image("A" * 1_000_000)
    named = [[offset, sha256] for offset, times in places for _ in range(times)]
    record = record_line("{}" + " " * 100) | {"images": named}
    path = sealed(tmp_path / "x.jsonl", line, turn_line(), record, session_line())
    await refused(settings, path, "line 4: images")


async def test_nor_do_many_lines_make_more_of_a_turn_than_can_be_loaded(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten lines of 100 bytes and an image of 20 MB took 2.2 GB, and each further one 100 MB more."""
    monkeypatch.setattr(incoming, "MOST_OF_A_TURN", 50_000)
    sha256, line = image("A" * 10_000)
    record = record_line('{"data":""}') | {"images": [[9, sha256]]}
    lines = (turn_line(), *[record] * 4, turn_line(id=TURN_2), *[record] * 4, session_line())
    await moving.import_(settings, "local", sealed(tmp_path / "x.jsonl", line, *lines), None)
    path = sealed(tmp_path / "x.jsonl", line, turn_line(), *[record] * 5, session_line())
    with pytest.raises(InvalidRequest, match="line 8: record: more than 50,000 characters of one turn"):
        await moving.import_(settings, "local", path, "b")


@pytest.mark.parametrize("line", ["[1]", '{"a":1', "words", '{"a":' * 5000 + "1" + "}" * 5000])
async def test_a_record_is_an_object_of_json(settings: Settings, tmp_path: Path, line: str) -> None:
    await refused(
        settings, sealed(tmp_path / "x.jsonl", turn_line(), record_line(line), session_line()), "record: no line"
    )


async def test_a_number_that_no_float_holds_is_refused(settings: Settings, tmp_path: Path) -> None:
    """Python reads it as infinity, and a page with that is no JSON."""
    path = sealed(tmp_path / "x.jsonl", turn_line(timings={"result": 12345.0}), session_line())
    raw = path.read_bytes().replace(b"12345.0", b"1.0e999")
    body, _, end = raw.rpartition(b'{"end"')
    sums = json.loads(b'{"end"' + end)
    sums["end"]["sha256"] = hashlib.sha256(body).hexdigest()
    path.write_bytes(body + json.dumps(sums, separators=(",", ":")).encode() + b"\n")
    await refused(settings, path, "line 2")


@pytest.mark.parametrize(
    "lines",
    [
        (turn_line(parent_id=TURN_1),),
        (turn_line(parent_id=TURN_2), turn_line(id=TURN_2, parent_id=TURN_1)),
        (turn_line(), turn_line(id=TURN_2, parent_id=TURN_2)),
        (turn_line(delivery="undelivered", call={"behind": TURN_1}),),
    ],
    ids=["one", "two", "beside the path", "without an answer that never arrived"],
)
async def test_turns_that_lead_in_a_circle_are_refused(
    settings: Settings, tmp_path: Path, lines: tuple[dict[str, Any], ...]
) -> None:
    await refused(settings, sealed(tmp_path / "x.jsonl", *lines, session_line()), "continues itself")


OTHER = "5e551011-0000-4000-8000-000000000002"


@pytest.mark.parametrize(
    "lines",
    [
        (turn_line(id=TURN_2, session_id=OTHER, parent_id=TURN_1),),
        (turn_line(id=TURN_2, session_id=OTHER), session_line(id=OTHER, tip_turn_id=TURN_1)),
        (turn_line(id=TURN_2, session_id=OTHER), link_line(to_session=OTHER)),
        (turn_line(id=TURN_2, session_id=OTHER), {"item": {"id": "item_1", "turn_id": TURN_1, "data": {}}}),
    ],
    ids=["parent", "session", "link", "item"],
)
async def test_a_chain_that_comes_in_leads_through_no_turn_of_another_agent(
    settings: Settings, tmp_path: Path, lines: tuple[dict[str, Any], ...]
) -> None:
    """Who knew the id of another owner's turn had a file continue it, and read what was said before."""
    await moving.import_(settings, "alice", sealed(tmp_path / "a.jsonl", turn_line(), session_line()), "hers")
    with pytest.raises(InvalidRequest, match=f"{TURN_1}, which is not there"):
        await moving.import_(settings, "bob", sealed(tmp_path / "b.jsonl", *lines, head=TURN_2), "his")


@pytest.mark.parametrize("more", [{}, {"delivery": "undelivered", "call": {"behind": TURN_1}}], ids=["id", "behind"])
async def test_an_image_makes_no_other_turn_of_one(settings: Settings, tmp_path: Path, more: dict[str, Any]) -> None:
    sha256, line = image("AAAA")
    told = turn_line(**({"id": TURN_2} | more if more else {}))
    offset = json.dumps(told["turn"], separators=(",", ":")).index(TURN_1) + len(TURN_1)
    lines = (line, told | {"images": [[offset, sha256]]}, session_line())
    await refused(settings, sealed(tmp_path / "x.jsonl", *lines), "line 3: images")
