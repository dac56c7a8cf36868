"""The LaunchAgent in `deploy/`. Nobody has run it on a Mac: what can be known of it here is."""

from __future__ import annotations

import plistlib
from pathlib import Path

import pytest

from cli_session_proxy.settings import Settings

from ..conftest import ROOT


def test_it_is_a_property_list_that_gives_serve_what_launchd_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "deploy" / "com.cli-session-proxy.plist").read_text()
    agent = plistlib.loads(text.replace("@HOME@", "/Users/ada").replace("@USER@", "ada").encode())
    env = agent["EnvironmentVariables"]
    assert {"/Users/ada/.local/bin", "/opt/homebrew/bin", "/usr/local/bin", "/usr/bin"} <= set(env["PATH"].split(":"))
    assert (env["USER"], env["HOME"]) == ("ada", "/Users/ada")
    assert agent["SoftResourceLimits"]["NumberOfFiles"] >= 4096
    assert agent["Umask"] == 0o077
    assert agent["ProgramArguments"][1:] == ["serve", "--make-key"]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.var == Path("/Users/ada/Library/Application Support/cli-session-proxy")
    assert agent["ExitTimeOut"] > settings.drain_timeout + 5
