"""A CLI of ours finds the login and the files that the user's own CLI has.

Read from the program text of 2.1.329: on macOS the login is an entry of the Keychain with an account and a service. The
account is USER; the service ends in a hash of CLAUDE_SECURESTORAGE_CONFIG_DIR, else of CLAUDE_CONFIG_DIR, as the string
stands (NFC), and in nothing where neither says anything. Without USER the CLI's runtime knows no account.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shlex
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.settings import Settings

from ....conftest import MakeSettings
from ....talking import ask, running

CONFIG, LOGIN = "CLAUDE_CONFIG_DIR", "CLAUDE_SECURESTORAGE_CONFIG_DIR"
DECOMPOSED = unicodedata.normalize("NFD", "Schlüssel")


def files_of(env: dict[str, str], cwd: Path) -> Path:
    """Where a CLI in this environment and working directory keeps its sessions."""
    named = env[CONFIG] if CONFIG in env else f"{env['HOME']}/.claude"
    return Path(os.path.normpath(cwd / unicodedata.normalize("NFC", named)))


def entry(env: dict[str, str]) -> tuple[str, str]:
    """Account and service of its login in the macOS Keychain."""
    login = env.get(LOGIN)
    named = env.get(CONFIG) if login is None else login
    if not named:
        return env.get("USER") or "unknown", "Claude Code-credentials"
    hashed = hashlib.sha256(unicodedata.normalize("NFC", named).encode()).hexdigest()[:8]
    return env.get("USER") or "unknown", f"Claude Code-credentials-{hashed}"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LOGNAME", CONFIG, LOGIN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setattr(sys, "platform", "darwin")
    return Path(os.environ["HOME"])


def ours(settings: Settings, tmp_path: Path) -> dict[str, str]:
    return environment.build(settings, tmpdir=tmp_path, config_dir=environment.config_dir(settings))


@pytest.mark.parametrize(
    "named",
    [
        {},
        {CONFIG: "{home}/.claude"},  # what a shell makes of ~/.claude
        {CONFIG: "{home}/.claude/"},
        {CONFIG: "{home}//.claude/."},
        {CONFIG: "{home}/work"},
        {CONFIG: "{home}/claude/"},
        {CONFIG: "{home}/" + DECOMPOSED},
        {LOGIN: "{home}/login/"},
        {LOGIN: ""},
        {CONFIG: "{home}/work", LOGIN: ""},
        {CONFIG: "{home}/claude/", LOGIN: "{home}/login"},
    ],
)
def test_the_login_is_the_entry_of_the_users_own_cli_and_what_names_it_arrives_byte_for_byte(
    named: dict[str, str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {"HOME": str(home), "USER": "ada"} | {name: form.format(home=home) for name, form in named.items()}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    env = ours(Settings(), tmp_path)
    assert {name: env[name] for name in (CONFIG, LOGIN) if name in env} == {
        name: users[name] for name in (CONFIG, LOGIN) if name in users
    }
    assert entry(env) == entry(users)
    assert files_of(env, tmp_path / "sandbox") == files_of(users, Path.cwd()) == environment.config_dir(Settings())


@pytest.mark.parametrize("named", ["config", "./config/", "../config"])
def test_a_relative_directory_is_that_of_serve_and_its_login_is_the_users(
    named: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CLI works in another directory than the user's own, so the value cannot stay as it is."""
    monkeypatch.setenv(CONFIG, named)
    users = {"HOME": str(home), "USER": "ada", CONFIG: named}
    env = ours(Settings(), tmp_path)
    assert entry(env) == entry(users)
    assert files_of(env, tmp_path / "sandbox") == files_of(users, Path.cwd()) == environment.config_dir(Settings())
    monkeypatch.setattr(sys, "platform", "linux")  # there the login is a file, in the same directory
    assert LOGIN not in ours(Settings(), tmp_path)


def test_a_tilde_that_no_shell_has_read_is_the_home_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file of variables. The CLI itself would make a folder of that name in each agent's directory."""
    monkeypatch.setenv(CONFIG, "~/.claude")
    env = ours(Settings(), tmp_path)
    assert files_of(env, tmp_path / "sandbox") == home / ".claude" == environment.config_dir(Settings())
    assert entry(env) == entry({"HOME": str(home), "USER": "ada", CONFIG: "~/.claude"})


def test_an_empty_directory_is_none(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CLI takes it for its working directory: each agent's own."""
    monkeypatch.setenv(CONFIG, "")
    env = ours(Settings(), tmp_path)
    assert CONFIG not in env
    assert entry(env) == entry({"HOME": str(home), "USER": "ada", CONFIG: ""})


@pytest.mark.parametrize(
    ("variable", "setting", "arrives"),
    [
        (None, ".claude", None),  # the user's own, with the entry of an unset variable
        (None, "other", "{home}/other"),
        ("{home}/.claude/", ".claude", "{home}/.claude/"),  # the same directory: the user's own form of it
        ("{home}/claude/", "other", "{home}/other"),
        ("{home}/claude/", ".claude", "{home}/.claude"),
    ],
)
def test_the_setting_names_a_directory_and_the_variable_names_its_login(
    variable: str | None, setting: str, arrives: str | None, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(CONFIG, variable.format(home=home))
    settings = Settings(claude_config_dir=home / setting)
    env = ours(settings, tmp_path)
    assert env.get(CONFIG) == (None if arrives is None else arrives.format(home=home))
    assert files_of(env, tmp_path) == home / setting
    # the command by hand, which `show` tells, has the same login in a shell without variables
    words = shlex.split(environment.resume_command(settings, tmp_path, "id"))
    typed = dict(word.split("=", 1) for word in words if word.startswith("CLAUDE_"))
    assert entry({"USER": "ada"} | typed) == entry(env)


@pytest.mark.parametrize("given", [{}, {"USER": ""}, {"LOGNAME": "cron"}])
def test_a_user_that_the_environment_does_not_name_is_the_user_databases(
    given: dict[str, str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launchd and cron start programs so."""
    monkeypatch.delenv("USER")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=f"user{uid}"))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    name = f"user{os.getuid()}"
    env = ours(Settings(), tmp_path)
    assert (env["USER"], env["LOGNAME"]) == (name, given.get("LOGNAME", name))


def test_a_user_that_is_in_no_database_is_not_made_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("USER")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not {"USER", "LOGNAME"} & set(ours(Settings(), tmp_path))


@pytest.mark.parametrize("form", ["{home}/.claude/", "config", "~/mine"])
async def test_the_real_clis_files_are_where_they_are_looked_for(
    form: str, claude_2: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG, form.format(home=os.environ["HOME"]))
    settings = make_settings(claude_bin=claude_2, claude_config_dir=None)
    async with running(settings) as engine:
        await ask(engine, "the colour is teal")
        turn = await ask(engine, "the city is Porto")
        session = await engine.store.session(turn.session_id or "")
    assert turn.continuity == "warm"
    assert session is not None
    assert Path(session.transcript) in set(environment.config_dir(settings).glob("projects/*/*.jsonl"))
    assert not set((settings.var / "sandbox" / "agents").glob("*/*"))
