"""A confined shell that tries to get past its boundary, by ways that no mount closes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlsplit

import psutil
import pytest
from pydantic import SecretStr

from cli_session_proxy.backends.claude.process import confine, frames, guardian_program, memory, process
from cli_session_proxy.backends.claude.process.confine_program import FIRST_TO_END
from cli_session_proxy.backends.claude.process.events import CliEvent
from cli_session_proxy.backends.claude.process.guardian_program import sweep
from cli_session_proxy.backends.claude.process.process import ClaudeProcess, Launch
from cli_session_proxy.backends.claude.sessions import summaries, verifying
from cli_session_proxy.backends.claude.transcript import Projects, files
from cli_session_proxy.commands import finding
from cli_session_proxy.commands.verifying import verify
from cli_session_proxy.engine import attempt
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ContextTooLong, ProxyError, SandboxError
from cli_session_proxy.export import feed
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import ModelSettings, Profile, SandboxSettings, Settings
from cli_session_proxy.stores.sql import reading
from turnfault.provider.script import Fail, Reply, ToolUse
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ...conftest import ROOT, MakeSettings, required
from ...continuity.talk import ASKS_FOR_SUMMARY
from ...talking import ask, claude, events, running, text
from ...until import until
from .test_confined import CONFINED, FREE, MARK, Shells, bubblewrap, shells

__all__ = ["bubblewrap", "shells"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bubblewrap is Linux's")

NOBODY = 65534
TOO_LONG = Fail(400, message="prompt is too long: 2 tokens > 1 maximum")
PROCESS_KEYRING, SESSION_KEYRING, USER_KEYRING = -2, -3, -4


def with_profile(settings: Settings, **more: object) -> Settings:
    return settings.model_copy(update={"profiles": {"confined": CONFINED.model_copy(update=more)}})


async def test_a_secret_that_is_replaced_while_a_cli_runs_is_not_shown(shells: Shells) -> None:
    """What is mounted over a file goes with the file: so no folder is shown that holds one."""
    key = shells.shared / "keys.toml"
    key.write_text("marmalade-one")
    settings = shells.settings.model_copy(update={"keys_file": key})
    async with running(settings) as engine:
        with pytest.raises(SandboxError, match=r"could read .*keys\.toml \(keys_file\)"):
            await shells.run(engine, "confined", "cat rules/keys.toml")
    assert shells.upstream.requests == []


SERVERS = ("servers", "server's script", "server's option", "hook")


@pytest.mark.parametrize(
    "place",
    [
        "the CLI",
        "a link to it",
        "Python",
        "this program",
        "an environment",
        *(f"another profile's {one}" for one in SERVERS),
    ],
)
@pytest.mark.sample(4)
async def test_what_runs_outside_is_not_written_from_inside(shells: Shells, tmp_path: Path, place: str) -> None:
    project = tmp_path / "project"
    (project / "bin").mkdir(parents=True)
    own = Path(shells.settings.claude_bin or "")
    profiles = {"confined": CONFINED.model_copy(update={"add_dirs": (project,)})}
    settings = shells.settings
    if place == "the CLI":
        os.link(own, project / "bin" / "claude")
        settings = settings.model_copy(update={"claude_bin": project / "bin" / "claude"})
    elif place == "a link to it":
        (project / "bin" / "claude").symlink_to(own)
        settings = settings.model_copy(update={"claude_bin": project / "bin" / "claude"})
    elif place == "an environment":
        env = {"NODE_OPTIONS": f"--no-warnings --require={project}/bin/first.js"}
        settings = settings.model_copy(update={"claude_env": settings.claude_env | env})
    elif place == "another profile's servers":
        (project / "bin" / "mcp.json").write_text('{"mcpServers": {}}')
        profiles["free"] = Profile(mcp_config=project / "bin" / "mcp.json")
    elif place == "another profile's hook":
        profiles["free"] = Profile(setting_sources=("user",))
        hooks = [{"type": "command", "command": f"{project}/bin/hook.sh --quiet"}]
        assert settings.claude_config_dir is not None
        settings.claude_config_dir.mkdir(exist_ok=True)
        (settings.claude_config_dir / "settings.json").write_text(json.dumps({"hooks": {"Stop": [{"hooks": hooks}]}}))
    elif place.startswith("another profile's server"):
        args = (
            ["-c", f"exec python3 '{project}/bin/server.py'"] if "option" in place else [f"{project}/bin/a server.py"]
        )
        server = {"command": "sh", "args": args}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"one": server}}))
        profiles["free"] = Profile(mcp_config=tmp_path / "mcp.json")
    else:
        folder = sysconfig.get_paths()["purelib"] if place == "Python" else str(Path(confine.__file__).parent)
        profiles = {"confined": CONFINED.model_copy(update={"add_dirs": (Path(folder),)})}
    async with running(settings.model_copy(update={"profiles": profiles})) as engine:
        with pytest.raises(SandboxError, match="add_dirs"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


@pytest.mark.parametrize("place", ["a folder of PATH", "what a link of PATH leads to", "an empty entry of PATH"])
@pytest.mark.sample(1)
async def test_programs_that_are_looked_for_are_not_written_from_inside(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """bubblewrap itself is one, and runs outside."""
    project, ran = tmp_path / "project", tmp_path / "ran"
    (project / "bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to(project / "bin")
    entry = {"a folder of PATH": project / "bin", "what a link of PATH leads to": tmp_path / "bin"}.get(place, "")
    monkeypatch.setenv("PATH", f"{entry}:{os.environ['PATH']}")
    settings = with_profile(shells.settings, add_dirs=(project,)) if entry else shells.settings
    for _ in range(2):
        async with running(settings) as engine:
            plants = f"printf '#!/bin/sh\ntouch {ran}\n' > bwrap; chmod +x bwrap; echo tried"
            if entry:
                with pytest.raises(SandboxError, match=r"add_dirs.* PATH"):
                    await shells.run(engine, "confined", f"cd {project}/bin; {plants}")
            else:
                assert "tried" in await shells.run(engine, "confined", plants)
    assert not ran.exists()


@pytest.mark.parametrize("program", ["git", "server"])
def test_a_program_that_a_link_in_a_folder_of_path_leads_to_is_not_written_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """As `npm link` makes them: the proxy runs git, a CLI outside the server that it is told of by its name only."""
    for folder in ("bin", "project"):
        (tmp_path / folder).mkdir()
    (tmp_path / "project" / "tool").touch(0o700)
    (tmp_path / "bin" / program).symlink_to(tmp_path / "project" / "tool")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "mcp.json").write_text('{"mcpServers": {"one": {"command": "server"}}}')
    confined = CONFINED.model_copy(update={"add_dirs": (tmp_path / "project",)})
    with pytest.raises(SandboxError, match=rf"could so reach {tmp_path}/bin/{program} "):
        boundary(tmp_path, confined=confined, free=Profile(mcp_config=tmp_path / "mcp.json"))


def boundary(tmp_path: Path, **profiles: Profile) -> None:
    """That of an agent of the profile `confined`, in new folders there. No CLI is started."""
    agent, config = tmp_path / "agent", tmp_path / "config"
    for folder in (agent, tmp_path / "var"):
        folder.mkdir()
    settings = Settings(var=tmp_path / "var", profiles=profiles)
    place = confine.ConfinedPlace(agent, agent, config, config / "projects" / "a", tmp_path / "private")
    env = {"HOME": str(tmp_path / "home")}
    confine._wrapper(settings, profiles["confined"], Path("/usr/bin/true"), place, env)


@pytest.mark.parametrize("entry", ["a folder", "an empty entry"])
async def test_libraries_that_programs_outside_load_are_not_written_from_inside(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """bubblewrap itself loads them. An empty entry is the directory in which `serve` was started."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project if entry == "an empty entry" else tmp_path)
    env = {"LD_LIBRARY_PATH": f"{project if entry == 'a folder' else ''}:/usr/local/lib"}
    more = {"claude_env": shells.settings.claude_env | env, "config": tmp_path / "named.toml"}
    async with running(with_profile(shells.settings, add_dirs=(project,)).model_copy(update=more)) as engine:
        with pytest.raises(SandboxError, match=r"add_dirs.* LD_LIBRARY_PATH"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_AUDIT",
        "OPENSSL_CONF",
        "SSL_CERT_DIR",
        "NODE_EXTRA_CA_CERTS",
        "AWS_CONFIG_FILE",
        "PYTHONPYCACHEPREFIX",
        "GIT_CONFIG_GLOBAL",
        "XDG_CONFIG_HOME",
    ],
)
async def test_files_that_the_environment_names_are_not_written_from_inside(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A library that the guardian loads, whom other CLIs trust, what the proxy runs to log in at AWS."""
    project = tmp_path / "project"
    project.mkdir()
    first = "/usr/lib/ssl/certs:" if name == "SSL_CERT_DIR" else ""
    monkeypatch.setenv(name, f"{first}{project}/file")
    async with running(with_profile(shells.settings, add_dirs=(project,))) as engine:
        with pytest.raises(SandboxError, match=rf"add_dirs.* {name}"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


async def test_a_file_that_the_environment_names_from_the_working_directory_is_not_written_from_inside(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name has no folder: it was taken for a library that is searched elsewhere."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("SSL_CERT_FILE", "file")
    settings = shells.settings.model_copy(update={"config": tmp_path / "config.toml"})
    async with running(with_profile(settings, add_dirs=(project,))) as engine:
        with pytest.raises(SandboxError, match=r"add_dirs.* SSL_CERT_FILE"):
            await shells.run(engine, "confined", "true")


async def test_no_program_outside_loads_a_library_from_an_agents_directory(shells: Shells) -> None:
    """An empty entry of LD_LIBRARY_PATH is the directory in which a program is started."""
    env = shells.settings.claude_env | {"LD_LIBRARY_PATH": ":/usr/local/lib"}
    settings = shells.settings.model_copy(update={"claude_env": env})
    plants = "for name in libcap.so.2 libcap-ng.so.0; do echo no library > $name; done; echo planted"
    for _ in range(2):
        async with running(settings) as engine:
            assert "planted" in await shells.run(engine, "confined", plants)


async def test_an_agent_that_was_confined_stays_so_in_a_turn_without_a_profile(shells: Shells, tmp_path: Path) -> None:
    """An older CLI runs what the settings of a repository in its directory name, also without tools."""
    ran = tmp_path / "ran"
    old = required(ROOT / ".tools" / "claude-2.1.71" / "node_modules" / ".bin" / "claude", "make tools")
    settings = shells.settings.model_copy(update={"claude_bin": old, "cli_retries": 0})
    plants = f"git init -q . && git config core.fsmonitor 'touch {ran}; false' && echo planted"
    async with running(settings) as engine:
        assert "planted" in await shells.run(engine, "confined", plants)
    async with running(settings) as engine:
        await ask(engine, "hello", agent="confined")
    assert not ran.exists()


async def test_a_link_on_the_way_to_a_mount_makes_nothing_outside(shells: Shells, tmp_path: Path) -> None:
    """While it starts, bubblewrap has the whole machine at /oldroot, and makes folders that it mounts on."""
    config, private = shells.settings.claude_config_dir, shells.settings.var / "confined" / "confined"
    victim = tmp_path / "victim"
    victim.mkdir()
    async with running(shells.settings) as engine:
        for name in ("projects", "sessions"):
            said = await shells.run(engine, "confined", f"mv {config}/{name} {config}/moved 2>&1; echo tried")
            assert "busy" in said
            assert "tried" in said
    private = shells.settings.var / "confined" / "confined~user"
    private.mkdir()
    for name in ("projects", "settings.json"):  # left there in some other way
        if (private / name).exists():
            (private / name).rename(private / f"{name}.old")
        (private / name).symlink_to(f"/oldroot{victim}/{name}")
    (victim / "projects").mkdir()
    assert shells.settings.claude_config_dir is not None
    (shells.settings.claude_config_dir / "settings.json").write_text("{}")
    settings = with_profile(shells.settings, setting_sources=("user",))
    async with running(settings) as engine:
        assert "here" in await shells.run(engine, "confined", f"cat {config}/settings.json; echo here")
    assert [*victim.rglob("*")] == [victim / "projects"]


@pytest.mark.full
async def test_a_link_that_is_put_there_while_another_cli_of_the_agent_starts_makes_nothing_outside(
    shells: Shells, tmp_path: Path
) -> None:
    """An earlier session's CLI waits for its next turn, and what its shell left running goes on."""
    config, victim = shells.settings.claude_config_dir, tmp_path / "victim"
    assert config is not None
    config.mkdir(exist_ok=True)
    victim.mkdir()
    (config / "CLAUDE.md").write_text("Be kind to marmalade.")
    profiles = {"confined": CONFINED, "wide": CONFINED.model_copy(update={"setting_sources": ("user",)})}
    links = "; ".join(f"ln -sfn /oldroot{victim}/{name} {config}/{name}" for name in ("CLAUDE.md", "settings.json"))
    puts = f"setsid sh -c 'while :; do {links}; touch going; done' >/dev/null 2>&1 </dev/null & echo started"
    shells.upstream.when("go", ToolUse([("Bash", {"command": puts})]))
    async with running(shells.settings.model_copy(update={"profiles": profiles})) as engine:
        first = await ask(engine, "hello", profile="confined")
        assert "started" in text(await ask(engine, "go", profile="confined"))
        await until((shells.settings.var / "sandbox" / "agents" / "a" / "going").exists)
        for again in ("one", "two", "three"):  # each a branch: a session of its own
            await ask(engine, "hello", text(first), again, profile="wide")
            assert "Be kind to marmalade." in str(shells.upstream.requests[-1].body)
    assert list(victim.iterdir()) == []


async def test_a_link_above_a_cli_within_the_config_dir_makes_nothing_outside_either(
    shells: Shells,
) -> None:
    """The CLI's own installer once made ~/.claude/local/claude."""
    config = shells.settings.claude_config_dir
    assert config is not None
    (config / "local").mkdir(parents=True)
    os.link(shells.settings.claude_bin or "", config / "local" / "claude")
    settings = shells.settings.model_copy(update={"claude_bin": config / "local" / "claude"})
    async with running(settings) as engine:
        said = await shells.run(engine, "confined", f"mv {config}/local {config}/moved 2>&1; echo tried")
        assert "busy" in said
        assert "tried" in said


@pytest.mark.parametrize("place", ["a link's target", "a second folder", "a link to one", "a folder behind a link"])
async def test_a_link_to_a_folder_that_is_written_hides_no_name_that_a_mount_goes_by(
    shells: Shells, tmp_path: Path, place: str
) -> None:
    """An agent moved `skills` away, put a link to a home in its place, and its next CLI was shown the home."""
    real, project = tmp_path / "real", tmp_path / "project"
    (real / "skills").mkdir(parents=True)
    project.symlink_to(real)
    settings = with_profile(shells.settings, add_dirs=(project,))
    if place == "a link's target":
        links = SandboxSettings(links={"skills": real / "skills"})
        settings = settings.model_copy(update={"sandbox": links})
    elif place == "a second folder":
        settings = with_profile(shells.settings, add_dirs=(project, real / "skills"))
    elif place == "a link to one":  # it could write in that home, too
        (tmp_path / "view").symlink_to(real / "skills")
        settings = with_profile(shells.settings, add_dirs=(real, tmp_path / "view"))
    else:
        profiles = {"wide": CONFINED.model_copy(update={"add_dirs": (real,)})}
        profiles["confined"] = CONFINED.model_copy(update={"add_dirs": (project / "skills",)})
        settings = settings.model_copy(update={"profiles": profiles})
    async with running(settings) as engine:
        with pytest.raises(SandboxError, match="could replace"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


@pytest.mark.parametrize("name", ["ANTHROPIC_BASE_URL", "mcp_config of profile other", "settings.json"])
async def test_nobody_inside_listens_beside_a_server_that_is_named_as_localhost(
    shells: Shells, tmp_path: Path, name: str
) -> None:
    """A shell listened at [::1] and passed all on to 127.0.0.1: it heard another agent's words and the key."""
    port = urlsplit(shells.upstream.url).port or 0
    with socket.socket(socket.AF_INET6) as probe:
        is_free = True
        try:
            probe.bind(("::1", port))
        except OSError:  # this machine has no ::1, or another program has this port there: nobody can listen
            is_free = False
    settings = with_profile(shells.settings)
    changed: dict[str, Any] = {"claude_env": settings.claude_env | {name: f"http://LOCALHOST.:{port}"}}
    if name.startswith("mcp"):
        (tmp_path / "mcp.json").write_text(
            f'{{"mcpServers": {{"a": {{"type": "http", "url": "http://localhost:{port}/"}}}}}}'
        )
        changed = {"profiles": settings.profiles | {"other": Profile(mcp_config=tmp_path / "mcp.json")}}
    elif name == "settings.json":
        assert settings.claude_config_dir is not None
        settings.claude_config_dir.mkdir()
        (settings.claude_config_dir / name).write_text(
            f'{{"env": {{"ANTHROPIC_BASE_URL": "http://localhost:{port}"}}}}'
        )
        changed = {"profiles": settings.profiles | {"other": Profile(setting_sources=("user",))}}
    async with running(settings.model_copy(update=changed)) as engine:
        refused = pytest.raises(SandboxError, match=f"at ::1 on port {port}.* \\S*{name} names as (?i:localhost)")
        with refused if is_free else contextlib.nullcontext():
            await shells.run(engine, "confined", "true")
    assert (shells.upstream.requests == []) is is_free


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p@localhost:6000/c",
        "postgresql:///c?host=localhost&port=6000",
        "postgresql://one.example,localhost/c?port=6000",
        "postgresql:///c",
    ],
)
def test_a_store_that_is_named_as_localhost_is_seen_wherever_it_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for name, value in (("PGHOST", "localhost"), ("PGPORT", "6000")):
        monkeypatch.setenv(name, value)
    named = Settings(store=SecretStr(url)).servers()["store"]
    assert confine.ON_LOOPBACK.findall(named) == [("postgresql", "localhost", "6000")]


@pytest.mark.parametrize("litellm", ["openai/x", "ollama/x"])
def test_a_model_that_is_named_as_localhost_is_seen(monkeypatch: pytest.MonkeyPatch, litellm: str) -> None:
    monkeypatch.setenv("OLLAMA_API_BASE", "http://localhost:6000")
    base = "http://localhost:6000" if litellm == "openai/x" else None
    named = Settings(models={"one": ModelSettings(litellm=litellm, api_base=base)}).servers()["models.one"]
    assert confine.ON_LOOPBACK.findall(named) == [("http", "localhost", "6000")]


def test_a_rule_of_the_users_settings_names_no_server(tmp_path: Path) -> None:
    """As for a server of one's own work, which listens at 127.0.0.1 only: no agent's words are sent there."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        rule = f"Bash(curl http://localhost:{server.getsockname()[1]}/*)"
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "settings.json").write_text(json.dumps({"permissions": {"allow": [rule]}}))
        boundary(tmp_path, confined=CONFINED, other=Profile(setting_sources=("user",)))


BINDS = """
import json, subprocess, sys
from pathlib import Path
from cli_session_proxy.backends.claude.process.confine import ConfinedPlace, SandboxError, _wrapper
from cli_session_proxy.settings import Profile, SandboxSettings, Settings

def bind(source, at):
    subprocess.run(["mount", "--bind", source, at], check=True)

def outcome(top, other=None, links=None, **settings):
    (top / "home").mkdir()
    profiles = {name: Profile(**of) for name, of in {"confined": {"confined": True}, **(other or {})}.items()}
    profiles["confined"] = profiles["confined"].model_copy(update={"add_dirs": settings.pop("add_dirs", ())})
    sandbox = SandboxSettings(links=links or {})
    settings = Settings(**{"var": top / "var", "profiles": profiles, "sandbox": sandbox, **settings})
    (agent := settings.var / "sandbox" / "agents" / "ada").mkdir(parents=True)
    (tmpdir := settings.var / "tmp" / "ada").mkdir(parents=True)
    config = top / "config"
    place = ConfinedPlace(agent, tmpdir, config, config / "projects" / "ada", settings.var / "confined" / "ada")
    try:
        env = {"HOME": str(top / "home")}
        return _wrapper(settings, profiles["confined"], Path("/usr/bin/true"), place, env)[0]
    except SandboxError as exc:
        return exc.message

found = {}
for case in ("its parent", "below", "a file", "a program", "shown", "a name"):
    top = Path(sys.argv[1], case)
    for name in ("one/inner", "two/inner"):
        (top / name).mkdir(parents=True)
    one, two = top / "one", top / "two"
    (one / "file").write_text("{}")
    if case == "below":
        bind(two, one / "inner")
        found[case] = outcome(top, var=two, add_dirs=(one,))
        continue
    if case == "a file":
        (two / "file").touch()
        bind(one / "file", two / "file")
        found[case] = outcome(top, keys_file=one / "file", add_dirs=(two,))
        continue
    bind(one, two)
    if case == "its parent":
        found[case] = outcome(top, var=one / "var", add_dirs=(two,))
    elif case == "a program":
        found[case] = outcome(top, {"free": {"mcp_config": one / "file"}}, add_dirs=(two,))
    elif case == "shown":
        words = outcome(top, var=one / "inner", links={"two": two})
        found[case] = ("--tmpfs", str(two / "inner")) in zip(words, words[1:])
    else:
        found[case] = outcome(top, links={"inner": one / "inner"}, add_dirs=(two,))
print(json.dumps(found))
"""


def test_what_a_bind_mount_shows_at_another_path_is_not_reached_there(tmp_path: Path) -> None:
    """As in a container: `-v proj:/proj -v proj/data:/data`, with `var` in /data and `add_dirs` of /proj."""
    alone = ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "private")
    done = subprocess.run(
        [*alone, sys.executable, "-c", BINDS, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "could so reach" in found["its parent"]
    assert "(--var)" in found["its parent"]
    assert "(--var)" in found["below"]
    assert "(keys_file)" in found["a file"]
    assert "/one/file (mcp_config of profile free), which a mount shows there" in found["a program"]
    assert found["shown"] is True
    assert "could replace" in found["a name"]


@pytest.mark.parametrize("name", ["settings.json", ".claude.json", ".claude/settings.json"])
async def test_settings_that_an_older_cli_loads_in_every_turn_are_not_written_from_inside(
    make_settings: MakeSettings, claude_1: Path, tmp_path: Path, upstream: Upstream, name: str
) -> None:
    """1.0.120 has no `--setting-sources`: it ran hooks and `apiKeyHelper` of the user's and the project's, also without
    a profile."""
    shells, added = Shells(make_settings, claude_1, tmp_path, upstream), tmp_path / "added"
    added.mkdir()
    settings = with_profile(shells.settings, add_dirs=(added,))
    config = settings.claude_config_dir or Path()
    config.mkdir()
    (added / "file").write_text("{}")
    if name.startswith(".claude/"):
        settings = settings.model_copy(update={"sandbox": SandboxSettings(links={name: added / "file"})})
    else:
        (config / name).symlink_to(added / "file")
    async with running(settings) as engine:
        with pytest.raises(SandboxError, match="add_dirs"):
            await shells.run(engine, "confined", "true")
    assert upstream.requests == []


@pytest.mark.parametrize(
    "place",
    [
        "transcripts",
        "archives",
        "TMPDIRs",
        "servers",
        ".claude/skills",
        "./.claude",
        ".claude",
        "settings.json",
        "skills/one",
        "CLAUDE.md",
        ".bashrc",
        ".config/git/config",
        ".aws/config",
        "home",
        "var",
        "sandbox_root",
    ],
)
async def test_what_is_others_is_not_reached_by_a_folder_that_is_written(
    shells: Shells, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what the CLIs of other confined agents run: their programs can read those agents' transcripts. A CLI reads
    the settings in every folder above its own, and its shell those of the home: what was put there ran outside."""
    added, settings = tmp_path / "added", shells.settings
    (added / "inner").mkdir(parents=True)
    profiles = {"confined": CONFINED.model_copy(update={"add_dirs": (added,)})}
    if place == "transcripts":
        assert settings.claude_config_dir is not None
        settings.claude_config_dir.mkdir(exist_ok=True)
        (settings.claude_config_dir / "projects").symlink_to(added / "inner")
    elif place == "archives":
        settings = settings.model_copy(update={"archive_to": str(added / "inner")})
    elif place == "TMPDIRs":
        monkeypatch.setattr(tempfile, "tempdir", str(added))
    elif place in ("var", "sandbox_root"):
        settings = settings.model_copy(update={place: added / "inner"})
    elif place in (".bashrc", ".config/git/config", ".aws/config"):
        (shells.home / place).parent.mkdir(parents=True, exist_ok=True)
        (shells.home / place).symlink_to(added / "inner")
    elif place == "home":
        profiles["confined"] = profiles["confined"].model_copy(update={"add_dirs": (shells.home,)})
    elif place == "servers":
        (added / "mcp.json").write_text('{"mcpServers": {}}')
        profiles["confined"] = profiles["confined"].model_copy(update={"mcp_config": added / "mcp.json"})
    elif place in ("settings.json", "skills/one"):
        profiles["free"] = FREE.model_copy(update={"setting_sources": ("user",)})
        own = (settings.claude_config_dir or Path()) / place
        own.parent.mkdir(parents=True)
        own.symlink_to(added / "inner")
    else:
        other = CONFINED if place.startswith("./") else FREE
        profiles["other"] = other.model_copy(update={"setting_sources": ("project",)})
        hook = tmp_path / "dot" / "settings.json"
        if place == ".claude":
            hook.parent.mkdir()
            hook.write_text(f'{{"statusLine": {{"type": "command", "command": "{added}/inner/line.sh"}}}}')
        links = SandboxSettings(links={place: hook.parent if place == ".claude" else added / "inner"})
        settings = settings.model_copy(update={"sandbox": links})
    async with running(settings.model_copy(update={"profiles": profiles})) as engine:
        with pytest.raises(SandboxError, match=r"add_dirs.*could so reach"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


async def sockets_without_a_path_are_closed(shells: Shells, engine: Engine) -> None:
    """As of a session bus or an X server, which believe whoever has the same uid."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(444, None, ctypes.c_size_t(0), 1) < 6:
        pytest.skip("Landlock closes them since Linux 6.12")
    with socket.socket(socket.AF_UNIX) as bus:
        bus.bind(f"\0marmalade-{os.getpid()}")
        bus.listen()
        name = f"\\0marmalade-{os.getpid()}"
        tries = f'import socket; s = socket.socket(socket.AF_UNIX); s.connect("{name}"); print("in" * 2)'
        assert "inin" in await shells.run(engine, "free", f"python3 -c '{tries}'")
        said = await shells.run(engine, "confined", f"python3 -c '{tries}'; echo tried")
        assert "not permitted" in said
        assert "inin" not in said


async def the_keys_of_the_session_stay_outside(shells: Shells, engine: Engine) -> None:
    """A Kerberos ticket may be one."""
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(os.uname().machine)
    if numbers is None:
        pytest.skip("the numbers of the calls are not known here")
    add_key, keyctl = numbers
    if libc.syscall(add_key, b"user", b"csp-test", b"marmalade", ctypes.c_size_t(9), SESSION_KEYRING) < 0:
        pytest.skip("this kernel keeps no keys")
    reads = (
        "import ctypes; call = ctypes.CDLL(None).syscall; text = ctypes.create_string_buffer(64); "
        f'key = call({keyctl}, 10, {SESSION_KEYRING}, b"user", b"csp-test", 0); '
        f"call({keyctl}, 11, key, text, 64); print(key, text.value)"
    )
    assert "marmalade" in await shells.run(engine, "free", f"python3 -c '{reads}'")
    assert "-1 b''" in await shells.run(engine, "confined", f"python3 -c '{reads}'")


async def the_keys_of_the_user_stay_outside(shells: Shells, engine: Engine) -> None:
    """Their keyring belongs to the uid in every namespace: who links it to a keyring of their own reads it."""
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(os.uname().machine)
    if numbers is None:
        pytest.skip("the numbers of the calls are not known here")
    add_key, keyctl = numbers
    key = libc.syscall(add_key, b"user", b"csp-test-user", b"marmalade", ctypes.c_size_t(9), USER_KEYRING)
    if key < 0:
        pytest.skip("this kernel keeps no keys")
    keyring = libc.syscall(keyctl, 0, USER_KEYRING, 0)  # its number, as /proc/keys tells it to everybody
    reads = (
        "import ctypes; call = ctypes.CDLL(None).syscall; text = ctypes.create_string_buffer(64); "
        f"call({keyctl}, 8, {keyring}, {PROCESS_KEYRING}); call({keyctl}, 11, {key}, text, 64); print(text.value)"
    )
    try:
        assert "marmalade" in await shells.run(engine, "free", f"python3 -c '{reads}'")
        assert "b''" in await shells.run(engine, "confined", f"python3 -c '{reads}'")
    finally:
        libc.syscall(keyctl, 9, key, USER_KEYRING)


async def the_machines_own_settings_are_read_only(shells: Shells, engine: Engine) -> None:
    """The kernel lets its root write them, in a namespace and without a capability: bubblewrap does not see to that."""
    looks = "find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -print 2>/dev/null | head -5; echo looked"
    if os.getuid() == 0:
        assert "/proc/" in await shells.run(engine, "free", looks)
    said = await shells.run(engine, "confined", looks)
    assert "looked" in said
    assert "/proc" not in said


async def namespaces_within_the_boundary_are_refused(shells: Shells, engine: Engine) -> None:
    tries = "; ".join(f"unshare -{kind} true && echo $((40 + 2))" for kind in ("U", "Ur", "Urm", "Urn", "Urp", "m"))
    bwrap = "bwrap --unshare-user --ro-bind / / true && echo $((40 + 2))"
    said = await shells.run(engine, "confined", f"{tries}; {bwrap}; echo tried")
    assert "tried" in said
    assert "42" not in said


async def the_first_process_within_is_not_written(shells: Shells, engine: Engine) -> None:
    """It is bubblewrap's. Told not to end with its parent, and without its mark, it outlived the CLI and the proxy."""
    tries = "libc.ptrace(16, 1, None, None), libc.process_vm_writev(1, None, 0, None, 0, 0)"
    program = f"import ctypes; libc = ctypes.CDLL(None); print([{tries}]); open('/proc/1/mem', 'r+b')"
    said = await shells.run(engine, "confined", f'python3 -c "{program}" 2>&1')
    assert "[-1, -1]" in said
    assert "Read-only" in said


async def nobody_waits_for_memory_that_is_read(shells: Shells, engine: Engine) -> None:
    """The proxy reads the environment of every process of its user when a CLI with tools ends."""
    number = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)
    if number is None:
        pytest.skip("the number of the call is not known here")
    tries = f'import ctypes; print("fd", ctypes.CDLL(None).syscall({number}, 1))'
    assert "fd -1" not in await shells.run(engine, "free", f"python3 -c '{tries}'")
    assert "fd -1" in await shells.run(engine, "confined", f"python3 -c '{tries}'")


async def nobody_waits_for_a_file_that_is_shown(shells: Shells, engine: Engine) -> None:
    """Who has a lease on a file holds up everybody who opens it, for 45 s each time. It takes no right to write."""
    lease = "import fcntl, os; fcntl.fcntl(os.open('rules/rules.md', 0), 1024, fcntl.F_WRLCK); print('le' + 'ased')"
    assert "leased" in await shells.run(engine, "free", f'python3 -c "{lease}"')
    said = await shells.run(engine, "confined", f'python3 -c "{lease}" 2>&1; echo tried')
    assert "Invalid argument" in said
    assert "tried" in said


async def subvolumes_are_refused(shells: Shells, engine: Engine) -> None:
    """On btrfs a snapshot of a folder that is written (`add_dirs`) shows what a mount in it hides: the store and the
    key, if `var` lies there. An agent with a subvolume of its own could not be deleted."""
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for command in {[0x50009401, 0x5000940E, 0x5000940F, 0x50009417, 0x50009418, 0x4008941A, 0x5000943F]}:\n"
        "    libc.ioctl(os.open('.', 0), ctypes.c_ulong(command), bytes(4096))\n"
        "    print(os.strerror(ctypes.get_errno()))\n"
    )
    sandbox = shells.settings.var / "sandbox" / "agents" / "confined"
    (sandbox / "subvolume.py").write_text(program)
    said = await shells.run(engine, "confined", "python3 subvolume.py 2>&1")
    assert said.count("Operation not permitted") == 7  # on other file systems "Inappropriate ioctl for device"
    assert "cp" in await shells.run(engine, "confined", "cp --reflink=auto subvolume.py copied.py && echo cp")


async def nothing_is_handed_to_the_proxy(shells: Shells, engine: Engine) -> None:
    """It would close a descriptor while it reads: a TCP socket that lingers then blocks the event loop, for as long as
    the sender chose."""
    numbers = {"x86_64": (434, 438), "aarch64": (434, 438)}.get(os.uname().machine)
    if numbers is None:
        pytest.skip("the numbers of the calls are not known here")
    program = (
        "import array, ctypes, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for number in range(3):\n"
        f"    theirs = libc.syscall({numbers[1]}, libc.syscall({numbers[0]}, 2, 0), number, 0)\n"
        "    assert theirs >= 0, ctypes.get_errno()\n"
        "    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))\n"
        "    try:\n"
        "        socket.socket(fileno=theirs).sendmsg([b' '], [rights])\n"
        "        print(number, 'se' + 'nt')\n"
        "    except OSError as exc:\n"
        "        print(number, 're' + 'fused')\n"
    )
    sandbox = shells.settings.var / "sandbox" / "agents" / "confined"
    (sandbox / "hands.py").write_text(program)
    said = await shells.run(engine, "confined", "python3 hands.py 2>&1")
    assert said.count("refused") == 3
    assert "sent" not in said


async def nothing_that_crashes_is_kept_outside(shells: Shells, engine: Engine) -> None:
    """A limit of 0 does not keep the kernel from starting a handler, which runs outside. A limit of 1 does."""
    tries = (
        "ulimit -c 0; prlimit --pid=$$ --core=0:0; ulimit -n 100; echo 55 > /proc/self/coredump_filter; "
        "sh -c 'grep -e core -e open /proc/self/limits; cat /proc/self/coredump_filter'; ulimit -Hc && echo read"
    )
    said = " ".join((await shells.run(engine, "confined", tries)).split())
    assert "Max core file size 1 1 bytes" in said
    assert "Max open files 100 100 files" in said
    assert "00000000" in said
    assert "read" in said


async def it_ends_before_the_proxy_if_there_is_no_memory(shells: Shells, engine: Engine) -> None:
    tries = "cat /proc/1/oom_score_adj /proc/self/oom_score_adj; choom -n 0 -p $$; echo tried"
    said = await shells.run(engine, "confined", tries)
    assert f"{FIRST_TO_END}\n{FIRST_TO_END}\n" in said
    assert "Read-only" in said
    assert "tried" in said


LOOKS = (
    the_keys_of_the_session_stay_outside, the_keys_of_the_user_stay_outside, sockets_without_a_path_are_closed,
    the_machines_own_settings_are_read_only,
    namespaces_within_the_boundary_are_refused, the_first_process_within_is_not_written,
    nobody_waits_for_memory_that_is_read, nobody_waits_for_a_file_that_is_shown, subvolumes_are_refused,
    nothing_is_handed_to_the_proxy,
    nothing_that_crashes_is_kept_outside, it_ends_before_the_proxy_if_there_is_no_memory,
)  # fmt: skip


async def test_what_a_confined_shell_does_not_reach(shells: Shells, subtests: pytest.Subtests) -> None:
    """All in one life of the CLIs: none of them leaves anything behind."""
    async with running(shells.settings) as engine:
        for look in LOOKS:
            with subtests.test(look.__name__):
                await look(shells, engine)


async def test_a_home_that_a_link_leads_to_in_a_folder_of_software_is_hidden(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    software = tmp_path / "software"
    real = software / "var"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    monkeypatch.setattr(confine, "SYSTEM", (*confine.SYSTEM, str(software)))
    settings = shells.settings.model_copy(update={"var": tmp_path / "link"})
    async with running(settings) as engine:
        said = await shells.run(engine, "confined", f"ls {software} {real}; cat {real}/chains.sqlite3; echo looked")
        assert "var" in said
        assert "looked" in said
        assert "SQLite" not in said


@pytest.mark.full
async def test_other_sessions_are_hidden_where_a_shown_folder_holds_what_the_config_dir_leads_to(
    shells: Shells, tmp_path: Path
) -> None:
    real = shells.shared / "config"
    real.mkdir()
    (tmp_path / "config-link").symlink_to(real)
    settings = shells.settings.model_copy(update={"claude_config_dir": tmp_path / "config-link"})
    async with running(settings) as engine:
        await ask(engine, "remember the word is marmalade", agent="other")
        looks = f"grep -rlo marmalade {shells.shared} rules/; ls {shells.shared}; echo looked"
        assert ".jsonl" in await shells.run(engine, "free", looks)
        said = await shells.run(engine, "confined", looks)
        assert "rules.md" in said
        assert "looked" in said
        assert ".jsonl" not in said


async def test_a_fork_bomb_is_bounded(shells: Shells) -> None:
    """The kernel does not count root's processes: the bomb itself is of another user."""
    async with running(shells.settings) as engine:
        assert f"{confine.MOST_TASKS}" in await shells.run(engine, "confined", "ulimit -u")
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    bomb = f"for i in $(seq 500); do sleep {MARK} & done"
    boundary = (confine.PROGRAM, *confine.BOUNDARY, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--")
    done = await asyncio.to_thread(
        subprocess.run,
        (*become, *boundary, "prlimit", "--nproc=64", "--", "sh", "-c", bomb),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Cannot fork" in done.stderr
    assert not [one for one in psutil.process_iter(["cmdline"]) if MARK in (one.info["cmdline"] or [])]


async def test_an_agent_leaves_half_of_all_processes_to_others(shells: Shells, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 2,048 are all that the user or the container may have, no other agent's CLI could be started; where fewer
    are allowed, no confined one at all."""
    monkeypatch.setattr(confine, "tasks", lambda: 1500)
    async with running(shells.settings) as engine:
        assert "750" in await shells.run(engine, "confined", "ulimit -Hu")


async def test_a_link_in_the_place_of_a_transcript_brings_nobody_elses_words(shells: Shells) -> None:
    config = shells.settings.claude_config_dir
    assert config is not None
    async with running(shells.settings) as engine:
        await ask(engine, "remember the word is marmalade", agent="other")
        [theirs] = config.glob("projects/*-other/*.jsonl")
        await shells.run(engine, "confined", "true")
        [mine] = config.glob("projects/*-confined/*.jsonl")
        # Left behind by a shell: the CLI itself still writes, to the file that it has opened.
        await shells.run(engine, "confined", f"mv {mine} {mine}.old; ln -s {theirs} {mine}; echo linked")
    before = theirs.read_bytes()
    async with running(shells.settings) as engine:
        await shells.run(engine, "confined", "echo here")
        await ask(engine, "recall", agent="confined", profile="confined")
    assert not any("marmalade" in str(one.messages) for one in shells.upstream.requests[1:])
    assert theirs.read_bytes() == before
    assert theirs.is_file()
    assert not theirs.is_symlink()


async def test_a_script_that_starts_the_cli_is_asked_nothing_where_a_confined_agent_writes(
    shells: Shells, tmp_path: Path
) -> None:
    """asdf and its like run what a file in the directory names; the CLI's version is asked for without a boundary."""
    ran, real = tmp_path / "ran", await asyncio.to_thread(os.path.realpath, shells.settings.claude_bin or "")
    (tmp_path / "shims").mkdir()
    script = tmp_path / "shims" / "claude"
    script.write_text(f'#!/bin/sh\n[ -x ./chosen ] && exec ./chosen "$@"\nexec {real} "$@"\n')
    script.chmod(0o755)
    links = SandboxSettings(links={"real": Path(real)})
    settings = shells.settings.model_copy(update={"claude_bin": script, "sandbox": links})
    plants = f"printf '#!/bin/sh\\ntouch {ran}\\nexec {real} \"$@\"\\n' > chosen; chmod +x chosen; echo planted"
    for _ in range(2):
        async with running(settings) as engine:
            assert "planted" in await shells.run(engine, "confined", plants)
        os.utime(script, (1, 1))  # a new one: it is asked again
        assert not ran.exists()


@pytest.mark.full
async def test_a_summary_of_a_confined_agent_stays_within_its_boundary_which_is_nobody_elses(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Launch] = []
    spawn = ClaudeProcess.spawn

    async def seen(launch: Launch, *given: Any) -> ClaudeProcess:
        started.append(launch)
        return await spawn(launch, *given)

    monkeypatch.setattr(ClaudeProcess, "spawn", seen)
    named: list[str] = []
    turn = ClaudeProcess.turn

    async def names_another(process: ClaudeProcess, *given: Any) -> AsyncGenerator[CliEvent, None]:
        """As an agent's program can in its CLI's place."""
        async for event in turn(process, *given):
            if process.launch.system_prompt == summaries.SYSTEM:
                process.session_id = named[0]
            yield event

    monkeypatch.setattr(ClaudeProcess, "turn", names_another)
    summed: list[str] = []

    def behave(request: Seen) -> Reply | Fail:
        if summaries.ASK in request.prompt:
            summed.append(request.prompt)
            return Reply("they talked")
        too_long = "the last" in request.prompt and not summed
        return TOO_LONG if too_long else Reply("well")

    settings = shells.settings.model_copy(update={"spares": 1})
    async with running(settings) as engine:
        session_id = (await ask(engine, "hello", agent="other", profile="confined")).session_id
        assert session_id is not None
        named.append(session_id)
        theirs = claude(engine).pool.peek(session_id)
        for said in ("one", "two", "three"):
            await ask(engine, said, agent="confined", profile="confined")
        shells.upstream.behave = behave
        shells.upstream.when(
            ASKS_FOR_SUMMARY, Fail(400, message="prompt is too long: 2 tokens > 1 maximum"), times=None
        )
        assert text(await ask(engine, "the last", agent="confined", profile="confined")) == "well"
        assert summed
        assert theirs is not None
        assert claude(engine).pool.peek(session_id) is theirs
        assert [launch.kind for launch in started if launch.wrapper is not None] == [None] * len(started)
        assert claude(engine).pool._newest is None  # what is started ahead is like that


async def test_programs_that_are_found_by_a_link_in_a_folder_that_is_written_are_not_written_from_inside(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name nor what it leads to lies there: only the link between them."""
    project = tmp_path / "project"
    (tmp_path / "tools" / "bin").mkdir(parents=True)
    project.mkdir()
    (project / "tools").symlink_to(tmp_path / "tools")
    (tmp_path / "opt").symlink_to(project / "tools")
    monkeypatch.setenv("PATH", f"{tmp_path}/opt/bin:{os.environ['PATH']}")
    async with running(with_profile(shells.settings, add_dirs=(project,))) as engine:
        with pytest.raises(SandboxError, match=r"add_dirs.* PATH"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


@pytest.mark.parametrize(
    "place", ["a folder of modules", "where serve was started", "a path of Python's", "the user's own modules"]
)
async def test_what_this_program_reads_later_is_not_written_from_inside(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Modules are imported when they are needed first, and settings in the working directory at the next start."""
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    settings = with_profile(shells.settings, add_dirs=(project,))
    if place == "a folder of modules":
        monkeypatch.syspath_prepend(project / "lib")
    elif place == "the user's own modules":  # Python reads them at its start, once that folder is there
        monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
        monkeypatch.setattr(site, "USER_SITE", str(project / "lib" / "site-packages"))
    else:
        monkeypatch.chdir(project)
    if place == "a path of Python's":  # as in an interactive one
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        settings = settings.model_copy(update={"config": tmp_path / "named.toml"})
    async with running(settings) as engine:
        with pytest.raises(SandboxError, match=r"add_dirs.* \((this program|a file of settings)\)"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


@pytest.mark.full
async def test_an_agent_that_was_confined_stays_so_on_another_host_that_sees_its_directory(
    shells: Shells, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    old = required(ROOT / ".tools" / "claude-2.1.71" / "node_modules" / ".bin" / "claude", "make tools")
    settings = shells.settings.model_copy(
        update={"claude_bin": old, "cli_retries": 0, "sandbox_root": tmp_path / "shared-root"}
    )
    async with running(settings) as engine:
        plants = f"git init -q . && git config core.fsmonitor 'touch {ran}; false' && echo planted"
        assert "planted" in await shells.run(engine, "confined", plants)
    shutil.rmtree(settings.var / "confined")  # of another host's `var`
    async with running(settings) as engine:
        await ask(engine, "hello", agent="confined")
    assert not ran.exists()


async def test_nobody_is_told_to_go_on_by_hand_where_a_confined_agent_wrote(shells: Shells) -> None:
    """A CLI of theirs would run there without a boundary."""
    async with running(shells.settings) as engine:
        for name, profile in (("confined", "confined"), ("other", "free")):
            turn = await ask(engine, "hello", agent=name, profile=profile)
            agent = await engine.store.agent("local", name)
            assert agent is not None
            found = await verifying.compare(
                verifying.Verifier(shells.settings, engine.store), engine.store, agent, turn
            )
            shown = finding._place(shells.settings, agent, turn.session_id)
            assert (found.by_hand is None, shown["by_hand"] is None) == (profile == "confined",) * 2


async def test_a_confined_agent_that_names_another_session_as_its_own_is_not_given_its_folder(
    shells: Shells, tmp_path: Path
) -> None:
    """In its CLI's place. An agent that `adopt` made knows the id of a session of the user's: it is named so."""
    config, theirs = shells.settings.claude_config_dir, str(uuid.uuid4())
    assert config is not None
    victim = config / "projects" / "-home-of-the-user" / f"{theirs}.jsonl"
    victim.parent.mkdir(parents=True)
    victim.write_text("marmalade\n")
    later = time.time() + 60  # it is in use
    os.utime(victim, (later, later))
    real = await asyncio.to_thread(os.path.realpath, shells.settings.claude_bin or "")
    script = tmp_path / "claude-that-is-spoken-for"
    names = f's/"session_id":"[^"]*"/"session_id":"{theirs}"/'
    script.write_text(f'#!/bin/sh\n{real} "$@" | sed -u \'/"type":"result"/{names}\'\n')
    script.chmod(0o755)
    links = SandboxSettings(links={"real": Path(real)})
    settings = shells.settings.model_copy(update={"claude_bin": script, "sandbox": links})
    for _ in range(2):
        async with running(settings) as engine:
            said = await shells.run(engine, "confined", f"cat {victim} 2>/dev/null; ls {config}/projects; echo looked")
            assert "looked" in said
            assert "marmalade" not in said
            assert "-home-of-the-user" not in said
    assert victim.read_text() == "marmalade\n"
    assert not [*(settings.var / "projects").glob("*")]


@pytest.mark.full
async def test_a_confined_agent_that_names_another_agents_session_ends_nothing_of_that_agents(shells: Shells) -> None:
    """In its CLI's place. Its turn ended the other one's running process, and so failed its turn."""
    waits = "touch begun; until [ -e stop ]; do sleep 0.05; done; echo do''ne"
    shells.upstream.when("wait", ToolUse([("Bash", {"command": waits})]))
    profile = {"agent": "other", "profile": "confined"}
    sandbox = shells.settings.var / "sandbox" / "agents" / "other"
    async with running(shells.settings) as engine:
        session_id = (await ask(engine, "remember a = 1", **profile)).session_id
        assert session_id is not None
        waiting = asyncio.create_task(ask(engine, "wait", **profile))
        await until((sandbox / "begun").exists)
        theirs = claude(engine).pool.peek(session_id)
        frame = json.dumps({"type": "system", "subtype": "init", "session_id": session_id, "uuid": "forged"})
        with pytest.raises(ProxyError, match="another agent's session"):
            await shells.run(engine, "confined", f"echo '{frame}' > /proc/2/fd/1; until [ -e never ]; do sleep 1; done")
        assert claude(engine).pool.peek(session_id) is theirs
        (sandbox / "stop").touch()
        turn = await waiting
        assert "done" in text(turn)
        assert len(turn.attempts) == 1


async def test_nothing_that_a_confined_shell_put_anywhere_outlives_its_agent(shells: Shells) -> None:
    """Deep folders beside its sessions and among its CLI's notes, which an agent of its name would be told of."""
    config = shells.settings.claude_config_dir
    assert config is not None
    deep = "import os\nfor _ in range(3000): os.mkdir('deep'); os.chdir('deep')"
    puts = f'(echo word > left; python3 -c "{deep}")'
    puts = f"cd {config}/projects/*/; {puts}; cd memory; {puts}; echo put"
    async with running(shells.settings) as engine:
        assert "put" in await shells.run(engine, "confined", puts)
        assert [*config.glob("projects/*/left")]
        assert await engine.delete("local", "confined")
    assert not [*config.glob("projects/*")]


async def test_a_folder_of_sessions_that_was_noted_is_not_bound_in(shells: Shells) -> None:
    """Before it was confined, a CLI of its wrote where others' sessions are."""
    config, settings = shells.settings.claude_config_dir, shells.settings
    assert config is not None
    theirs = config / "projects" / "shared"
    async with running(settings) as engine:
        await ask(engine, "remember a = 1", agent="confined", profile="free")
        [mine] = config.glob("projects/*/*.jsonl")
        theirs.mkdir()
        (theirs / f"{uuid.uuid4()}.jsonl").write_text("marmalade\n")
    mine.rename(theirs / mine.name)
    boxes = Sandboxes(settings)
    known, cwd = Projects(settings, boxes, config), boxes.path("confined")
    assert known.written(cwd, known.path(cwd, mine.stem), 0.0).parent == theirs
    async with running(settings) as engine:
        said = await shells.run(engine, "confined", f"cat {theirs}/*; ls {config}/projects; echo looked")
        assert "looked" in said
        assert "marmalade" not in said
        assert "shared" not in said.replace(str(theirs), "").replace(str(shells.shared), "")
        turn = await ask(engine, "recall", agent="confined", profile="confined")
        assert "a is 1" in text(turn)


async def test_what_is_kept_of_a_confined_agents_files_has_a_bound(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read with the path: 240 MB in each of three turns took the proxy 2 GB when the CLI was started again."""
    monkeypatch.setattr(files, "MAX_TOTAL", 5000)
    puts = "cd $CLAUDE_CONFIG_DIR/projects/*/; for at in *.jsonl; do mkdir -p ${at%.jsonl}; "
    async with running(shells.settings) as engine:
        await shells.run(engine, "confined", "true")
        for name in ("one", "two", "three"):
            puts_it = f"head -c 2000 /dev/zero > ${{at%.jsonl}}/{name}; done; echo put"
            assert "put" in await shells.run(engine, "confined", puts + puts_it)
        agent = await engine.store.agent("local", "confined")
        assert agent is not None
        assert agent.head is not None
        kept = "".join(record.line for record in await engine.store.records(agent.head) if files.is_file(record))
    assert [f'/{name}","data' in kept for name in ("one", "two", "three")] == [True, True, False]


async def test_a_confined_agent_that_stops_its_cli_does_not_degrade_it_for_others(
    shells: Shells, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = shells.settings.var / "sandbox" / "agents" / "confined"
    waits = "(until [ -e stop ]; do sleep 0.05; done; kill -STOP $PPID; touch stopped) > /dev/null 2>&1 &"
    shells.upstream.when("wait", ToolUse([("Bash", {"command": f"{waits} echo waits"})]))
    async with running(shells.settings) as engine:
        told = {"agent": "confined", "profile": "confined"}
        assert "waits" in text(await ask(engine, "wait", system="Be one.", **told))
        (sandbox / "stop").touch()
        await until((sandbox / "stopped").exists)
        (stopped,) = [one.pid for one in claude(engine).processes()]
        with monkeypatch.context() as patch:
            patch.setattr(process, "ANSWER_WAIT", 1.0)
            answer = asyncio.create_task(ask(engine, "and now?", system="Be another one.", **told))
            await until(lambda: stopped not in [one.pid for one in claude(engine).processes()])
        await answer  # of another process, which may take its time to start
        assert shells.upstream.requests[-1].user_texts()[-1] == "and now?"
    assert [event for event in events(caplog) if event["event"] == "claude_degraded"] == []


@pytest.mark.parametrize("when", ["in a turn", "before its first word"])
@pytest.mark.sample(1)
async def test_what_a_confined_agent_says_in_its_clis_place_takes_no_option_from_others(
    shells: Shells, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Without this option a system prompt stands in the command line, which other users of the machine read."""
    says = "echo \"error: unknown option '--system-prompt-file'\" > /proc/2/fd/2; kill -9 2"
    settings = with_profile(shells.settings, setting_sources=("project",))
    async with running(settings) as engine:
        await shells.run(engine, "confined", "mkdir .claude")
    if when == "before its first word":  # as a shell there can
        planted = settings.var / "sandbox" / "agents" / "confined" / ".claude" / "settings.json"
        planted.write_text(json.dumps({"apiKeyHelper": says}))
    async with running(settings) as engine:
        with pytest.raises(ProxyError, match="does not know --system-prompt-file"):
            await shells.run(engine, "confined", says)
        assert text(await ask(engine, "hello", agent="other"))
    assert not {"claude_option_refused", "claude_degraded"} & {str(event["event"]) for event in events(caplog)}


@pytest.mark.full
async def test_what_is_said_in_the_place_of_a_summarys_cli_takes_no_option_from_others_either(
    shells: Shells, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts in the agent's directory, where a script that starts the CLI may run what the agent left there."""
    real = await asyncio.to_thread(os.path.realpath, shells.settings.claude_bin or "")
    script = tmp_path / "claude-by-a-script"
    script.write_text(f'#!/bin/sh\n[ -f ./says ] && exec sh ./says\nexec {real} "$@"\n')
    script.chmod(0o755)
    links = SandboxSettings(links={"real": Path(real)})
    settings = shells.settings.model_copy(update={"claude_bin": script, "sandbox": links})
    says = "error: unknown option \\'--system-prompt-file\\'"
    async with running(settings) as engine:
        await ask(engine, "one", agent="confined", profile="confined")
        await shells.run(engine, "confined", f"echo echo {says!r} '>&2' > says; echo exit 1 >> says")
        for said in (ASKS_FOR_SUMMARY, "the last"):
            too_long = Fail(400, message="prompt is too long: 2 tokens > 1 maximum")
            shells.upstream.when(said, too_long, times=None)
        with pytest.raises(ProxyError):
            await ask(engine, "the last", agent="confined", profile="confined")
        assert text(await ask(engine, "hello", agent="other"))
    assert not {"claude_option_refused", "claude_degraded"} & {str(event["event"]) for event in events(caplog)}


async def leaves_running(shells: Shells, engine: Engine, program: str, told: str = "") -> Path:
    """A Python program that outlives the turn of the confined agent; it is told the CLI's pid, and this. The agent's
    folder."""
    sandbox = shells.settings.var / "sandbox" / "agents" / "confined"
    await shells.run(engine, "confined", "true")
    (sandbox / "left.py").write_text(program)
    starts = f"(setsid python3 left.py $PPID {told} > why 2>&1 &) ; echo left"
    assert "left" in await shells.run(engine, "confined", starts)
    return sandbox


# Shows an environment of two gigabytes, which take no memory: nothing was ever written there.
LONG_ENVIRONMENT = """
import ctypes, mmap, os, struct, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
size = 2 << 30
at = libc.mmap(None, ctypes.c_size_t(size), 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, ctypes.c_long(0))
end = libc.sbrk(0)
told = struct.pack("12QII", 1 << 20, 2 << 20, 3 << 20, 4 << 20, end, end, at, at, at, at, at + size, 0, 0, 2**32 - 1)
assert libc.prctl(35, 14, told, ctypes.c_ulong(len(told)), 0) == 0, ctypes.get_errno()  # PR_SET_MM, PR_SET_MM_MAP
open("long", "w").close()
time.sleep(600)
"""


async def test_an_environment_without_an_end_does_not_fill_the_proxy(shells: Shells) -> None:
    """It is read of every process of this user when a CLI with tools ends."""
    async with running(shells.settings) as engine:
        sandbox = await leaves_running(shells, engine, LONG_ENVIRONMENT)
        await until((sandbox / "long").exists)
        before = psutil.Process().memory_info().rss
        highest = await asyncio.to_thread(_highest_while, lambda: sweep("nobody"))
        assert highest - before < 200 * 1024**2
        await shells.run(engine, "free", "true")


def _highest_while(work: Callable[[], object]) -> int:
    """Bytes of this process's memory, at most, while that is done."""
    seen = [0]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            seen.append(psutil.Process().memory_info().rss)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        done.set()
        looking.join()
    return max(seen)


# Exchanges a folder above a mount for a link to where that folder really is, again and again.
FLIPS = """
import ctypes, os, pathlib, sys
libc = ctypes.CDLL(None, use_errno=True)
top = os.fsencode(pathlib.Path(*pathlib.Path(sys.argv[2]).parts[:3]))
os.symlink(top, "/tmp/link")
open("flipping", "w").close()
while libc.renameat2(-100, top, -100, b"/tmp/link", 2) == 0:  # AT_FDCWD, RENAME_EXCHANGE
    pass
"""


async def test_the_memory_of_what_runs_inside_is_not_read_when_another_cli_ends(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 programs that change the protection of 16 GiB without end held up every reader of their environment for
    minutes: no CLI with tools ended, and no other agent got a place."""
    read: list[str] = []

    def noted(path: str, mode: Literal["rb"]) -> IO[bytes]:
        read.append(path)
        return open(path, mode)

    async with running(shells.settings) as engine:
        await shells.run(engine, "confined", f"(setsid sleep {MARK} > /dev/null 2>&1 &); echo left")

        def sleeping() -> list[psutil.Process]:
            return [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[-1:] == [MARK]]

        (left,) = await until(sleeping)
        first = left
        while (above := first.parent()) is not None and "bwrap" not in first.name():
            first = above
        monkeypatch.setattr(guardian_program, "open", noted, raising=False)
        sweep("nobody's mark")
        assert f"/proc/{left.pid}/environ" not in read
        assert f"/proc/{first.pid}/environ" in read
        assert guardian_program.mark_of(first)


@pytest.mark.full
async def test_a_link_in_the_way_of_a_measurement_does_not_weigh_the_machines_disk(shells: Shells) -> None:
    """Beyond `max_memory` other agents' processes were ended, and none could be started."""
    if not shells.settings.var.is_relative_to("/tmp"):
        pytest.skip("the agent can move no folder above a mount")
    async with running(shells.settings) as engine:
        sandbox = await leaves_running(shells, engine, FLIPS, str(shells.settings.var))
        await until((sandbox / "flipping").exists)
        [one] = claude(engine).processes()
        weighed = [(await asyncio.to_thread(memory.weigh, [one.pid]))[one.pid] for _ in range(60)]
        assert (sandbox / "why").read_text() == ""
    assert max(weighed) < 2_000_000_000


# Calls of a tool of the client's that no model made, each with a name of a megabyte, over the CLI's own output.
CALLS = """
import ctypes, json, os, select, sys, time
while not os.path.exists("go"):
    time.sleep(0.05)
libc = ctypes.CDLL(None, use_errno=True)
out = libc.syscall(438, libc.syscall(434, int(sys.argv[1]), 0), 1, 0)  # pidfd_getfd of pidfd_open
assert out >= 0, ctypes.get_errno()
for number in range(200):
    params = {"_meta": {"claudecode/toolUseId": f"{number}" + "x" * 1_000_000}}
    message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
    request = {"subtype": "mcp_message", "server_name": "client", "message": message}
    line = json.dumps({"type": "control_request", "request_id": f"r{number}", "request": request}) + "\\n"
    data = line.encode()
    while data:
        select.select([], [out], [])
        data = data[os.write(out, data):]
open("said", "w").close()
time.sleep(600)
"""


async def test_calls_that_a_shell_makes_up_between_turns_are_not_kept(shells: Shells) -> None:
    async with running(shells.settings) as engine:
        sandbox = await leaves_running(shells, engine, CALLS)
        before = psutil.Process().memory_info().rss
        (sandbox / "go").touch()
        await until((sandbox / "said").exists)
        assert psutil.Process().memory_info().rss - before < 100 * 1024**2
        assert "still" in await shells.run(engine, "confined", "echo still")


# One call of a sub-agent's, whose name is long, and results that nobody keeps.
FRAMES = """
import ctypes, json, os, select, sys
libc = ctypes.CDLL(None, use_errno=True)
out = libc.syscall(438, libc.syscall(434, int(sys.argv[1]), 0), 1, 0)  # pidfd_getfd of pidfd_open
calls = [{"type": "tool_use", "id": f"t{n}", "name": "x", "input": {}} for n in range(60)]
result = {"type": "tool_result", "tool_use_id": "t0", "content": "x" * 900_000}
retry = {"retry_delay_ms": 10**400, "error": "unknown"}
for number, frame in enumerate((
    {"type": "assistant", "parent_tool_use_id": "p" * 1_000_000, "message": {"content": calls}},
    *[{"type": "user", "message": {"content": [result]}}] * 4,
    {"type": "system", "subtype": "api_retry", **retry},
)):
    data = json.dumps({**frame, "uuid": f"u{number}"}).encode() + b"\\n"
    while data:
        select.select([], [out], [])
        data = data[os.write(out, data):]
open("said", "w").close()
while not os.path.exists("go"):
    pass
"""


async def test_what_a_shell_says_in_its_clis_place_is_stored_with_a_bound_and_shown_to_others(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of 10 MB became 600 MB at the commit, which held everybody up for 20 s; the delay broke the overview."""
    monkeypatch.setattr(attempt, "MOST_TOOL_TEXT", 2_000_000)
    async with running(shells.settings) as engine:
        await shells.run(engine, "confined", "true")
        sandbox = shells.settings.var / "sandbox" / "agents" / "confined"
        (sandbox / "left.py").write_text(FRAMES)
        saying = asyncio.create_task(shells.run(engine, "confined", "python3 left.py $PPID && echo left"))
        await until((sandbox / "said").exists)
        await until(lambda: engine.progress()[0].doing == "retry")
        assert "is repeated" in feed.progress(engine.progress())[0]["says"]
        (sandbox / "go").touch()
        assert "left" in await saying
        agent = await engine.store.agent("local", "confined")
        assert agent is not None
        assert agent.head is not None
        turn = await engine.store.turn(agent.head)
        assert turn is not None
        assert len([one for one in turn.tools if one.get("parent_tool_use_id")]) == 60
        assert [len(one.get("content", "")) for one in turn.tools if one.get("tool_use_id") == "t0"] == [
            900_000,
            0,
            0,
            0,
        ]


async def test_a_conversation_that_a_shell_filled_up_is_refused_and_others_are_shown(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six turns left 850 MB of records: each further one took 3 GB and held everybody up for 3 s."""
    async with running(shells.settings) as engine:
        assert "filled" in await shells.run(engine, "confined", "printf %09000d 0 && echo filled")
    monkeypatch.setattr(reading, "MOST_OF_A_PATH", 9000)
    async with running(shells.settings) as engine:
        with pytest.raises(ContextTooLong, match="rewind"):
            await shells.run(engine, "confined", "true")
        agent = await engine.store.agent("local", "confined")
        assert agent is not None
        assert agent.head is not None
        turn = await engine.store.turn(agent.head)
        assert turn is not None
        assert await engine.backend.request_of(turn) is None
        await ask(engine, "hello", agent="other")
    found = {
        one.agent_id: [fault.kind for fault in one.differences] for one in await verify(shells.settings, None, None)
    }
    assert found == {"confined": ["chain"], "other": []}


async def test_a_shell_that_speaks_without_end_between_turns_ends_its_cli_alone(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept a processor busy for as long as its CLI waited."""
    monkeypatch.setattr(frames, "MOST_OF_A_TURN", 20_000_000)
    async with running(shells.settings) as engine:
        sandbox = await leaves_running(shells, engine, CALLS)
        assert claude(engine).processes()
        (sandbox / "go").touch()
        await until(lambda: not claude(engine).processes())
        assert not (sandbox / "said").exists()
        assert "still" in await shells.run(engine, "confined", "echo still")


@pytest.mark.timeout(120)
async def test_a_transcript_that_leads_in_a_circle_holds_nobody_up(shells: Shells) -> None:
    """What a turn added is read on the event loop where it is short."""
    made_up = {"role": "assistant", "model": "<synthetic>", "content": [{"type": "text", "text": "x"}]}
    lines = (
        {"type": "assistant", "uuid": "circle", "parentUuid": "circle", "message": made_up},
        {"type": "user", "uuid": "prompt", "parentUuid": "circle", "message": {"role": "user", "content": "x"}},
    )
    written = " ".join(f"'{json.dumps(line)}'" for line in lines)
    async with running(shells.settings) as engine:
        await shells.run(engine, "confined", "true")
        said = await shells.run(
            engine, "confined", f"printf '%s\\n' {written} >> $(ls $CLAUDE_CONFIG_DIR/projects/*/*.jsonl) && echo wrote"
        )
        assert "wrote" in said
        assert "here" in await shells.run(engine, "confined", "echo here")


async def test_the_event_loop_looks_for_no_file_where_a_confined_agent_writes(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that lists a folder into memory whose protection 200 threads change holds up whoever makes or looks
    for a file there: a `stat` took 32 s, and the whole proxy 66 s."""
    loop, seen = threading.current_thread(), set[str]()

    def noted(name: str) -> None:
        call = getattr(os, name)

        def calling(path: Any, *more: Any, **options: Any) -> Any:
            if threading.current_thread() is loop and isinstance(path, str | Path):
                seen.update(
                    f"{name} {path}" for place in written if Path(path).is_relative_to(place) and Path(path) != place
                )
            return call(path, *more, **options)

        monkeypatch.setattr(os, name, calling)

    settings = shells.settings
    assert settings.claude_config_dir is not None
    places = Sandboxes(settings)
    written = [places.tmpdir("confined"), places.path("confined"), places.private("confined")]
    said: list[str] = []
    async with running(settings) as engine:
        for name in ("lstat", "stat", "open", "unlink", "mkdir", "scandir", "replace", "access"):
            noted(name)
        for words in ("one", "two", "three"):
            turn = await ask(engine, *said, words, agent="confined", profile="confined", system=f"marmalade {words}")
            said += [words, text(turn)]
            written += settings.claude_config_dir.glob("projects/*")
            assert "marmalade" in str(shells.upstream.requests[-1].body)
        for words in ("another two", "another three"):  # of other branches
            await ask(engine, *said[:2], words, agent="confined", profile="confined", system="marmalade")
        agent = await engine.store.agent("local", "confined")
        assert agent is not None
        assert await claude(engine).adoptable(agent, turn) is None
    assert not seen
