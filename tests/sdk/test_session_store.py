"""Applications of `claude-agent-sdk` on the chain: its own contracts, and the real SDK with the real CLI."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, project_key_for_directory, query
from claude_agent_sdk.testing import run_session_store_conformance

from cli_session_proxy import ask, sdk
from cli_session_proxy.domain.models import Record
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.sdk import ChainSessionStore, runtime
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import MirrorKey
from cli_session_proxy.stores.sqlite.store import SqliteStore
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..memory_backend import MemoryBackend
from ..serving import serving
from ..talking import ask as say
from ..talking import heard, running, text

App = Callable[..., Any]


@pytest.fixture
def settings(claude_2: Path, make_settings: MakeSettings) -> Iterator[Settings]:
    made = make_settings(claude_bin=claude_2)
    runtime.configure(made)
    yield made
    runtime.close()


@pytest.fixture
def without_cli(tmp_path: Path) -> Iterator[None]:
    """The engine of this process has no CLI: nothing here asks a model."""
    runtime.configure(
        Settings(var=tmp_path / "var"), engine_factory=lambda settings: Engine(settings, backend=MemoryBackend())
    )
    yield
    runtime.close()


@pytest.fixture
def app(claude_2: Path, claude_env: dict[str, str], tmp_path: Path) -> App:
    """`await app(store, "hello", cwd=…)`: one prompt with the Agent SDK; the session's id."""

    async def run(store: ChainSessionStore, said: str, **options: Any) -> str:
        env = {**claude_env, "CLAUDE_CONFIG_DIR": str(tmp_path / "app-config")}
        given = ClaudeAgentOptions(
            session_store=store, cli_path=claude_2, env=env, tools=[], setting_sources=[], model="sonnet", **options
        )
        ended = [message async for message in query(prompt=said, options=given) if isinstance(message, ResultMessage)]
        assert [message.is_error for message in ended] == [False]
        return ended[0].session_id

    return run


def entries(*said: str, session_id: str, parent: str | None = None, tag: str = "") -> list[Any]:
    """A transcript as the CLI writes it: user, assistant, user, …"""
    made: list[Any] = []
    for number, words in enumerate(said):
        role = "assistant" if number % 2 else "user"
        body: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": words}]}
        if role == "assistant":
            body |= {"id": f"msg_{tag}{number}", "model": "claude-test", "stop_reason": "end_turn", "usage": {}}
        made.append(
            {
                "parentUuid": parent, "isSidechain": False, "sessionId": session_id, "type": role, "message": body,
                "uuid": f"{tag}{number}", "timestamp": f"2026-01-01T00:00:0{number}.000Z",
            }
        )  # fmt: skip
        parent = f"{tag}{number}"
    return made


async def test_it_keeps_the_contracts_of_the_sdk(without_cli: None) -> None:
    number = count()
    await run_session_store_conformance(lambda: ChainSessionStore(f"agent {next(number)}"))


async def test_the_real_cli_backend_keeps_them_too(settings: Settings) -> None:
    number = count()
    await run_session_store_conformance(lambda: ChainSessionStore(f"agent {next(number)}"))


async def test_an_application_and_the_proxy_go_on_from_each_other(
    settings: Settings, upstream: Upstream, app: App
) -> None:
    store = ChainSessionStore("a")
    cwd = await store.directory()
    first = await app(store, "remember a = 1", cwd=cwd)
    _, told = await ask("recall", agent_id="a", model="sonnet")
    assert told == "I remember: a is 1."
    await ask("remember b = 2", agent_id="a", model="sonnet")
    again = await app(store, "remember c = 3", cwd=cwd, continue_conversation=True)
    said = ["remember a = 1", "recall", "remember b = 2", "remember c = 3"]
    assert heard(upstream) == said
    named = await app(store, "remember d = 4", cwd=cwd, resume=again)
    assert first == again == named
    # Another proxy on the same chain, and what it shows of it.
    async with running(settings) as engine, serving(engine, settings):
        turn = await say(engine, "recall")
        assert text(turn) == "I remember: a is 1; b is 2; c is 3; d is 4."
        path = await engine.store.path(turn.id)
        assert [one.origin for one in path] == ["adopted", "episode", "episode", "adopted", "adopted", "chat"]
        assert heard(upstream) == [*said, "remember d = 4", "recall"]


@pytest.mark.full
async def test_an_application_with_a_directory_of_its_own_is_on_the_chain_too(
    settings: Settings, upstream: Upstream, app: App, tmp_path: Path
) -> None:
    store = ChainSessionStore("a")
    first = await app(store, "remember a = 1", cwd=tmp_path)
    await ask("remember b = 2", agent_id="a", model="sonnet")
    await app(store, "remember c = 3", cwd=tmp_path, resume=first)
    assert heard(upstream) == ["remember a = 1", "remember b = 2", "remember c = 3"]
    _, told = await ask("recall", agent_id="a", model="sonnet")
    assert told == "I remember: a is 1; b is 2; c is 3."


async def test_what_the_chain_said_meanwhile_stands_before_what_the_application_says(
    settings: Settings, upstream: Upstream
) -> None:
    store, session_id = ChainSessionStore("a"), str(uuid.uuid4())
    key: Any = {"project_key": "p", "session_id": session_id}
    await store.append(key, entries("remember a = 1", "Noted.", session_id=session_id, tag="one-"))
    await ask("remember b = 2", agent_id="a", model="sonnet")
    # It resumed before that, and knows nothing of b.
    late = entries("remember c = 3", "Noted too.", session_id=session_id, parent="one-1", tag="two-")
    await store.append(key, late)
    await store.append(key, late)  # the SDK sends a batch again where it heard nothing
    _, told = await ask("recall", agent_id="a", model="sonnet")
    assert told == "I remember: a is 1; b is 2; c is 3."
    assert heard(upstream) == ["remember a = 1", "remember b = 2", "remember c = 3", "recall"]


def on_path(loaded: list[Any] | None) -> list[str]:
    """The uuids that a CLI takes as the conversation: those from the last line to the first."""
    by_uuid = {entry["uuid"]: entry for entry in loaded or () if "uuid" in entry}
    path: list[str] = []
    at = list(by_uuid)[-1]
    while at is not None:
        assert at not in path
        path.append(at)
        at = by_uuid[at]["parentUuid"]
    return path[::-1]


@pytest.mark.parametrize("order", ["abAB", "abBA", "asbAB", "asAbB", "aAsbB"])
async def test_what_two_applications_say_at_once_in_one_session_is_all_on_the_path(
    order: str, settings: Settings
) -> None:
    """Both have resumed it, and each line is sent as it comes. If the first one's prompt was there already, the CLI of
    the second one answers it (`s`) and goes on."""
    store, session_id = ChainSessionStore("a"), str(uuid.uuid4())
    key: Any = {"project_key": "p", "session_id": session_id}
    begin = entries("hello", "Hi.", session_id=session_id, tag="begin-")
    await store.append(key, begin)
    first = entries("one", "Said one.", session_id=session_id, parent="begin-1", tag="one-")
    (skipped,) = entries("one", "Skipped.", session_id=session_id, tag="skipped-")[1:]
    skipped["parentUuid"], skipped["message"]["model"] = "one-0", "<synthetic>"
    before = "skipped-1" if "s" in order else "begin-1"
    second = entries("two", "Said two.", session_id=session_id, parent=before, tag="two-")
    lines = dict(zip("aAsbB", (*first, skipped, *second), strict=True))
    for name in order:
        await store.append(key, [lines[name]])
    said = [lines[name]["uuid"] for name in order]
    assert on_path(await store.load(key)) == ["begin-0", "begin-1", *said]


@pytest.mark.parametrize("order", ["pcPraA", "pcPAra", "pPcrAa", "pcraPA", "pceraPA"])
async def test_a_result_behind_another_applications_prompt_is_shown_as_words(order: str, settings: Settings) -> None:
    """A CLI leaves out a result that does not follow its call, and the provider refuses it. An error that the CLI noted
    in between (`e`) separates nothing."""
    store, session_id = ChainSessionStore("a"), str(uuid.uuid4())
    key: Any = {"project_key": "p", "session_id": session_id}
    begin = entries("hello", "Hi.", session_id=session_id, tag="begin-")
    await store.append(key, begin)
    one = entries("one", "", "", "Said one.", session_id=session_id, parent="begin-1", tag="one-")
    one[1]["message"]["content"] = [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]
    one[1]["message"]["stop_reason"] = "tool_use"
    one[2]["message"]["content"] = [{"type": "tool_result", "tool_use_id": "t", "content": "sunny"}]
    (error,) = entries("one", "API Error", session_id=session_id, tag="error-")[1:]
    error |= {"parentUuid": "one-1", "isApiErrorMessage": True}
    error["message"] |= {"model": "<synthetic>", "stop_reason": "stop_sequence"}
    two = entries("two", "Said two.", session_id=session_id, parent="begin-1", tag="two-")
    lines = dict(zip("pceraPA", (*one[:2], error, *one[2:], *two), strict=True))
    for name in order:
        await store.append(key, [lines[name]])
    loaded: list[Any] = [entry for entry in await store.load(key) or () if "uuid" in entry]
    order = order.replace("e", "")  # beside the path
    assert on_path(loaded) == [entry["uuid"] for entry in begin] + [lines[name]["uuid"] for name in order]
    kinds = [block["type"] for entry in loaded for block in entry["message"]["content"]]
    assert kinds.count("tool_use") == kinds.count("tool_result") == int("cr" in order)
    assert "sunny" in json.dumps(loaded)


async def test_a_prompt_without_an_answer_is_loaded_after_what_the_chain_said_meanwhile(settings: Settings) -> None:
    """Its application's host died; the CLI of the next one followed the link of the last line."""
    store, session_id = ChainSessionStore("a"), str(uuid.uuid4())
    key: Any = {"project_key": "p", "session_id": session_id}
    await store.append(key, entries("remember a = 1", "Noted.", session_id=session_id, tag="one-"))
    await store.append(key, entries("remember b = 2", session_id=session_id, parent="one-1", tag="two-"))
    await ask("remember c = 3", agent_id="a", model="sonnet")
    loaded = await store.load(key)
    assert on_path(loaded) == [entry["uuid"] for entry in map(dict, loaded or ()) if "uuid" in entry]
    assert "remember c = 3" in json.dumps(loaded)


async def test_lines_that_become_a_turn_while_they_are_loaded_are_loaded_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session_id = ChainSessionStore("a"), str(uuid.uuid4())
    key: Any = {"project_key": "p", "session_id": session_id}
    asked, answered = entries("hello", "Hi.", session_id=session_id)
    await store.append(key, [asked])
    mirrored = SqliteStore.mirrored

    async def read_before(self: SqliteStore, agent_key: int, of: MirrorKey) -> list[Record] | None:
        monkeypatch.setattr(SqliteStore, "mirrored", mirrored)
        lines = await mirrored(self, agent_key, of)
        await store.append(key, [answered])
        return lines

    monkeypatch.setattr(SqliteStore, "mirrored", read_before)
    assert await store.load(key) == [asked, answered]


async def test_an_exchange_is_a_turn_when_it_is_whole_and_is_there_before(settings: Settings) -> None:
    store, session_id = ChainSessionStore("a"), str(uuid.uuid4())
    key: Any = {"project_key": "p", "session_id": session_id}
    asked, answered = entries("hello", "Hi.", session_id=session_id)
    mode: Any = {"type": "mode", "mode": "default"}
    last: Any = {"type": "last-prompt", "lastPrompt": "hello"}
    await store.append(key, [mode, asked])
    assert await store.load(key) == [mode, asked]
    async with running(settings) as engine:
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        assert agent.head is None
        await store.append(key, [answered, last])
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        assert agent.head is not None
        turn = await engine.store.turn(agent.head)
        assert turn is not None
        assert (text(turn), turn.status, turn.answered_by or turn.model) == ("Hi.", "completed", "claude-test")
        told = [mode, asked, answered, last]
        assert await store.load(key) == told
        assert [record.line for record in await engine.store.records(turn.id)] == [
            json.dumps(entry, separators=(",", ":")) for entry in told
        ]
        await engine.delete("local", "a")
    assert await store.load(key) is None


async def test_the_lines_of_an_exchange_that_goes_on_are_not_looked_at_again_with_each_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 lines of one long exchange took 90 s."""
    store, session_id, read = ChainSessionStore("a"), str(uuid.uuid4()), []
    key: Any = {"project_key": "p", "session_id": session_id}
    mirrored = SqliteStore.mirrored

    async def noted(self: SqliteStore, agent_key: int, asked: MirrorKey) -> list[Record] | None:
        read.append(asked)
        return await mirrored(self, agent_key, asked)

    monkeypatch.setattr(SqliteStore, "mirrored", noted)
    made = entries("one", "calls", "a result", "calls again", "another result", "Done.", session_id=session_id)
    for entry in made[:-1]:
        if entry["type"] == "assistant":
            entry["message"]["stop_reason"] = "tool_use"
        await store.append(key, [entry])
    assert read == []
    await store.append(key, made[-1:])
    assert len(read) == 1


async def test_a_session_of_another_agent_is_not_shown_and_not_gone_on_with(settings: Settings) -> None:
    session_id = str(uuid.uuid4())
    key: Any = {"project_key": "p", "session_id": session_id}
    await ChainSessionStore("a").append(key, entries("a secret", "Noted.", session_id=session_id, tag="a"))
    other = ChainSessionStore("b")
    assert await other.load(key) is None
    theirs = entries("hello", "Hi.", session_id=session_id, tag="b")
    await other.append(key, theirs)
    assert await other.load(key) == theirs
    loaded = await ChainSessionStore("a").load(key)
    assert loaded is not None
    assert [entry.get("uuid") for entry in loaded] == ["a0", "a1"]


async def test_the_chains_own_sessions_are_listed_in_the_agents_directory_the_newest_last(settings: Settings) -> None:
    store = ChainSessionStore("a")
    await ask("hello", agent_id="a", model="sonnet")
    project = project_key_for_directory(await store.directory())
    (found,) = await store.list_sessions(project)
    loaded = await store.load({"project_key": project, "session_id": found["session_id"]})
    assert loaded is not None
    assert {entry["sessionId"] for entry in map(dict, loaded) if "sessionId" in entry} == {found["session_id"]}
    assert await store.list_sessions("elsewhere") == []
    assert await store.load({"project_key": "elsewhere", "session_id": found["session_id"]}) is None


async def test_what_is_no_key_and_no_entry_is_refused(without_cli: None) -> None:
    store = ChainSessionStore("a")
    deep: Any = {"type": "x"}
    for _ in range(500):
        deep = {"type": "x", "in": deep}
    plain: Any = {"type": "x"}
    for project, entry in (("p", deep), ("p\0", plain)):
        with pytest.raises(InvalidRequest):
            await store.append({"project_key": project, "session_id": "s"}, [entry])
    with pytest.raises(InvalidRequest):
        ChainSessionStore("")


def test_importing_the_sdk_room_loads_nothing_of_it() -> None:
    code = (
        "import sys, cli_session_proxy.sdk as sdk;"
        "loaded = {name.split('.')[0] for name in sys.modules};"
        "assert not {'claude_agent_sdk', 'litellm', 'httpx', 'pydantic', 'sqlalchemy', 'starlette'} & loaded, loaded;"
        "assert sdk.ChainSessionStore.__name__ in sdk.__all__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError):
        _ = sdk.Nothing
