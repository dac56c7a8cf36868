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
WINDOW = 10.0  # seconds that are measured at a time
SHARE = 0.005  # of a core


@pytest.mark.full
async def test_beside_ten_thousand_transcripts_it_takes_nearly_nothing(
    claude_2: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    """0.25 % of a core, measured; 0.9 % if they were polled."""
    settings = make_settings(claude_bin=claude_2)
    projects = Projects(settings, Sandboxes(settings), environment.config_dir(settings))
    for number in range(AGENTS):
        folder = projects.path(settings.var / "sandbox" / "agents" / f"agent-{number}", str(uuid.uuid4())).parent
        folder.mkdir(parents=True)
        for _ in range(EACH):
            (folder / f"{uuid.uuid4()}.jsonl").write_text('{"type": "summary"}\n')
    async with serve(settings, tmp_path) as (_, process):
        shares = []
        for _ in range(3):  # what a start leaves to do takes some seconds
            before = own_cpu_seconds(process.pid)
            await asyncio.sleep(WINDOW)
            shares.append((own_cpu_seconds(process.pid) - before) / WINDOW)
    assert min(shares) < SHARE, shares
