"""Each request that does more than look is one line of the log, and nothing that was said is in it."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import pytest

from ..no_cli import no_cli
from ..talking import events

KEY = "alices-secret-0123456789"
ASKED = {"model": "sonnet", "messages": [{"role": "user", "content": "the colour is teal"}]}


async def test_a_request_is_one_line_and_a_look_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        no_cli(tmp_path, keys={"alice": KEY}) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, headers={"Authorization": f"Bearer {KEY}"}) as http,
    ):
        answer = await http.post("/agents/zoe/v1/chat/completions", json=ASKED, headers={"X-Request-Id": "req-1"})
        assert answer.status_code == 200
        refused = await http.post("/v1/messages", json={"model": "sonnet"})
        stranger = await http.post("/v1/chat/completions", json=ASKED, headers={"Authorization": "Bearer nobody"})
        for path in ("/ui", "/v1/chains", "/v1/overview", "/v1/chains/zoe"):
            assert (await http.get(path)).status_code == 200
        gone = await http.delete("/v1/chains/zoe")
    lines = [one for one in events(caplog) if one["event"] == "request"]
    assert [(one["method"], one["status"]) for one in lines] == [
        ("POST", 200), ("POST", refused.status_code), ("POST", stranger.status_code), ("DELETE", gone.status_code),
    ]  # fmt: skip
    assert lines[0]["turn_id"] == answer.headers["X-Turn-Id"]
    assert lines[0]["request_id"] == "req-1"
    assert all(one["ms"] >= 0 for one in lines)
    said = str(lines)
    # what is deleted is found in the log by its ids; its name is not there
    assert not [text for text in ("teal", "Hello", "zoe", KEY, "nobody") if text in said]
