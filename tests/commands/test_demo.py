"""The demo holds its promise with either CLI, whatever the user's environment says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli_session_proxy.commands.demo import demo

from ..clis import old_cli_in_full


@old_cli_in_full
async def test_the_demo_recalls_over_a_deleted_session_file(claude: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "not-to-be-used")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("CLI_SESSION_PROXY_PROFILE", "no-such-profile")
    before = dict(os.environ)
    said: list[str] = []
    assert await demo(claude, said.append)
    assert any("rebuilt" in line and "The session's transcript was gone (no transcript at" in line for line in said)
    assert any("I remember: colour is teal; number is seven." in line for line in said)
    assert dict(os.environ) == before
