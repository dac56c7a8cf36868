"""Tool loops of the Vercel AI SDK, on each of its providers: the model sees each once, in order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from .remembering import served_without_cli
from .test_history_ai_sdk import packages, talk
from .test_tools_chat import called, seen_once

__all__ = ["packages"]

TOOLS = Path(__file__).parent / "ai_sdk" / "tools.mjs"


@pytest.mark.parametrize("wire", rest_in_full("chat", "responses", "anthropic", "google"))
async def test_generate_text_and_stream_text_run_their_tools(
    make_settings: MakeSettings, upstream: Upstream, packages: Path, wire: str
) -> None:
    upstream.when("how is Rome", ToolUse([called("get_weather", city="Rome"), called("get_time", city="Rome")]))
    upstream.when("how is Oslo", ToolUse([called("get_weather", city="Oslo")]))
    async with served_without_cli(make_settings(), upstream) as proxy:
        url = proxy.url.replace("/v1", "/v1beta") if wire == "google" else proxy.url
        first, second, *made = await talk(packages, wire, url, ["how is Rome", "how is Oslo"], script=TOOLS)
    assert first.startswith("The tool said: ")
    assert "time of Rome: fine" in first
    assert "weather of Oslo: fine" in second
    assert made == ["time Rome", "weather Oslo", "weather Rome"]
    seen_once(upstream, 3)
    # A request for each message of the model, and nothing of the conversation said anew.
    assert len(upstream.requests) == 4
    assert [after.prefix_kept(before) for before, after in pairwise(upstream.requests)] == [1.0] * 3
