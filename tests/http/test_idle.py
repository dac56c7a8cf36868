"""What a `serve` takes that nobody asks for anything."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from bench.machine import own_cpu_seconds
from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.backends.claude.transcript import Projects
from cli_session_proxy.sandbox import Sandboxes

from ..conftest import MakeSettings
from ..serving import serve

AGENTS, EACH = 100, 100
WINDOWS, WINDOW = 3, 10.0  # how often, and how many seconds at a time


@pytest.mark.full
async def test_ten_thousand_transcripts_cost_nearly_nothing_while_nobody_asks(
    claude_2: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    """Beside one that has none: the same, measured; three times as much if they were polled."""
    settings = make_settings(claude_bin=claude_2)
    projects = Projects(settings, Sandboxes(settings), environment.config_dir(settings))
    for number in range(AGENTS):
        folder = projects.path(settings.var / "sandbox" / "agents" / f"agent-{number}", str(uuid.uuid4())).parent
        folder.mkdir(parents=True)
        for _ in range(EACH):
            (folder / f"{uuid.uuid4()}.jsonl").write_text('{"type": "summary"}\n')
    none = make_settings(claude_bin=claude_2, var=tmp_path / "none", claude_config_dir=tmp_path / "no-config")
    async with serve(settings, tmp_path) as (_, many), serve(none, tmp_path) as (_, empty):
        took: list[tuple[float, float]] = []
        for _ in range(WINDOWS):
            before = [own_cpu_seconds(each.pid) for each in (many, empty)]
            await asyncio.sleep(WINDOW)
            first, second = (
                own_cpu_seconds(each.pid) - so_far for each, so_far in zip((many, empty), before, strict=True)
            )
            took.append((first, second))
    # what a start leaves to do takes some seconds
    assert min(first for first, _ in took) < 2 * min(second for _, second in took), took
