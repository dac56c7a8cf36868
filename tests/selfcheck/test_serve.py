"""`serve` has its CLI checked beside the first turns: once for all proxies on a store, and nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.backends.claude.process.observed import NAMES
from cli_session_proxy.commands.doctor import examine
from cli_session_proxy.http import server
from cli_session_proxy.http.watchdog import Watchdog
from cli_session_proxy.selfcheck.service import RUN
from cli_session_proxy.settings import Settings

from ..conftest import MakeSettings, processes
from ..serving import CHECK, serve
from ..until import until
from .tampered import tampered


def runs(settings: Settings) -> list[str]:
    """The checks that have ended, by what they checked."""
    with closing(sqlite3.connect(settings.var / "chains.sqlite3")) as conn:
        wanted = "SELECT subject FROM findings WHERE name = ? AND until IS NULL"
        return [str(row[0]) for row in conn.execute(wanted, [RUN])]


async def tells(url: str, words: str) -> bool:
    """The page's words of the CLI."""
    async with httpx.AsyncClient(base_url=url) as http:
        return words in str((await http.get("/v1/overview")).json()["cli"])


@pytest.mark.full
async def test_two_proxies_on_one_store_check_their_cli_once_and_tell_it_everywhere(
    make_settings: MakeSettings, claude_2: Path, tmp_path: Path
) -> None:
    claude = tampered(claude_2, tmp_path / "bin", "counts")
    settings = make_settings(claude_bin=claude, self_check=True)
    async with serve(settings, tmp_path) as (one, _), serve(settings, tmp_path) as (two, _):
        await until(lambda: runs(settings), CHECK)
        for url in (one, two):
            await until(partial(tells, url, f"{len(NAMES)} of {len(NAMES)} checks passed"))
        async with httpx.AsyncClient(base_url=one) as http:
            assert 'cli_observation{observation="round_trip"} 1.0' in (await http.get("/metrics")).text
    every = {line.check: line async for line in examine(settings)}
    assert f"{len(NAMES)} of {len(NAMES)} seen to work" in every["self-check"].says
    starts = (tmp_path / "bin" / "starts").read_text().split()
    assert len(starts) == len(set(starts)) == 8  # of one check, which plays eight scenes


async def test_a_proxy_that_is_killed_in_the_middle_of_a_check_leaves_nothing(
    make_settings: MakeSettings, claude_2: Path, tmp_path: Path
) -> None:
    claude = tampered(claude_2, tmp_path / "bin", "tells")
    settings = make_settings(claude_bin=claude, self_check=True)
    async with serve(settings, tmp_path) as (_, process):
        told = tmp_path / "bin" / "environment"
        await until(lambda: told.exists() and told.read_text().endswith("}"), CHECK)  # it is there before it is written
        folder = Path(json.loads(told.read_text())["HOME"]).parent
        process.send_signal(signal.SIGKILL)
        await until(lambda: not list(processes((), mark=os.fsencode(folder))))
        await until(lambda: not folder.exists())
    assert runs(settings) == []


async def test_no_check_begins_before_the_server_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    startup = server.Server.startup

    async def slow(one: server.Server, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(100):  # all that could run before it does
            await asyncio.sleep(0)
        order.append("ready")
        await startup(one, sockets)

    async def check(*_: object) -> None:
        order.append("check")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(server.Server, "startup", slow)
    (tmp_path / "var").mkdir()
    settings = Settings(port=0, var=tmp_path / "var", claude_bin=tmp_path / "none")
    watchdog = Watchdog(leave=lambda _code: None)
    watchdog.start()
    try:
        await asyncio.wait_for(server.serve(settings, order.append, watchdog, beside=check), 60)
    finally:
        watchdog.stop()
    assert [one for one in order if one in ("ready", "check")] == ["ready", "check"]
