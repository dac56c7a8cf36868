"""The answers of turns have the provider's own headers of the plan's windows, and nothing else has."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from cli_session_proxy.settings import Settings

from ..engine.test_core import core
from ..serving import serving

BODY = {"model": "sonnet", "messages": [{"role": "user", "content": "hi"}]}


async def test_answers_of_turns_tell_the_windows(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config", port=0)
    reset = int(time.time()) + 3600
    async with (
        core(settings) as (engine, _),
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        before = await http.post("/chat/completions", json=BODY)
        assert not [name for name in before.headers if "ratelimit" in name]
        engine.plan.report({"status": "allowed", "rateLimitType": "five_hour", "utilization": 0.42, "resetsAt": reset})
        for more in ({}, {"stream": True}):
            told = (await http.post("/chat/completions", json={**BODY, **more})).headers
            assert {name: value for name, value in told.items() if "ratelimit" in name} == {
                "anthropic-ratelimit-unified-status": "allowed",
                "anthropic-ratelimit-unified-reset": str(reset),
                "anthropic-ratelimit-unified-representative-claim": "five_hour",
                "anthropic-ratelimit-unified-5h-status": "allowed",
                "anthropic-ratelimit-unified-5h-utilization": "0.42",
                "anthropic-ratelimit-unified-5h-reset": str(reset),
            }
        assert not [name for name in (await http.get("/models")).headers if "ratelimit" in name]
