"""Flags over environment over file, and an error that names the place."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cli_session_proxy.errors import ConfigError
from cli_session_proxy.settings import CONFIG_FILE, NEUTRAL_SYSTEM_PROMPT, Profile, WrongSettings, load


def file(text: str) -> None:
    Path(CONFIG_FILE).write_text(text)  # the working directory is the test's own


def test_defaults_are_safe(tmp_path: Path) -> None:
    settings = load()
    assert (settings.host, settings.port, settings.var) == ("127.0.0.1", 8787, tmp_path / "var")
    assert settings.system_prompt == NEUTRAL_SYSTEM_PROMPT
    assert settings.profile_for(None) == Profile()
    assert settings.profile_for(None).tools == ()


def test_a_flag_wins_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file("port = 1\nlane_limit = 1\nmax_turns = 1")
    monkeypatch.setenv("CLI_SESSION_PROXY_PORT", "2")
    monkeypatch.setenv("CLI_SESSION_PROXY_LANE_LIMIT", "2")
    settings = load(port=3, lane_limit=None)
    assert (settings.port, settings.lane_limit, settings.max_turns) == (3, 2, 1)


def test_tables_come_from_the_file_and_parts_of_them_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    file(
        """
        profile = "coder"
        [profiles.coder]
        tools = ["Read", "Edit"]
        setting_sources = ["project"]
        [sandbox.links]
        "CLAUDE.md" = "/shared/CLAUDE.md"
        """
    )
    monkeypatch.setenv("CLI_SESSION_PROXY_PROFILES__CODER__MODEL", "opus")
    settings = load(config=Path(CONFIG_FILE))
    assert settings.profile_for(None) == Profile(tools=("Read", "Edit"), setting_sources=("project",), model="opus")
    assert settings.sandbox.links == {"CLAUDE.md": Path("/shared/CLAUDE.md")}


@pytest.mark.parametrize("name", ["var", "claude_bin", "claude_config_dir"])
def test_paths_are_absolute_whatever_the_working_directory_becomes(name: str, tmp_path: Path) -> None:
    assert getattr(load(**{name: Path("here")}), name) == tmp_path / "here"
    assert getattr(load(**{name: Path("~/there")}), name) == tmp_path / "home" / "there"


def test_paths_of_a_profile_are_no_paths_in_its_agents_directories(tmp_path: Path) -> None:
    """A CLI started there the programs of `mcp_config` that the agent had written, without the boundary of before."""
    profile = Profile(mcp_config=Path("mcp.json"), add_dirs=(Path("here"), Path("~/there")))
    assert profile.mcp_config == tmp_path / "mcp.json"
    assert profile.add_dirs == (tmp_path / "here", tmp_path / "home" / "there")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("port = \nvar = 1", "line 1"),
        ("[profiles", "not valid TOML"),
        ("port = 99999", "port"),
        ('port = "many"', "port"),
        ("prot = 1", "prot"),
        ("turn_timeout = 0", "turn_timeout"),
        ('on_context_full = "forget"', "on_context_full"),
        ('[profiles.coder]\npermission_mode = "all"', "profiles.coder.permission_mode"),
        ("[profiles.coder]\ntool = []", "profiles.coder.tool"),
        ("[sandbox]\nlink = 1", "sandbox.link"),
    ],
)
def test_a_broken_file_is_one_line_that_names_the_place(text: str, names: str) -> None:
    file(text)
    with pytest.raises(ConfigError) as caught:
        load()
    assert names in str(caught.value)
    assert CONFIG_FILE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_told_at_once_each_with_its_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.toml").write_text(
        """\
# a comment: port = 1
port = 99999
forget_unnamed = "sometimes"
[profiles.coder]
permission_mode = "all"
model = "sonnet"
tool = ["Bash"]
[models."gpt-5.2"]
lite = "openai/gpt-5.2"
[models.local]
litellm = "claude-cli/sonnet"
fallbacks = []
"""
    )
    monkeypatch.setenv("CLI_SESSION_PROXY_LANE_LIMIT", "many")
    monkeypatch.setenv("CLI_SESSION_PROXY_PROFILES__CODER__CONFINED", "perhaps")
    monkeypatch.setenv("CLI_SESSION_PROXY_PROT", "1")
    with pytest.raises(WrongSettings) as caught:
        load(config=Path("mine.toml"), keepalive=-1)
    assert {(told.partition(": ")[0], told.rpartition("(")[2].rstrip(")")) for told in caught.value.mistakes[1:]} == {
        ("setting port", "mine.toml line 2"),
        ("setting forget_unnamed", "mine.toml line 3"),
        ("setting profiles.coder.permission_mode", "mine.toml line 5"),
        ("setting profiles.coder.tool", "mine.toml line 7"),
        ("setting profiles.coder.confined", "from CLI_SESSION_PROXY_PROFILES__CODER__CONFINED"),
        ("setting models.gpt-5.2.lite", "mine.toml line 9"),
        ("setting models.gpt-5.2.litellm", "mine.toml line 8"),
        ("setting models.local.litellm", "mine.toml line 11"),
        ("setting lane_limit", "from CLI_SESSION_PROXY_LANE_LIMIT"),
        ("setting keepalive", "from --keepalive"),
    }
    assert caught.value.mistakes[0].startswith("CLI_SESSION_PROXY_PROT is no setting")


def test_settings_that_do_not_fit_together_are_told_at_once_too() -> None:
    Path("mine.toml").write_text(
        'advertise = "http://x:1"\nprofile = "codr"\n[profiles.coder]\n[models.gpt]\nlitellm = "openai/gpt"\n'
        'fallbacks = ["gtp", "gpt"]\n'
    )
    with pytest.raises(WrongSettings) as caught:
        load(config=Path("mine.toml"))
    (told,) = [" ".join(caught.value.mistakes)]
    assert "mine.toml line 1" in told
    assert "mine.toml line 2" in told
    assert "there is no model 'gtp': add [models.gtp]; a model cannot be its own fallback" in told


def test_a_file_in_the_working_directory_is_told_all_that_it_may_not_set() -> None:
    file('host = "0.0.0.0"\nport = 1\n[profiles.a]\ntools = ["Bash"]\n[models.gpt]\nlitellm = "openai/gpt"\n')
    with pytest.raises(WrongSettings) as caught:
        load()
    assert [told.partition(" (")[0] for told in caught.value.mistakes] == [
        f"{CONFIG_FILE} line {line} sets {name}" for line, name in ((1, "host"), (5, "models"), (4, "profiles.a.tools"))
    ]


def test_a_file_that_is_not_text_is_named() -> None:
    Path(CONFIG_FILE).write_bytes(b'host = "\xff"')
    with pytest.raises(ConfigError, match=f"{CONFIG_FILE} cannot be read"):
        load()


@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [("PORT", "x", "port"), ("PROFILES", "not json", "profiles"), ("CLAUDE_ENV", "{", "claude_env")],
)
def test_a_broken_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, names: str) -> None:
    monkeypatch.setenv(f"CLI_SESSION_PROXY_{variable}", value)
    with pytest.raises(ConfigError) as caught:
        load()
    assert names in str(caught.value)
    assert "CLI_SESSION_PROXY_" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [{"port": -1}, {"host": 5}, {"unknown": 1}])
def test_a_broken_flag_is_named(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        load(**flags)


def test_an_unknown_profile_says_which_are_known() -> None:
    file("[profiles.coder]\n[profiles.writer]")
    with pytest.raises(ConfigError, match=r"'painter'.*coder, writer"):
        load().profile_for("painter")


# --- a file that merely lies there

NOT_FROM_THERE = (
    ('claude_bin = "./claude"', "claude_bin"),
    ('claude_config_dir = "."', "claude_config_dir"),
    ('[claude_env]\nNODE_OPTIONS = "--require ./x.js"', "claude_env"),
    ('[profiles.a]\nmcp_config = "servers.json"', "profiles.a.mcp_config"),
    ('[profiles.a]\ntools = ["Bash"]', "profiles.a.tools"),
    ('[profiles.a]\nadd_dirs = ["/"]', "profiles.a.add_dirs"),
    ('[profiles.a]\nsetting_sources = ["project"]', "profiles.a.setting_sources"),
    ('[sandbox.links]\nkeys = "/home/ada/.ssh"', "sandbox.links"),
    ('allowed_origins = ["http://evil.example"]', "allowed_origins"),
    ('host = "0.0.0.0"', "host"),
    ('[keys]\nlocal = "a-secret-that-its-author-knows"', "keys"),
    ('keys_file = "keys.toml"', "keys_file"),
    ("retention_days = 0.001", "retention_days"),
    ("forget_unnamed = 0.001", "forget_unnamed"),
)


@pytest.mark.parametrize(("text", "setting"), NOT_FROM_THERE)
def test_a_file_in_the_working_directory_names_no_program_environment_or_link(text: str, setting: str) -> None:
    """Whoever cloned a repository and types `serve` in it would run what its author wants."""
    file(text)
    with pytest.raises(ConfigError, match=rf"{re.escape(setting)}\b.*--config {CONFIG_FILE}") as caught:
        load()
    assert "\n" not in str(caught.value)
    load(config=Path(CONFIG_FILE))


@pytest.mark.parametrize("text", [text for text, _ in NOT_FROM_THERE])
def test_a_file_that_was_named_by_the_environment_may(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setenv("CLI_SESSION_PROXY_CONFIG", "mine.toml")
    assert load().config == tmp_path / "mine.toml"


def test_a_file_that_was_named_is_read_instead_of_the_one_that_lies_there(tmp_path: Path) -> None:
    file('port = 1\nclaude_bin = "./claude"')
    (tmp_path / "mine.toml").write_text("lane_limit = 2")
    settings = load(config=Path("mine.toml"))
    assert (settings.port, settings.lane_limit, settings.claude_bin) == (8787, 2, None)


def test_what_is_empty_there_does_no_harm() -> None:
    file("[claude_env]\n[sandbox.links]\n[profiles.a]\ntools = []")
    assert load().claude_env == {}


def test_a_named_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load(config=Path("missing.toml"))


# --- typos


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("prot = 1", "port"),
        ("Claude_Bin_ = '/x'", "claude_bin"),
        ("[profiles.coder]\ntool = []", "tools"),
        ("[profiles.coder]\npermision_mode = 'plan'", "permission_mode"),
        ("[sandbox]\nlink = 1", "links"),
    ],
)
def test_an_unknown_setting_names_the_one_that_is_probably_meant(text: str, meant: str) -> None:
    file(text)
    with pytest.raises(ConfigError, match=rf"there is no such setting: did you mean `{meant}`\?"):
        load()


def test_a_setting_that_is_like_no_other_is_refused_without_a_guess() -> None:
    file("flavour = 'vanilla'")
    with pytest.raises(
        ConfigError, match=r"setting flavour: there is no such setting \(cli_session_proxy.toml line 1\)"
    ):
        load()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("CLI_SESSION_PROXY_PROT", "CLI_SESSION_PROXY_PORT"),
        ("CLI_SESSION_PROXY_KEYSFILE", "CLI_SESSION_PROXY_KEYS_FILE"),
        ("CLI_SESSION_PROXY_KEYS_ALICE", "CLI_SESSION_PROXY_KEYS__ALICE"),
        ("CLI_SESSION_PROXY_PROFILE__CODER__MODEL", "CLI_SESSION_PROXY_PROFILES__CODER__MODEL"),
        ("CLI_SESSION_PROXY_PROFLES__CODER__MODEL", "CLI_SESSION_PROXY_PROFILES__CODER__MODEL"),
        ("CLI_SESSION_PROXY_FLAVOUR", None),
        ("cli_session_proxy_prot", "CLI_SESSION_PROXY_PORT"),
    ],
)
def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, meant: str | None) -> None:
    """Left unread without a word, it would be a proxy without the key that somebody believes in."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError) as caught:
        load()
    assert (f"did you mean `{meant}`?" in str(caught.value)) == (meant is not None)


def test_a_misspelt_profile_stops_the_start() -> None:
    file('profile = "codr"\n[profiles.coder]\n[profiles.writer]')
    with pytest.raises(ConfigError, match=r"unknown profile 'codr': did you mean `coder`\? add \[profiles.codr\]"):
        load()


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        ({"approve": ["Bash"]}, "not among the profile's tools"),
        ({"tools": ["Bash"], "approve": ["Write"]}, "not among the profile's tools"),
        ({"tools": ["Bash"], "approve": ["Bash"], "permission_mode": "bypassPermissions"}, "the CLI asks nobody"),
        ({"tools": ["Bash"], "approve": ["Bash"], "permission_mode": "dontAsk"}, "the CLI asks nobody"),
    ],
)
def test_a_profile_whose_tools_would_run_unasked_is_refused(profile: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Profile(**profile)


def test_a_profile_may_have_tools_wait_by_name_or_by_rule() -> None:
    tools = ("Bash", "Write(notes/*)")
    for approve in (("Bash",), ("Bash(git push *)", "Write"), ("mcp__files__delete",)):
        assert Profile(tools=tools, approve=approve).approve == approve
    assert Profile(tools=("default",), approve=("Bash",)).approve == ("Bash",)


# --- letters of a path on a disk that ignores their case


def test_on_macos_a_directory_is_called_as_the_disk_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CLI names a session's folder by its directory: another spelling would be another folder."""
    there = tmp_path / "Chäts" / "Var"
    there.mkdir(parents=True)
    typed = tmp_path / "chA\u0308ts" / "vAR" / "new"
    assert load(var=typed).var == typed, "Linux: these are two directories"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert load(var=typed).var == typed, "so they are on a disk of macOS that tells letters apart"
    monkeypatch.setattr(os.path, "samefile", lambda *_: True)
    settings = load(var=typed, sandbox_root=tmp_path / "CHÄTS")
    assert (settings.var, settings.sandbox_root) == (there / "new", there.parent)
    assert load(var=there).var == there
