"""`serve` on a store in PostgreSQL, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import httpx
from pydantic import SecretStr

from ..conftest import MakeSettings
from ..postgres import server
from ..serving import serve
from ..until import until

PASSWORD = "hidden-Passw0rd"


async def refused(url: str, cwd: Path) -> str:
    """What `serve` says on the way out."""
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    env |= {"CLI_SESSION_PROXY_STORE": url, "CLI_SESSION_PROXY_VAR": str(cwd / "var"), "CLI_SESSION_PROXY_PORT": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli_session_proxy", "serve", env=env, cwd=cwd, stdout=PIPE, stderr=STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 1
    return said.decode()


async def test_serve_refuses_an_unsafe_server_and_follows_the_one_it_has(
    claude_2: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    with server("-c", "fsync=off") as mortal:
        url = mortal.new_url().replace("@", f":{PASSWORD}@", 1) + "&require_auth=none"  # it asks for none
        said = await refused(url, tmp_path)
        assert "its `fsync` is off" in said
        assert PASSWORD not in said
        assert "Traceback" not in said
        mortal.stop()
        assert "start PostgreSQL" in await refused(url, tmp_path)
        mortal.options = ()
        await asyncio.to_thread(mortal.start)
        settings = make_settings(claude_bin=claude_2, store=SecretStr(url))
        async with serve(settings, tmp_path) as (address, process), httpx.AsyncClient(base_url=address) as client:

            async def ready(status: int) -> bool:
                return (await client.get("/readyz", timeout=30)).status_code == status

            await until(lambda: ready(200))
            await asyncio.to_thread(mortal.stop, signal.SIGQUIT)
            await until(lambda: ready(503))
            assert (await client.get("/healthz")).status_code == 200
            body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
            answer = await client.post("/v1/chat/completions", json=body, headers={"X-Agent-Id": "a"}, timeout=30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert PASSWORD not in answer.text
            await asyncio.to_thread(mortal.start)
            await until(lambda: ready(200))
            assert process.returncode is None
        assert PASSWORD not in (settings.var / "logs" / "proxy.log").read_text()
