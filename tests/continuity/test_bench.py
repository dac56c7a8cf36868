"""The benchmark for everybody on a proxy that is served, and the matrix judges by its code."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from turnfault.ports import free_port
from turnfault.running import provider, run
from turnfault.score import score
from turnfault.talk import Talk
from turnfault.targets.server import ServerTarget

from . import score as scores_of_the_matrix
from . import talk as talks_of_the_matrix
from .report import Report


@pytest.mark.full
async def test_this_proxy_keeps_every_row_of_the_benchmark(claude_2: Path, tmp_path: Path, report: Report) -> None:
    port, config = free_port(), tmp_path / "config"
    serve = [sys.executable, "-m", "cli_session_proxy", "serve", "--port", str(port), "--var", str(tmp_path / "var"),
             "--claude-config-dir", str(config), "--claude-bin", str(claude_2)]  # fmt: skip
    async with provider() as upstream:
        server = ServerTarget(
            f"http://127.0.0.1:{port}/v1", "chat", upstream, tmp_path, agent_header="X-Agent-Id",
            start=shlex.join(serve), config=config,
        )  # fmt: skip
        await server.up()
        try:
            report.served = await run(server, upstream, lambda _result: None)
        finally:
            await server.down()
    assert {str(one.row): str(one.score) for one in report.served if one.score is None or not one.score.whole} == {}


def test_the_matrix_judges_and_talks_with_the_same_code() -> None:
    assert scores_of_the_matrix.score is score
    assert issubclass(talks_of_the_matrix.EngineTalk, Talk)
