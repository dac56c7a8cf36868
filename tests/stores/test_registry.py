"""Which proxy has an agent warm, as Redis and the store tell it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from pydantic import SecretStr

from cli_session_proxy.domain.models import Agent
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.settings import Settings, load
from cli_session_proxy.stores import redis as redis_registry
from cli_session_proxy.stores.auto import registry_for
from cli_session_proxy.stores.base import Proxy, Whereabouts
from cli_session_proxy.stores.redis import RedisRegistry
from cli_session_proxy.stores.registry import StoreRegistry
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from cli_session_proxy_store_conformance.samples import opened

from ..redis import Redis
from ..redis import redis as server
from ..talking import events
from ..until import until

SECRET = "the-key-of-this-cluster"
HERE = Proxy("here", "host", 3600.0, "http://here:1")
THERE = Whereabouts("there", "http://there:1")


class Rows(StoreRegistry):
    """What the store tells, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def find(self, agent: Agent) -> Whereabouts:
        self.asked += 1
        return THERE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine's Redis answers late, and shakes hands slowly."""
    monkeypatch.setattr(redis_registry, "PATIENCE", 10.0)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Redis]:
    with server(tmp_path) as made:
        yield made


@asynccontextmanager
async def registry(url: str, secret: str = SECRET) -> AsyncIterator[tuple[RedisRegistry, Rows]]:
    rows = Rows()
    made = RedisRegistry(url, secret, rows)
    try:
        yield made, rows
    finally:
        await made.close()


AGENT = Agent(7, "local", "a", "a", True, None, 1.0)


async def test_what_is_noted_is_found_without_the_store(there: Redis) -> None:
    async with registry(there.url) as (one, rows), registry(there.url) as (two, others):
        assert await one.find(AGENT) == THERE  # nothing was noted yet
        await one.note(AGENT, HERE, "session", 5)
        assert await two.find(AGENT) == Whereabouts("here", "http://here:1")
        assert (rows.asked, others.asked) == (1, 0)
        await two.forget(AGENT)
        assert await one.find(AGENT) == THERE
        assert (one.state, two.state) == ("ok", "ok")


async def test_an_entry_names_sandbox_and_session_and_expires(there: Redis) -> None:
    async with registry(there.url) as (one, _):
        await one.note(AGENT, HERE, "session", 5)
        client: Any = redis.asyncio.Redis.from_url(there.url)
        (key,) = await client.keys("*")
        entry = json.loads((await client.get(key))[64:])
        assert (entry["sandbox"], entry["session"], entry["address"]) == ("a", "session", "http://here:1")
        assert 0 < await client.ttl(key) <= 3600
        assert SECRET.encode() not in key + await client.get(key)
        await client.aclose()


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"x" * 64 + b'{"proxy": "evil", "address": "http://evil:1", "agent": [7, 1.0]}', id="no seal"),
        pytest.param(b"\xff" * 100, id="bytes"),
    ],
)
async def test_an_entry_that_the_cluster_did_not_write_leads_nowhere(there: Redis, entry: bytes) -> None:
    async with registry(there.url) as (one, rows):
        await one.note(AGENT, HERE, None, 5)
        client: Any = redis.asyncio.Redis.from_url(there.url)
        (key,) = await client.keys("*")
        await client.set(key, entry)
        assert await one.find(AGENT) == THERE
        assert rows.asked == 1
        await client.delete(key)
        await client.lpush(key, "a list")  # of another type: an error of Redis's
        assert await one.find(AGENT) == THERE
        await client.aclose()


async def test_an_entry_without_end_is_not_read(there: Redis) -> None:
    """Who can write to this Redis held the proxy up with one."""
    async with registry(there.url) as (one, _):
        await one.note(AGENT, HERE, None, 5)
        client: Any = redis.asyncio.Redis.from_url(there.url)
        (key,) = await client.keys("*")
        await client.append(key, b" " * 50_000_000)
        before = (await client.info("stats"))["total_net_output_bytes"]
        assert await one.find(AGENT) == THERE
        assert one.state == "ok"
        assert (await client.info("stats"))["total_net_output_bytes"] - before < 1_000_000
        await client.aclose()


NO_REDIS = (b"-MOVED 1 a:b\r\n", b"-ASK\r\n", b"%1\r\n*1\r\n:1\r\n:1\r\n", b">1\r\n+x\r\n" * 10_000, b"$a\r\n", b"\0")


@pytest.mark.parametrize("answer", NO_REDIS, ids=lambda answer: repr(answer[:8]))
async def test_what_no_redis_answers_fails_no_turn(answer: bytes) -> None:
    """A program that had Redis's port made every turn of every agent a 500."""

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), closing(writer):
            while await reader.read(4096):
                writer.write(answer)
                await writer.drain()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as other:
        async with registry(f"redis://127.0.0.1:{other.sockets[0].getsockname()[1]}/0") as (one, rows):
            await one.note(AGENT, HERE, None, 5)
            assert await one.find(AGENT) == THERE
            await one.forget(AGENT)
        assert (one.state, rows.asked) == ("away", 1)


async def test_no_redis_sends_the_client_with_its_password_to_another_host() -> None:
    """A program that had Redis's port did, for as long as it liked."""
    moved_to: list[bytes] = []

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(4096):
                for command in data.split(b"*")[1:]:
                    moving = b">4\r\n$6\r\nMOVING\r\n:1\r\n:60\r\n$11\r\n127.0.0.2:1\r\n" * (b"GETRANGE" in command)
                    writer.write(moving + (b"%1\r\n$5\r\nproto\r\n:3\r\n" if b"HELLO" in command else b"+OK\r\n"))

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            moved_to.append(await reader.read(4096))

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with (
            await asyncio.start_server(listens, "127.0.0.2", port),
            registry(f"redis://:hidden-Passw0rd@127.0.0.1:{port}/0") as (one, _),
        ):
            for _ in range(2):
                assert await one.find(AGENT) == THERE
    assert moved_to == []


async def test_an_entry_of_another_agent_of_this_name_is_not_believed(there: Redis) -> None:
    async with registry(there.url) as (one, _), registry(there.url, "the-key-of-another-one") as (other, _):
        await one.note(AGENT, HERE, None, 5)
        for another in (replace(AGENT, key=8), replace(AGENT, created_at=2.0)):
            assert await one.find(another) == THERE
        assert await other.find(AGENT) == THERE


async def test_an_older_entry_that_somebody_puts_back_is_not_believed(
    there: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with registry(there.url) as (one, _), registry(there.url) as (two, rows):
        client: Any = redis.asyncio.Redis.from_url(there.url)
        await one.note(AGENT, HERE, None, 5)
        (key,) = await client.keys("*")
        old = await client.get(key)
        await one.note(AGENT, replace(HERE, id="newer"), None, 6)
        assert (await two.find(AGENT)).holder == "newer"
        await client.set(key, old)
        for each in (one, two):
            assert await each.find(AGENT) == THERE
        await one.note(AGENT, HERE, None, 7)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3601)  # it was kept by somebody for longer
        assert await two.find(AGENT) == THERE
        assert rows.asked == 2
        await client.aclose()


async def test_the_entries_of_a_proxy_are_gone_when_it_has_stopped(
    there: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = replace(AGENT, key=8, dir="b")
    async with registry(there.url) as (two, _):
        async with registry(there.url) as (one, _):
            for agent in (AGENT, others):
                await one.note(agent, HERE, None, 5)
            await two.note(others, replace(HERE, id="two"), None, 6)
        client: Any = redis.asyncio.Redis.from_url(there.url)
        assert len(await client.keys("*")) == 1
        assert (await two.find(others)).holder == "two"
        await client.aclose()
    monkeypatch.setattr(redis_registry, "PATIENCE", 0.25)
    there.pause()
    async with registry(there.url) as (three, _):
        await three.note(AGENT, HERE, None, 5)  # closing takes a bounded time
    there.resume()


@pytest.mark.parametrize("how", ["is killed", "is paused"])
async def test_a_redis_that_vanishes_is_gone_on_without_and_comes_back(
    there: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("cli_session_proxy.stores.redis.PAUSE", 0.05)
    async with registry(there.url) as (one, rows):
        await one.note(AGENT, HERE, None, 5)
        there.stop() if how == "is killed" else there.pause()
        with monkeypatch.context() as while_it_is_away:
            while_it_is_away.setattr(redis_registry, "PATIENCE", 0.5)
            for _ in range(5):
                assert await one.find(AGENT) == THERE
                await one.note(AGENT, HERE, None, 5)
        assert (one.state, rows.asked) == ("away", 5)
        there.start() if how == "is killed" else there.resume()

        async def back() -> bool:
            await one.note(AGENT, HERE, None, 5)
            return one.state == "ok"

        await until(back)
        assert await one.find(AGENT) == Whereabouts("here", "http://here:1")
        told = [event["event"] for event in events(caplog) if event["event"].startswith("registry_")]
        assert told == ["registry_away", "registry_back"]  # once each


async def test_nobody_waits_for_a_redis_that_has_just_failed(there: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async with registry(there.url) as (one, rows):
        there.stop()
        await one.find(AGENT)
        there.start()
        assert await one.find(AGENT) == THERE  # not asked: it is asked again after a pause
        assert rows.asked == 2


def certify(folder: Path) -> list[Path]:
    """A key and a certificate of 127.0.0.1 that nobody has signed."""
    made = [folder / "server.key", folder / "server.crt"]
    named = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    command: list[str | Path] = ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", *named]
    subprocess.run([*command, "-keyout", made[0], "-out", made[1]], check=True, capture_output=True)
    return made


async def test_redis_over_tls_with_a_password(tmp_path: Path) -> None:
    made = await asyncio.to_thread(certify, tmp_path)
    guarded = ["--tls-key-file", made[0], "--tls-cert-file", made[1], "--tls-auth-clients", "no"]
    with server(tmp_path, *map(str, guarded), "--requirepass", "hidden-Passw0rd", tls=True) as there:
        where = f"127.0.0.1:{there.port}/0"
        for url, works in (
            (f"rediss://:hidden-Passw0rd@{where}?ssl_ca_certs={made[1]}", True),
            (f"rediss://:another-one@{where}?ssl_ca_certs={made[1]}", False),
            (f"rediss://:hidden-Passw0rd@{where}", False),  # nobody vouches for this certificate
            (f"redis://:hidden-Passw0rd@{where}", False),
        ):
            async with registry(url) as (one, _):
                await one.note(AGENT, HERE, None, 5)
                found = await one.find(AGENT)
                assert (found == THERE) is not works
                assert one.state == ("ok" if works else "away")


async def test_the_store_tells_where_no_registry_is_named(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path, cluster_key=SecretStr(SECRET))
    async with opened(lambda: SqliteStore(tmp_path / FILE)) as store:
        told = registry_for(settings, store, SECRET)
        agent = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
        await store.acquire(agent.key, HERE)
        assert await told.find(agent) == Whereabouts("here", "http://here:1")
        assert told.state is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"registry": "http://x"}, "it takes redis://"),
        ({"registry": "redis://x"}, "setting registry: it needs cluster_key"),
        ({"advertise": "http://x:1"}, "setting advertise: it needs cluster_key"),
        ({"advertise": "x:1", "cluster_key": SECRET}, "the address at which"),
        ({"advertise": "http://x:1/path", "cluster_key": SECRET}, "not one origin"),
        ({"sandboxes": "all"}, "'own' or 'shared'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    given: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says) as told:
        load(**given)
    assert SECRET not in str(told.value)


def test_a_key_of_the_cluster_comes_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert load(cluster_key_file=file).cluster_secret() == SECRET
    for text in ("short", "with spaces in between it", ""):
        file.write_text(text)
        with pytest.raises(ConfigError, match="at least 16"):
            load(cluster_key_file=file).cluster_secret()
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(cluster_key_file=file).cluster_secret()


def test_a_url_that_redis_does_not_take_is_refused_without_its_words() -> None:
    with pytest.raises(ConfigError, match="no URL of Redis") as told:
        RedisRegistry("redis://:hidden@host:port", SECRET, Rows())
    assert "hidden" not in str(told.value)


def test_a_file_in_the_working_directory_names_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in ('advertise = "http://x:1"', 'cluster_key = "x"', 'registry = "redis://x"', 'cluster_key_file = "x"'):
        (tmp_path / "cli_session_proxy.toml").write_text(line)
        with pytest.raises(ConfigError, match="found in the working directory cannot"):
            load()
