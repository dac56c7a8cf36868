"""S3-compatible storage: a real server that checks signatures (rclone's `serve s3`), asked over boto3."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from cli_session_proxy.archive.archiving import Archiver
from cli_session_proxy.archive.places import Place, place_at
from cli_session_proxy.archive.sealed import MAGIC, ArchiveKey
from cli_session_proxy.commands import moving
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ConfigError, NotFound, StoreUnavailable
from cli_session_proxy.settings import Settings
from turnfault.ports import free_port

from ..engine.test_core import core
from .test_archiving import agent_of, portable_part, said, talked

KEY_ID, SECRET = "test-key-id", "test-secret-0123456789"
BUCKET = "chains"
# More than one part of an upload: these have 8 MiB.
LARGE = 20 * 1024 * 1024


@pytest.fixture(scope="module")
def endpoint(rclone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with one empty bucket, known to its program by one key."""
    root = tmp_path_factory.mktemp("s3")
    (root / BUCKET).mkdir()
    port = free_port()
    server = subprocess.Popen(
        [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY_ID},{SECRET}", root],
        env={"HOME": str(root), "RCLONE_CONFIG": "/dev/null", "PATH": os.environ["PATH"]},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:  # it says when it listens
            if f"127.0.0.1:{port}" in line:
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """As the vendor's own programs are told of it: by the environment."""
    told = {
        "AWS_ENDPOINT_URL_S3": endpoint, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/of/{tmp_path.name}"


def fetched(place: Place, name: str) -> bytes | None:
    into = io.BytesIO()
    return into.getvalue() if place.fetch(name, into) else None


def test_the_server_of_these_tests_checks_signatures(endpoint: str, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.get(f"{endpoint}/{BUCKET}/x", trust_env=False).status_code in (400, 403)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-987654321")
    with pytest.raises(StoreUnavailable, match=r"SignatureDoesNotMatch|AccessDenied") as raised:
        place_at(s3).put("x", io.BytesIO(b"x"))
    assert SECRET not in raised.value.message


@pytest.mark.parametrize("size", [0, 1, LARGE])
def test_an_object_comes_back_as_it_was_put(s3: str, size: int) -> None:
    place, data = place_at(s3), os.urandom(size)
    assert fetched(place, "it") is None
    place.put("it", io.BytesIO(data))
    assert fetched(place_at(s3), "it") == data
    place.put("it", io.BytesIO(b"again"))
    assert fetched(place, "it") == b"again"


def test_of_an_object_only_a_part_is_in_memory(s3: str, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(2 * LARGE))
    place = place_at(s3)
    tracemalloc.start()
    with large.open("rb") as file:
        place.put("large", file)
    with (tmp_path / "back").open("wb") as file:
        assert place.fetch("large", file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    assert peak < LARGE


def test_credentials_come_from_the_vendors_own_file_too(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    path.write_text(f"[archive]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_PROFILE", "archive")
    place_at(s3).put("by-file", io.BytesIO(b"x"))
    assert path in Settings(archive_to=s3).secret_files()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="ProfileNotFound"):
        place_at(s3)


def test_a_bucket_or_a_server_that_is_not_there_is_said(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
        place_at("s3://nowhere/x").put("x", io.BytesIO(b"x"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreUnavailable, match="EndpointConnectionError"):
        place_at(s3).put("x", io.BytesIO(b"x"))
    for wrong in ("s3://", "s3:///x", "gs://bucket/x"):
        with pytest.raises(ConfigError, match="s3://bucket/prefix"):
            place_at(wrong)


async def test_a_chain_goes_to_a_bucket_and_comes_back(settings: Settings, s3: str, endpoint: str) -> None:
    there = settings.model_copy(update={"archive_to": s3})
    async with talked(there) as engine:
        turns, _ = await said(engine)
        outcome = await archived(engine, s3)
        assert await engine.store.agent("local", "a") is None
    url = f"{s3}/{outcome}"
    assert (fetched(place_at(s3), outcome) or b"").startswith(MAGIC)
    await moving.import_(there, "local", url, None)
    async with core(there) as (engine, _):
        assert portable_part((await said(engine))[0]) == portable_part(turns)
    with pytest.raises(NotFound, match="no object"):
        await moving.import_(there, "local", f"{url}.not", None)


def test_an_error_of_the_server_that_has_a_checksum_is_tried_again(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `rclone serve s3`, while another one replaces the object."""
    statuses = iter((500, 200))

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(statuses))
            self.send_header("x-amz-checksum-crc32", "NhCmhg==")  # of "hello"
            self.send_header("content-length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
            assert fetched(place_at(s3), "one") == b"hello"
        finally:
            server.shutdown()
            serving.join()


async def test_two_proxies_put_the_same_chain_into_one_bucket(settings: Settings, s3: str) -> None:
    async with talked(settings) as one, core(settings) as (two, _):
        turns, _ = await said(one)
        agent = await agent_of(one)
        key = ArchiveKey.of(settings)
        done = await asyncio.gather(*(Archiver(engine, place_at(s3), key).archive(agent) for engine in (one, two)))
        assert [one.stays for one in done].count(None) == 1
        (name,) = {one.name for one in done if one.stays is None}
        await moving.import_(settings, "local", f"{s3}/{name}", "back")
        assert [turn["input"] for turn in portable_part((await said(two, "back"))[0])] == [
            turn["input"] for turn in portable_part(turns)
        ]


async def archived(engine: Engine, s3: str) -> str:
    archiver = Archiver(engine, place_at(s3), ArchiveKey.of(engine.settings))
    outcome = await archiver.archive(await agent_of(engine))
    assert outcome.stays is None, outcome
    return str(outcome.name)
