"""`serve` on two hosts, over real sockets with the real CLI: its process stays warm whichever host is asked."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from pydantic import SecretStr

from turnfault.ports import free_port
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..serving import serve
from .cluster import KEY


async def test_the_cli_stays_warm_behind_another_host_and_goes_on_when_that_one_is_killed(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, postgres_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        clients, processes = [], []
        for n in range(2):
            port = free_port()
            place = tmp_path / f"host-{n}"
            settings = make_settings(
                claude_bin=claude_2, store=SecretStr(postgres_url), var=place / "var",
                claude_config_dir=place / "config", port=port, lease=2.0,
                advertise=f"http://127.0.0.1:{port}", cluster_key=SecretStr(KEY),
            )  # fmt: skip
            address, process = await stack.enter_async_context(serve(settings, tmp_path))
            http = httpx.AsyncClient(base_url=address, trust_env=False, timeout=120)
            clients.append(await stack.enter_async_context(http))
            processes.append(process)

        async def say(at: int, text: str) -> str:
            body = {"model": "sonnet", "messages": [{"role": "user", "content": text}], "stream": at == 1}
            answer = await clients[at].post("/agents/a/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            continuity: str = answer.headers["x-continuity"]
            return continuity

        assert await say(0, "one") == "started"
        for at, text in ((1, "two"), (0, "three"), (1, "four")):
            before = upstream.requests[-1]
            assert await say(at, text) == "warm"
            assert upstream.requests[-1].prefix_kept(before) == 1.0
        processes[0].kill()
        await processes[0].wait()
        before = upstream.requests[-1]
        assert await say(1, "five") == "rebuilt"
        assert upstream.requests[-1].prefix_kept(before) == 1.0
        assert upstream.requests[-1].user_texts()[-1] == "five"
        log = (tmp_path / "host-1" / "var" / "logs" / "proxy.log").read_text()
        assert "not_passed_on" in log
        assert KEY not in log
