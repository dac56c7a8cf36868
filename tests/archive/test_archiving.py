"""A chain is deleted here only once what was put away was read back and equals it, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest
from pydantic import SecretStr

from cli_session_proxy.archive import archiving
from cli_session_proxy.archive.archiving import Archiver, Outcome, idle_agents
from cli_session_proxy.archive.places import Directory
from cli_session_proxy.archive.sealed import MAGIC, ArchiveKey
from cli_session_proxy.commands import moving
from cli_session_proxy.commands.stored import opened
from cli_session_proxy.domain.models import Agent, Message, Record, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ConfigError, InvalidRequest, StoreUnavailable
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import Settings, load
from cli_session_proxy.stores.base import MirrorKey
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..engine.test_core import Model, core
from ..http.test_damaged_rows import damage
from ..memory_backend import MemoryBackend
from ..talking import ask, heard, running
from ..until import until
from . import killed
from .conftest import write_key

PICTURE = "iVBORw0KGgo" + "Q" * 300 + "=="
SHOWN = Message("user", ({"type": "text", "text": "what is it"}, {
    "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
}))  # fmt: skip
LONG_AGO = 1_700_000_000.0


async def agent_of(engine: Engine, name: str = "a") -> Agent:
    agent = await engine.store.agent("local", name)
    assert agent is not None
    return agent


def archiver_of(engine: Engine, place: Directory | None = None) -> Archiver:
    settings = engine.settings
    return Archiver(engine, place or Directory(Path(str(settings.archive_to))), ArchiveKey.of(settings))


async def said(engine: Engine, name: str = "a") -> tuple[list[Turn], list[list[Record]]]:
    """The turns of an agent with what they keep, without what is each store's own."""
    agent = await agent_of(engine, name)
    turns = [turn async for turn in engine.store.turns(agent.key)]
    return turns, [await engine.store.own_records(turn.id) for turn in turns]


def portable_part(turns: list[Turn]) -> list[dict[str, Any]]:
    left = ("seq", "agent_key", "instance", "fingerprint")
    return [{name: value for name, value in turn.as_json().items() if name not in left} for turn in turns]


@asynccontextmanager
async def talked(settings: Settings, model: Model | None = None) -> AsyncIterator[Engine]:
    async with core(settings, model) as (engine, _):
        for words in ("one", SHOWN, "three"):
            await ask(engine, words)
        await until(lambda: _delivered(engine))
        yield engine


async def _delivered(engine: Engine) -> bool:
    return all(turn.delivery == "delivered" for turn in (await said(engine))[0])


def objects(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


async def back(settings: Settings, folder: Path) -> None:
    await moving.import_(settings, "local", only(folder), None)


async def test_an_archived_chain_is_gone_here_and_comes_back_whole(settings: Settings, folder: Path) -> None:
    async with talked(settings) as engine:
        turns, records = await said(engine)
        outcome = await archiver_of(engine).archive(await agent_of(engine))
        assert outcome == Outcome("a", "local", None, outcome.name, 3, sum(map(len, records)))
        assert objects(folder) == [outcome.name]
        assert await engine.store.agent("local", "a") is None
    sealed = only(folder)
    assert sealed.read_bytes().startswith(MAGIC)
    assert b"three" not in sealed.read_bytes()
    assert sealed.stat().st_mode & 0o777 == 0o600
    await back(settings, folder)
    async with core(settings) as (engine, _):
        again, kept = await said(engine)
        assert portable_part(again) == portable_part(turns)
        assert kept == records
        four = await ask(engine, "four")
        path = await engine.store.path(four.id)
        assert [turn.id for turn in path] == [*(turn.id for turn in turns), four.id]
    assert [path.name for path in settings.var.iterdir() if path.name.startswith("tmp")] == []


@old_cli_in_full
async def test_the_conversation_goes_on_from_the_archive_with_the_real_cli(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, folder: Path, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude, archive_key_file=write_key(tmp_path / "key"), archive_to=str(folder))
    async with running(settings) as engine:
        await ask(engine, "remember a = 1")
        await ask(engine, "remember b = 2")
        await until(lambda: _delivered(engine))
        before, heard_before = upstream.requests[-1], heard(upstream)
        outcome = await archiver_of(engine).archive(await agent_of(engine))
        assert outcome.stays is None, outcome
    assert settings.claude_config_dir is not None
    assert list(settings.claude_config_dir.glob("projects/*/*.jsonl")) == []
    await back(settings, folder)
    async with running(settings) as engine:
        turn = await ask(engine, "recall")
    assert turn.output[0]["text"] == "I remember: a is 1; b is 2."
    assert heard(upstream) == [*heard_before, "recall"]
    if "bundled" in str(claude):
        assert upstream.requests[-1].prefix_kept(before) == 1.0


# --- what comes between


class Between(Directory):
    """Does something at one step of the place."""

    def __init__(self, folder: Path, step: str, do: Callable[[], object]) -> None:
        super().__init__(folder)
        self._step, self._do, self.puts = step, do, 0

    def put(self, name: str, source: IO[bytes]) -> None:
        self.puts += 1
        self._at("before it is put")
        super().put(name, source)
        self._at("once it is put")

    def fetch(self, name: str, into: IO[bytes]) -> bool:
        found = super().fetch(name, into)
        if found:
            self._at("once it is read back")
        return found

    def _at(self, step: str) -> None:
        if self._step == step:
            self._step = ""
            self._do()


BETWEEN = ("before it is put", "once it is put", "once it is read back")


@pytest.mark.parametrize("step", BETWEEN)
async def test_a_turn_that_comes_between_keeps_the_chain(settings: Settings, folder: Path, step: str) -> None:
    async with talked(settings) as engine:
        loop = asyncio.get_running_loop()
        late = lambda: asyncio.run_coroutine_threadsafe(ask(engine, "late"), loop).result(60)  # noqa: E731
        place = Between(folder, step, late)
        outcome = await archiver_of(engine, place).archive(await agent_of(engine))
        assert outcome.stays == "it was continued meanwhile, or no longer exists"
        turns, _ = await said(engine)
        assert [turn.status for turn in turns] == ["completed"] * 4
        await until(lambda: _delivered(engine))  # that it was is written behind the answer, and is a change too
        assert (await archiver_of(engine).archive(await agent_of(engine))).turns == 4
        assert len(objects(folder)) == 2  # one object too many, nothing too few


@pytest.mark.parametrize("step", BETWEEN)
async def test_a_rewind_that_comes_between_keeps_the_chain(settings: Settings, folder: Path, step: str) -> None:
    async with talked(settings) as engine:
        loop = asyncio.get_running_loop()
        late = lambda: asyncio.run_coroutine_threadsafe(engine.rewind("local", "a", "-1"), loop).result(60)  # noqa: E731
        outcome = await archiver_of(engine, Between(folder, step, late)).archive(await agent_of(engine))
        assert outcome.stays is not None
        assert (await agent_of(engine)).head == (await said(engine))[0][1].id


async def test_a_turn_that_is_accepted_as_the_chain_is_deleted_keeps_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    async with talked(settings, model) as engine:
        remove, going_on = engine.store.delete_agent, list[asyncio.Task[Turn]]()

        async def waits() -> bool:
            return bool(await engine.store.unfinished_of((await agent_of(engine)).key))

        async def late(key: int, expiry: Any = None) -> bool:
            going_on.append(asyncio.create_task(ask(engine, "late")))
            await until(waits)
            return await remove(key, expiry)

        monkeypatch.setattr(engine.store, "delete_agent", late)
        outcome = await archiver_of(engine).archive(await agent_of(engine))
        assert outcome.stays == "it was continued meanwhile, or no longer exists"
        assert (await going_on[0]).status == "completed"
        assert len((await said(engine))[0]) == 4


@pytest.mark.parametrize("step", ["once it is put"])
async def test_an_object_that_is_not_what_was_put_deletes_nothing(settings: Settings, folder: Path, step: str) -> None:
    async with talked(settings) as engine:

        def spoil() -> None:
            (path,) = folder.iterdir()
            path.write_bytes(path.read_bytes()[:-1] + b"?")

        with pytest.raises(StoreUnavailable, match="read back"):
            await archiver_of(engine, Between(folder, step, spoil)).archive(await agent_of(engine))
        assert len((await said(engine))[0]) == 3
        # the next one puts it anew, under the same name
        assert (await archiver_of(engine).archive(await agent_of(engine))).stays is None
        assert len(objects(folder)) == 1


async def test_an_object_of_another_chain_under_this_name_deletes_nothing(settings: Settings, folder: Path) -> None:
    async with talked(settings) as engine:
        await ask(engine, "other", agent="b")
        other = await archiver_of(engine).archive(await agent_of(engine, "b"))

        def swap() -> None:
            (path,) = (path for path in folder.iterdir() if path.name != other.name)
            path.write_bytes((folder / str(other.name)).read_bytes())

        with pytest.raises(StoreUnavailable, match="read back"):
            await archiver_of(engine, Between(folder, "once it is put", swap)).archive(await agent_of(engine))
        assert len((await said(engine))[0]) == 3


@pytest.mark.parametrize(
    "line", ["no line of a transcript", f'{{"deep":{401 * "["}{401 * "]"}}}'], ids=["text", "deep"]
)
async def test_a_chain_that_no_import_would_take_stays(settings: Settings, folder: Path, line: str) -> None:
    async with talked(settings) as engine:
        turns, _ = await said(engine)
    damage(settings, "UPDATE records SET line = ? WHERE turn_id = ? AND n = 0", line.encode(), turns[1].id)
    async with core(settings) as (engine, _):
        outcome = await archiver_of(engine).archive(await agent_of(engine))
        assert str(outcome.stays).startswith("no import would take it again (")
        assert len((await said(engine))[0]) == 3


async def test_a_full_disk_deletes_nothing_and_is_named(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(archiving, "shutil", Mock(copyfileobj=full))
    async with talked(settings) as engine:
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            await archiver_of(engine).archive(await agent_of(engine))
        assert len((await said(engine))[0]) == 3


@pytest.mark.parametrize("step", killed.STEPS)
@pytest.mark.sample(5)
async def test_killed_at_any_step_nothing_is_lost(settings: Settings, folder: Path, step: str) -> None:
    async with talked(settings) as engine:
        turns, _ = await said(engine)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=killed.run, args=(settings.var, folder, settings.archive_key_file, step))
    await asyncio.to_thread(process.start)
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == -signal.SIGKILL
    async with core(settings) as (engine, _):
        there = await engine.store.agent("local", "a")
        assert (there is None) == (step == "once it is deleted")
        if there is not None:
            assert portable_part((await said(engine))[0]) == portable_part(turns)
            place = Between(folder, "", lambda: None)
            assert (await archiver_of(engine, place).archive(there)).stays is None
            assert place.puts == (killed.STEPS.index(step) < killed.STEPS.index("once it is put"))
    assert len([name for name in objects(folder) if not name.startswith(".")]) == 1
    for name in objects(folder):
        assert b"three" not in (folder / name).read_bytes()
        if name.startswith("."):
            (folder / name).unlink()
    await back(settings, folder)
    async with core(settings) as (engine, _):
        assert portable_part((await said(engine))[0]) == portable_part(turns)


async def test_two_proxies_that_archive_the_same_chain_make_one_object(settings: Settings, folder: Path) -> None:
    async with talked(settings) as one:
        turns, _ = await said(one)
        two = Engine(settings, backend=MemoryBackend())
        await two.start()
        try:
            agent = await agent_of(one)
            done = await asyncio.gather(*(archiver_of(engine).archive(agent) for engine in (one, two)))
            assert await two.store.agent("local", "a") is None
        finally:
            await two.stop()
    assert [one.stays for one in done].count(None) == 1
    assert len(objects(folder)) == 1
    await back(settings, folder)
    async with core(settings) as (engine, _):
        assert portable_part((await said(engine))[0]) == portable_part(turns)


async def test_on_postgresql_two_hosts_archive_the_same_chain(
    postgres_url: str, settings: Settings, folder: Path, tmp_path: Path
) -> None:
    here = settings.model_copy(update={"store": SecretStr(postgres_url)})
    there = here.model_copy(update={"var": tmp_path / "other"})
    async with talked(here) as one, core(there) as (two, _):
        turns, _ = await said(one)
        agent = await agent_of(one)
        done = await asyncio.gather(*(archiver_of(engine).archive(agent) for engine in (one, two)))
        assert [one.stays for one in done].count(None) == 1
        assert await two.store.agent("local", "a") is None
        for name in objects(folder):  # each host may have put its own
            assert (await moving.import_(there, "local", folder / name, f"from-{name[:30]}")).turns == 3
            await two.delete("local", f"from-{name[:30]}")
    assert len(turns) == 3


# --- what stays


async def test_a_chain_whose_turn_runs_stays(settings: Settings, folder: Path) -> None:
    model = Model()
    async with talked(settings, model) as engine:
        model.open.clear()
        model.reached.clear()
        going = asyncio.create_task(ask(engine, "long"))
        await model.reached.wait()
        archiving_it = asyncio.create_task(archiver_of(engine).archive(await agent_of(engine)))
        await asyncio.sleep(0)
        model.open.set()
        assert (await going).status == "completed"
        await archiving_it
        assert all(turn.status == "completed" for turn in [await going])


async def test_an_agent_with_files_of_its_own_stays(settings: Settings, folder: Path) -> None:
    async with talked(settings) as engine:
        agent = await agent_of(engine)
        sandbox = Sandboxes(settings).prepare(agent.dir)
        (sandbox / "empty").mkdir()
        (sandbox / "notes.md").write_text("mine")
        outcome = await archiver_of(engine).archive(agent)
        assert "files in its sandbox" in str(outcome.stays)
        assert objects(folder) == []
        (sandbox / "notes.md").unlink()
        assert (await archiver_of(engine).archive(agent)).stays is None


async def test_an_agent_with_lines_that_are_no_turn_yet_stays(settings: Settings) -> None:
    async with talked(settings) as engine:
        agent = await agent_of(engine)
        key = MirrorKey(engine.backend.project_of(agent), "5e551011-0000-4000-8000-000000000001", "")
        await engine.store.mirror(agent.key, key, [Record('{"type":"user"}', "u1")])
        assert "not a turn yet" in str((await archiver_of(engine).archive(agent)).stays)


async def test_one_shots_are_left_to_their_own_end_and_the_young_stay(settings: Settings) -> None:
    async with talked(settings) as engine:
        await ask(engine, "once", agent=None)
        found = await idle_agents(engine.store, time.time() + 1)
        assert [agent.agent_id for agent in found] == ["a"]
        outcome = await archiver_of(engine).archive(await agent_of(engine), before=LONG_AGO)
        assert "active since" in str(outcome.stays)


async def test_a_place_that_is_not_there_deletes_nothing(settings: Settings, folder: Path) -> None:
    async with talked(settings) as engine:
        with pytest.raises(StoreUnavailable, match="check that it exists"):
            await archiver_of(engine, Directory(folder / "not-mounted")).archive(await agent_of(engine))
        assert len((await said(engine))[0]) == 3


async def test_a_server_archives_by_itself_what_was_idle_for_so_many_days(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with talked(settings) as engine:
        monkeypatch.setattr(archiving, "HOUR", 1e-6)  # so that it is soon, and nothing is young
        place, key = Directory(folder), ArchiveKey.of(settings)
        service = asyncio.create_task(archiving.serve(engine, 1e-6, place, key))
        try:
            await until(lambda: _gone(engine))
        finally:
            service.cancel()
    assert len(objects(folder)) == 1


async def _gone(engine: Engine) -> bool:
    return await engine.store.agent("local", "a") is None


# --- import


async def test_an_archive_that_was_changed_brings_nothing_in(settings: Settings, folder: Path) -> None:
    async with talked(settings) as engine:
        await archiver_of(engine).archive(await agent_of(engine))
    path = only(folder)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(InvalidRequest, match="cannot be decrypted"):
        await back(settings, folder)
    with pytest.raises(ConfigError, match="archive_key_file"):
        await moving.import_(settings.model_copy(update={"archive_key_file": None}), "local", path, None)
    async with opened(settings) as store:
        assert store is not None
        assert await store.agent("local", "a") is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"archive_after_days": 7}, "needs archive_to"),
        ({"archive_after_days": 7, "archive_to": "/mnt"}, "needs archive_key_file"),
        ({"archive_after_days": 7, "archive_to": "/mnt", "archive_key_file": "k", "retention_days": 7}, "less than"),
        ({"archive_after_days": 0}, "greater than 0"),
    ],
)
def test_settings_that_would_lose_or_keep_chains_in_clear_text_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(**given)


@pytest.mark.parametrize("name", ["archive_to", "archive_key_file"])
def test_a_file_that_merely_lies_in_the_working_directory_sends_no_conversation_anywhere(name: str) -> None:
    Path("cli_session_proxy.toml").write_text(f'{name} = "/tmp/x"\n')
    with pytest.raises(ConfigError, match="where conversations are sent"):
        load()
