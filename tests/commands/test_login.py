"""What `serve` says of the CLI and its login, asked of the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.commands.login import report
from cli_session_proxy.settings import Settings


async def said(tmp_path: Path, claude: Path, **env: str) -> list[str]:
    settings = Settings(
        var=tmp_path / "var", claude_bin=claude, claude_config_dir=tmp_path / "config",
        # nowhere: whatever the CLI may want to ask, it asks nobody
        claude_env={"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **env},
    )  # fmt: skip
    return [line async for line in report(settings)]


async def test_a_missing_login_is_told_with_what_to_do(tmp_path: Path, claude_2: Path) -> None:
    version, advice = await said(tmp_path, claude_2)
    assert version.startswith("claude 2.1.")
    assert str(claude_2) in version
    assert "no Claude login" in advice
    assert f"{claude_2} auth login" in advice


async def test_an_old_cli_cannot_tell(tmp_path: Path, claude_1: Path) -> None:
    version, advice = await said(tmp_path, claude_1)
    assert version.startswith("claude 1.0.120")
    assert "cannot tell" in advice


@pytest.mark.parametrize(
    "env",
    [
        {"ANTHROPIC_API_KEY": "sk-ant-fake"},
        {"CLAUDE_CODE_OAUTH_TOKEN": "sk-ant-fake"},
        {"CLAUDE_CODE_USE_BEDROCK": "1"},
    ],
)
async def test_a_login_by_the_environment_is_enough(tmp_path: Path, claude_2: Path, env: dict[str, str]) -> None:
    (line,) = await said(tmp_path, claude_2, **env)
    assert line.startswith("claude 2.1.")


async def test_a_missing_cli_is_a_line_not_an_error(tmp_path: Path) -> None:
    (line,) = await said(tmp_path, tmp_path / "nothing")
    assert "--claude-bin" in line
