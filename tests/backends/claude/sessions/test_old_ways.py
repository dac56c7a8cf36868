"""What some CLIs of some time ago do with a transcript."""

from __future__ import annotations

from pathlib import Path

from cli_session_proxy.testing.upstream import Upstream

from ....conftest import MakeSettings
from ....talking import ask, heard, running
from .meddling import MeddledCli


async def test_the_transcript_of_a_new_session_may_come_after_the_result(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """As with 2.1.150 to 2.1.260 on a loaded machine."""
    cli = MeddledCli(tmp_path / "cli", claude_2)
    settings = make_settings(claude_bin=cli.path)
    cli.order("result", ("late", str(tmp_path / "claude-config" / "projects"), "0.3"))
    async with running(settings) as engine:
        first = await ask(engine, "one")
    assert cli.done
    assert first.evidence.records == "transcript"
    async with running(settings) as engine:
        second = await ask(engine, "two")
    assert (second.continuity, second.evidence.repaired) == ("resumed", None)
    assert heard(upstream) == ["one", "two"]
