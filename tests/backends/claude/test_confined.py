"""A confined profile: what an agent's shell can reach, seen with the real CLI and a model that calls its shell.

The same commands without the boundary show that each check can fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from pydantic import SecretStr

from cli_session_proxy.backends.claude.process import confine, environment
from cli_session_proxy.backends.claude.process import login as logins
from cli_session_proxy.backends.claude.process.memory import size, weigh
from cli_session_proxy.backends.claude.transcript import Projects
from cli_session_proxy.commands.prerequisites import report
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ClaudeUnavailable, ConfigError, ProxyError, SandboxError
from cli_session_proxy.http.keys import make_key
from cli_session_proxy.http.server import serve
from cli_session_proxy.http.watchdog import Watchdog
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import ModelSettings, Profile, SandboxSettings, Settings
from cli_session_proxy.stores.sqlite.store import FILE
from turnfault.provider.script import Fail, ToolUse
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings, required
from ...files import opened_files
from ...outputs import output_of
from ...talking import ask, heard, running, text
from ...until import PATIENCE, until
from .process.helpers import free_descriptors

# A program's argument that no other run of this test has.
MARK = f"86399.{os.getpid()}"
FREE = Profile(tools=("Bash",), permission_mode="bypassPermissions")
CONFINED = Profile(tools=("Bash",), permission_mode="bypassPermissions", confined=True)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bubblewrap is Linux's")


@pytest.fixture(scope="module", autouse=True)
def bubblewrap() -> None:
    found = shutil.which(confine.PROGRAM)
    required(Path(found) if found else None, "apt install bubblewrap", what="bubblewrap")


class Shells:
    """Settings with a profile of each kind, and what a shell of an agent prints."""

    def __init__(self, make_settings: MakeSettings, claude: Path, tmp_path: Path, upstream: Upstream) -> None:
        self.upstream = upstream
        self.shared = tmp_path / "shared"
        self.shared.mkdir()
        (self.shared / "rules.md").write_text("be kind")
        self.home = tmp_path / "home"
        (self.home / "private").write_text("the secret of a home")
        links = SandboxSettings(links={"rules": self.shared})
        # bypassPermissions is refused to root but in a sandbox; the CLI is told that it is in one
        env = make_settings().claude_env | {"IS_SANDBOX": "1"}
        profiles = {"free": FREE, "confined": CONFINED}
        self.settings = make_settings(claude_bin=claude, claude_env=env, profiles=profiles, sandbox=links)
        self.number = 0

    async def run(self, engine: Engine, profile: str, command: str) -> str:
        self.number += 1
        key = f"run number {self.number}"
        self.upstream.when(key, ToolUse([("Bash", {"command": command})]))
        return text(await ask(engine, key, agent=profile, profile=profile))


@pytest.fixture
def shells(make_settings: MakeSettings, claude_2: Path, tmp_path: Path, upstream: Upstream) -> Shells:
    return Shells(make_settings, claude_2, tmp_path, upstream)


async def test_a_confined_shell_sees_neither_the_store_nor_a_home_nor_other_agents(shells: Shells) -> None:
    settings = shells.settings
    make_key(settings.var)
    async with running(settings) as engine:
        await ask(engine, "remember the word is marmalade", agent="other")
        [transcript] = (settings.claude_config_dir or Path()).glob("projects/*-other/*.jsonl")
        for path, words in (
            (settings.var / FILE, "marmalade"), (settings.var / "key", "csp-"), (transcript, "marmalade"),
            (shells.home / "private", "the secret of a home"),
        ):  # fmt: skip
            command = f"grep -a -o -m1 -e {words.split()[0]} {path} {path}-wal 2>/dev/null; echo looked"
            assert words.split()[0] in await shells.run(engine, "free", command)
            said = await shells.run(engine, "confined", command)
            assert words.split()[0] not in said
            assert "looked" in said
        listed = await shells.run(engine, "confined", f"ls -A {settings.var} {settings.var}/sandbox/agents; ls -A ~")
        assert "other" not in listed
        assert FILE not in listed
        assert "private" not in listed


async def test_a_confined_shell_is_shown_no_folder_with_a_file_that_settings_name_as_secret(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie where a link's target and `add_dirs` would be shown."""
    added = shells.shared.parent / "added"
    (shells.shared / "deep").mkdir()
    added.mkdir()
    secrets = {
        "keys_file": shells.shared / "deep" / "keys.toml", "cluster_key_file": added / "cluster",
        "config": shells.shared / "proxy.toml", "passfile": shells.shared / "pgpass",
        "model": shells.shared / "cloud.json", "key": shells.shared / "redis.key",
        "socket": shells.shared / ".s.PGSQL.5433",
    }  # fmt: skip
    for name, path in secrets.items():
        path.write_text(f"{name}=marmalade-secret")
    monkeypatch.setenv("PGPASSFILE", str(secrets["passfile"]))
    named = {
        "registry": f"rediss://localhost/?ssl_keyfile={secrets['key']}",
        "store": f"postgresql://localhost:5433/x?host={shells.shared}",
    }
    wide = CONFINED.model_copy(update={"add_dirs": (added,)})
    settings = shells.settings.model_copy(update={"profiles": {"confined": wide, "free": FREE}})
    given = {name: secrets[name] for name in ("keys_file", "cluster_key_file", "config")}
    urls = {name: SecretStr(url) for name, url in named.items()}
    params = ModelSettings(litellm="vertex_ai/x", params={"vertex_credentials": "shared/cloud.json"})
    told = settings.model_copy(update={**given, **urls, "models": {"cloud": params}})
    assert {*secrets.values()} <= told.secret_files().keys()
    for url in ("postgresql://%2Fa:1,%2Fb:2/x", "postgresql://u:p@/x?host=/a,/b&port=1,2"):  # one for each server
        sockets = [at for at in Settings(store=SecretStr(url)).secret_files() if at.name.startswith(".s.PGSQL")]
        assert {Path("/a/.s.PGSQL.1"), Path("/b/.s.PGSQL.2")} <= {*sockets}
    looks = "cat rules/*"
    async with running(settings) as engine:
        assert "marmalade-secret" in await shells.run(engine, "free", looks)
        for name, path in secrets.items():
            monkeypatch.setattr(Settings, "secret_files", lambda _settings, path=path, name=name: {path: name})
            with pytest.raises(SandboxError, match=name):
                await shells.run(engine, "confined", looks)


async def of_etc_and_of_other_software_folders_it_sees_a_short_list(shells: Shells, engine: Engine) -> None:
    command = (
        "cat /etc/shadow /etc/gshadow; ls -A /opt /snap /nix /etc/ssl/private /etc/default; cat /etc/passwd; id -un"
    )
    free = await shells.run(engine, "free", command)
    assert "daemon:" in free
    said = await shells.run(engine, "confined", command)
    assert "daemon:" not in said
    assert said.count("No such file") >= 6
    assert pwd.getpwuid(os.getuid()).pw_name in said.splitlines()[-1]
    certificates = "import ssl; print(len(ssl.create_default_context().get_ca_certs()), 'certificates')"
    works = f'getent hosts localhost && echo named; date +%Z; python3 -c "{certificates}"; touch /x /etc/x /dev/x'
    said = await shells.run(engine, "confined", works)
    assert "named" in said
    assert "certificates" in said
    assert "0 certificates" not in said.split("\n")
    assert said.count("Read-only") == 3


async def test_no_confined_cli_starts_where_a_secret_is_visible(shells: Shells) -> None:
    """Seen from inside, or reached by moving a folder that the agent writes."""
    deep = shells.shared / "one" / "two"
    deep.mkdir(parents=True)
    key = deep / "keys.toml"
    key.write_text('ada = "marmalade-marmalade"\n')
    settings, var = shells.settings, shells.settings.var

    def with_profile(**more: object) -> Settings:
        profile = CONFINED.model_copy(update=more)
        return settings.model_copy(update={"profiles": {"confined": profile}, "keys_file": key})

    under = settings.model_copy(update={"var": deep / "var"})
    cases = (
        (with_profile(add_dirs=(shells.shared,)), "keys_file"),
        (with_profile(add_dirs=(deep.parent,)), "keys_file"),
        (with_profile(mcp_config=key), "keys_file"),
        (with_profile(mcp_config=var / "key"), "--var"),
        (with_profile(add_dirs=(var / "sandbox" / "agents",)), "--var"),
        (
            under.model_copy(
                update={"profiles": {"confined": CONFINED.model_copy(update={"add_dirs": (shells.shared,)})}}
            ),
            "--var",
        ),
    )
    for number, (changed, what) in enumerate(cases):
        make_key(changed.var)
        async with running(changed) as engine:
            with pytest.raises(SandboxError, match=what):
                await shells.run(engine, "confined", f"cat {key}; echo {number}")
    assert shells.upstream.requests == []


async def test_another_profiles_agents_replace_nothing_that_a_confined_one_is_shown(shells: Shells) -> None:
    inner = shells.shared / "inner"
    inner.mkdir()
    profiles = {
        "confined": CONFINED.model_copy(update={"add_dirs": (shells.shared,)}),
        "inner": CONFINED.model_copy(update={"add_dirs": (inner,)}),
    }
    settings = shells.settings.model_copy(update={"profiles": profiles, "sandbox": SandboxSettings()})
    async with running(settings) as engine:
        said = await shells.run(
            engine, "confined", f"mv {inner} {inner}.old && ln -s {shells.home} {inner} && echo replaced"
        )
        assert "replaced" in said
        with pytest.raises(SandboxError, match="agents of profile confined write"):
            await shells.run(engine, "inner", f"cat {inner}/private")


LOGIN: dict[str, Any] = {
    "claudeAiOauth": {
        "accessToken": "sk-ant-oat01-before-a", "refreshToken": "sk-ant-ort01-before-r",
        "expiresAt": int(time.time() * 1000), "scopes": ["user:inference"], "subscriptionType": "max",
    }
}  # fmt: skip


def renewed(**more: object) -> str:
    told = {
        "accessToken": "sk-ant-oat01-after-a",
        "refreshToken": "sk-ant-ort01-after-r",
        "expiresAt": LOGIN["claudeAiOauth"]["expiresAt"] + 28_800_000,
    }
    return json.dumps({"claudeAiOauth": LOGIN["claudeAiOauth"] | told | more})


async def test_a_login_that_a_confined_cli_renews_comes_back_and_nothing_else_does(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by a shell, as a CLI does it: in place, and by a file that is put there."""
    monkeypatch.setattr(environment, "has_login", lambda _: False)  # else it is lent none
    monkeypatch.setattr(logins, "WAIT", PATIENCE)
    monkeypatch.setattr(logins, "WAIT_FOR_ONE", PATIENCE)  # a slow machine would have a copy left alone
    config = shells.settings.claude_config_dir
    assert config is not None
    login = config / ".credentials.json"
    config.mkdir(exist_ok=True)
    login.write_text(json.dumps(LOGIN))
    login.chmod(0o600)
    others = (
        "{}", "[" * 5000, renewed(subscriptionType="pro"), renewed(accessToken="sk-ant-api03-x-y"),
        renewed(expiresAt=1), renewed(expiresAt=10**18), renewed(more=1), json.dumps({**json.loads(renewed()), "x": 1}),
    )  # fmt: skip
    profiles = {"confined": CONFINED, "second": CONFINED}
    settings = shells.settings.model_copy(update={"profiles": profiles})
    async with running(settings) as engine:
        for text in others:
            said = await shells.run(engine, "confined", f"grep -c before {login}; echo '{text}' > {login}; echo wrote")
            assert said.splitlines()[-2:] == ["1", "wrote"] or "1\nwrote" in said
            assert json.loads(login.read_text()) == LOGIN
        await shells.run(engine, "confined", f"ln -sf {settings.var}/key {login}; echo linked")
        await shells.run(engine, "confined", f"echo '{renewed()}' > {login}.new && mv {login}.new {login}")
        assert json.loads(login.read_text()) == json.loads(renewed())  # at once: the old tokens are invalid
        said = await shells.run(engine, "second", f"grep -c after {login}")
        assert "1" in said
        assert json.loads(login.read_text()) == json.loads(renewed())
        assert login.stat().st_mode & 0o777 == 0o600
        later = renewed(expiresAt=LOGIN["claudeAiOauth"]["expiresAt"] + 28_900_000)
        unread = later.replace("{", '{"claudeAiOauth": NaN, ', 1)  # Python reads that, the CLI does not
        await shells.run(engine, "confined", f"echo '{unread}' > {login}")
        await shells.run(engine, "second", "true")
        assert json.loads(login.read_text()) == json.loads(later)
        assert "NaN" not in login.read_text()
        last = renewed(expiresAt=LOGIN["claudeAiOauth"]["expiresAt"] + 29_000_000)
        shells.upstream.next(*[Fail(400)] * 4)
        with pytest.raises(ProxyError, match="scripted failure"):
            await shells.run(engine, "confined", f"echo '{last}' > {login}")
        shells.upstream.heal()
        assert json.loads(login.read_text()) == json.loads(last)
        await shells.run(engine, "confined", f"rm {login}; mkdir {login}")
        assert login.is_file()
        with pytest.raises(SandboxError, match="the login cannot be copied"):
            await shells.run(engine, "confined", "true")
        await shells.run(engine, "second", "true")
        assert not [path for path in opened_files() if Path(path).name == login.name]


@pytest.mark.parametrize("fails", ["read", "write"])
async def test_a_renewed_login_that_cannot_be_stored_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """No descriptor is free, or the disk is full: the agent got the old login again, which was invalid."""
    (tmp_path / logins.FILE).write_text(json.dumps(LOGIN))
    copies, private = logins.Logins(tmp_path, tmp_path), tmp_path / "confined" / "one"
    await copies.exchange(private, give=True)
    (private / logins.FILE).write_text(renewed())

    def no_descriptor(*_: object, **__: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as changed:
        if fails == "read":
            changed.setattr(logins, "contents", no_descriptor)
        else:
            changed.setattr(logins, "write_private", no_room)
        await copies.take_back(private)
        with pytest.raises(OSError, match=r"open files|space"):
            await copies.exchange(private, give=True)
    await copies.exchange(private.with_name("other"), give=True)
    assert json.loads((tmp_path / logins.FILE).read_text()) == json.loads(renewed())


async def test_a_confined_cli_with_a_login_of_its_own_is_lent_no_other(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shells.settings.claude_config_dir
    assert config is not None
    config.mkdir(exist_ok=True)
    login = config / ".credentials.json"
    login.write_text(json.dumps(LOGIN))
    looks = f"ls -a {config}; grep -c before {login}; echo looked"
    async with running(shells.settings) as engine:
        with monkeypatch.context() as changed:  # a turn before had the user's own
            changed.setattr(environment, "has_login", lambda _: False)
            assert "1\nlooked" in await shells.run(engine, "confined", looks)
        said = await shells.run(engine, "confined", looks)
        assert "looked" in said
        assert ".credentials" not in said.replace(str(login), "")
    assert not [
        at for at in (shells.settings.var / "confined").rglob("*") if "before" in at.name or at.name == login.name
    ]
    env = {"CLAUDE_CODE_USE_BEDROCK": "0", "PATH": "/bin"}
    assert not environment.has_login(env)
    assert all(environment.has_login(env | {name: "1"}) for name in ("CLAUDE_CODE_USE_BEDROCK", *environment.LOGINS))


async def test_what_is_kept_in_memory_inside_is_bounded_and_weighed(shells: Shells) -> None:
    async with running(shells.settings) as engine:
        await shells.run(engine, "confined", "true")
        (process,) = command_pids("--die-with-parent")
        before = kept_beside(process)
        fill = (
            "head -c 120000000 /dev/zero > /tmp/large; dd if=/dev/zero of=/dev/shm/large bs=1M count=300 2>&1; df /tmp"
        )
        said = await shells.run(engine, "confined", fill)
        assert "No space left" in said
        assert kept_beside(process) - before > (120 + 256) * 900_000
        before = kept_beside(process)
        files = "import os; [os.close(os.open(f'/tmp/{number}', os.O_CREAT)) for number in range(50_000)]"
        await shells.run(engine, "confined", f'python3 -c "{files}"')  # an empty one takes the kernel a kilobyte
        assert kept_beside(process) - before > 40_000_000
        said = await shells.run(engine, "confined", "unshare -Ur true; touch /x /var/x; cd /usr; touch x; echo tried")
        assert "unshare failed" in said
        assert said.count("Read-only") + said.count("No such file") >= 3


def kept_beside(pid: int) -> int:
    """What it is weighed with beyond its processes' own sizes: those shrink while another test's CLI starts."""
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):  # a command of the CLI's own has just ended: look again
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            weighed = weigh([pid])[pid] - sum(map(size, family))
            if family == [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                return weighed


def command_pids(word: str) -> list[int]:
    """Of our own children."""
    return [one.pid for one in psutil.Process().children() if word in one.cmdline()]


async def test_a_fork_bomb_inside_ends_with_its_cli(shells: Shells) -> None:
    """Bounded here by the shell's own limit; a service bounds it by TasksMax."""
    async with running(shells.settings) as engine:
        bomb = f"for i in $(seq 200); do (setsid sh -c 'sleep {MARK}' &) ; done; sleep 1; pgrep -c sleep"
        assert "200" in await shells.run(engine, "confined", bomb)
    assert MARK not in await asyncio.to_thread(command_lines)


async def test_a_cli_that_a_link_under_home_names_runs_confined(shells: Shells) -> None:
    """The native installer makes ~/.local/bin/claude → ~/.local/share/claude/versions/…"""
    versions = shells.home / ".local" / "share" / "claude" / "versions"
    versions.mkdir(parents=True)
    os.link(shells.settings.claude_bin or "", versions / "2.1")
    link = shells.home / ".local" / "bin" / "claude"
    link.parent.mkdir()
    link.symlink_to(versions / "2.1")
    settings = shells.settings.model_copy(update={"claude_bin": link})
    async with running(settings) as engine:
        assert "here" in await shells.run(engine, "confined", "echo here")
        said = await shells.run(engine, "confined", "ls -AR ~/.local; echo looked")
        assert "looked" in said


async def test_a_program_runs_confined_where_the_home_is_the_root(shells: Shells, tmp_path: Path) -> None:
    """Such is the home of a container's user without a name. The mount that hid it hid /proc and /dev, too."""
    cwd, tmpdir, private = (tmp_path / name for name in ("agent", "tmp", "private"))
    cwd.mkdir()
    tmpdir.mkdir()
    config_dir = tmp_path / "config"
    place = confine.ConfinedPlace(cwd, tmpdir, config_dir, config_dir / "projects" / "agent", private)
    env = {"HOME": "/", "PATH": os.environ["PATH"]}
    assert await confine.why_cli_fails(shells.settings, CONFINED, Path("/bin/true"), place, env) is None


async def test_a_link_that_a_confined_shell_puts_in_the_place_of_a_folder_leads_nowhere(shells: Shells) -> None:
    """What is behind the boundary is opened by its name when the next CLI starts."""
    settings, config = shells.settings, shells.settings.claude_config_dir
    make_key(settings.var)
    shared = shells.shared / "folder"
    shared.mkdir()
    (shells.shared / "folder" / "inner").mkdir()
    wide = CONFINED.model_copy(update={"add_dirs": (shared, shared / "inner")})
    links = SandboxSettings(links={"rules": shared / "inner"})
    settings = settings.model_copy(update={"profiles": {"confined": wide}, "sandbox": links})
    replaced = f'[ -d "$TMPDIR/claude" ] || mkdir $TMPDIR/claude; for at in $TMPDIR/claude {shared}/inner; do '
    replaced += f"mv $at $at.old && ln -s {settings.var} $at && echo replaced; done"
    async with running(settings) as engine:
        assert "replaced" in await shells.run(engine, "confined", replaced)
    async with running(settings) as engine:
        looks = f"ls -A {config} {shared}/inner/ rules/; cat {config}/key rules/key {shared}/inner/key"
        said = await shells.run(engine, "confined", f"{looks}; echo x > {config}/x; echo looked")
        assert "looked" in said
        assert FILE not in said
        assert "csp-" not in said
        assert not (settings.var / "x").exists()
        assert await engine.delete("local", "confined")
    assert not [path for path in settings.var.glob("*/confined") if path.is_dir()]


async def it_sees_and_ends_no_process_of_others(shells: Shells, engine: Engine) -> None:
    command = f"cat /proc/{os.getpid()}/comm; kill -0 {os.getpid()} && echo could"
    assert "could" in await shells.run(engine, "free", command)
    said = await shells.run(engine, "confined", command)
    assert "could" not in said.replace("could not", "")
    assert "No such" in said


COMMAND = "cat rules/rules.md; echo worse > rules/rules.md; echo mine > note; cat note"


async def the_targets_of_links_are_read_only_and_the_sandbox_is_not(shells: Shells, engine: Engine) -> None:
    said = await shells.run(engine, "confined", COMMAND)
    assert "be kind" in said
    assert "Read-only file system" in said
    assert "mine" in said
    assert (shells.shared / "rules.md").read_text() == "be kind"
    assert (shells.settings.var / "sandbox" / "agents" / "confined" / "note").read_text() == "mine\n"
    for place in ("/usr/x", "/etc/x", str(shells.settings.claude_bin)):
        assert "Read-only" in await shells.run(engine, "confined", f"echo x > {place}")
    await shells.run(engine, "free", "echo worse > rules/rules.md")
    assert (shells.shared / "rules.md").read_text() == "worse\n"


LOOKS = (
    of_etc_and_of_other_software_folders_it_sees_a_short_list, it_sees_and_ends_no_process_of_others,
    the_targets_of_links_are_read_only_and_the_sandbox_is_not,
)  # fmt: skip


async def test_what_a_confined_shell_is_shown(shells: Shells, subtests: pytest.Subtests) -> None:
    """All in one life of the CLIs: none of them leaves anything behind that another looks at."""
    async with running(shells.settings) as engine:
        for look in LOOKS:
            with subtests.test(look.__name__):
                await look(shells, engine)


async def test_a_confined_shell_cannot_plant_settings_for_the_users_own_cli(shells: Shells) -> None:
    config = shells.settings.claude_config_dir
    assert config is not None
    async with running(shells.settings) as engine:
        said = await shells.run(engine, "confined", f"echo '{{}}' > {config}/settings.json && echo planted")
        assert "planted" in said
    assert not (config / "settings.json").exists()
    assert {path.name for path in config.iterdir()} == {"projects", "cli-session-proxy"}  # the second is ours


async def test_a_confined_agent_remembers_warm_resumed_and_rebuilt(shells: Shells) -> None:
    settings, upstream = shells.settings, shells.upstream
    profile = {"agent": "confined", "profile": "confined"}
    async with running(settings) as engine:
        await ask(engine, "remember a = 1", **profile)
        warm = await ask(engine, "remember b = 2", **profile)
        assert warm.continuity == "warm"
    async with running(settings) as engine:
        resumed = await ask(engine, "recall", **profile)
        assert (resumed.continuity, text(resumed)) == ("resumed", "I remember: a is 1; b is 2.")
    for path in (settings.claude_config_dir or Path()).glob("projects/*/*.jsonl"):
        path.unlink()
    async with running(settings) as engine:
        rebuilt = await ask(engine, "recall", **profile)
        assert (rebuilt.continuity, text(rebuilt)) == ("rebuilt", "I remember: a is 1; b is 2.")
        assert heard(upstream) == ["remember a = 1", "remember b = 2", "recall", "recall"]
        # the CLI's notes are said once, with the newest prompt
        assert str(upstream.requests[-1].messages).count("Primary working directory") == 1


async def test_the_folder_of_a_confined_agents_sessions_is_not_removed_as_an_empty_one(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other CLIs do, between the moment in which it is bound and its first session."""
    projects = (shells.settings.claude_config_dir or Path()) / "projects"
    run = confine._run

    async def run_beside_another_cli(*given: Any) -> tuple[int | None, str, str]:
        for folder in projects.glob("*-confined"):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return await run(*given)

    monkeypatch.setattr(confine, "_run", run_beside_another_cli)
    for continuity in ("started", "resumed"):
        async with running(shells.settings) as engine:
            assert (await ask(engine, continuity, agent="confined", profile="confined")).continuity == continuity


async def test_what_a_confined_shell_left_running_ends_with_its_cli(shells: Shells) -> None:
    async with running(shells.settings) as engine:
        # The shell waits until it runs: a process that is just being started has no command line to be found by.
        left = f"nohup setsid sh -c 'echo runs; exec >&-; sleep {MARK}; :' 2>/dev/null"
        assert "runs" in await shells.run(engine, "confined", f"read -r word < <({left}); echo $word")
        assert MARK in await asyncio.to_thread(command_lines)
    assert MARK not in await asyncio.to_thread(command_lines)


def command_lines() -> str:
    return subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout


@pytest.mark.full
async def test_the_old_cli_can_be_confined_too(
    make_settings: MakeSettings, claude_1_itself: Path, tmp_path: Path, upstream: Upstream
) -> None:
    shells = Shells(make_settings, claude_1_itself, tmp_path, upstream)
    async with running(shells.settings) as engine:
        said = await shells.run(engine, "confined", f"ls -A {shells.settings.var}; cat rules/rules.md")
        assert "be kind" in said
        assert FILE not in said
        await ask(engine, "remember a = 1", agent="confined", profile="confined")
        assert text(await ask(engine, "recall", agent="confined", profile="confined")) == "I remember: a is 1."


# --- where it cannot be


async def test_without_bubblewrap_a_confined_turn_is_refused_in_words(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confine, "_works", False)
    monkeypatch.setattr(shutil, "which", lambda *_args, **_more: None)
    async with running(shells.settings) as engine:
        with pytest.raises(SandboxError, match="apt install bubblewrap"):
            await shells.run(engine, "confined", "true")
    assert shells.upstream.requests == []


@pytest.mark.parametrize("leaves", ["", f"sleep {MARK} &\n"], ids=["nothing", "a process that waits for ever"])
async def test_a_boundary_that_the_machine_does_not_allow_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    """bubblewrap 0.8 leaves one where a filter of system calls refuses it `capset`."""
    monkeypatch.setattr(confine, "TRIAL", 1.0)
    broken = tmp_path / "bin" / confine.PROGRAM
    broken.parent.mkdir()
    broken.write_text(f"#!/bin/sh\n{leaves}echo 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(confine, "_works", False)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    why = await confine.why_unavailable()
    assert why is not None
    assert "No permissions to create new namespace" in why
    assert "unprivileged user namespaces" in why
    assert MARK not in await asyncio.to_thread(command_lines)


async def test_a_look_from_inside_that_does_not_end_is_refused_in_words(
    shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / confine.PROGRAM
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nexec sleep {MARK}\n")
    slow.chmod(0o755)
    settings = shells.settings.model_copy(update={"spawn_timeout": 0.5})
    async with running(settings) as engine:
        monkeypatch.setattr(confine, "_works", True)
        monkeypatch.setattr(confine, "CONFINE", (*confine.CONFINE[:-1], str(slow)))
        with pytest.raises(SandboxError, match=r"bubblewrap did not end within 0\.5 s"):
            await shells.run(engine, "confined", "true")
    assert MARK not in await asyncio.to_thread(command_lines)


def test_however_few_descriptors_are_free_a_look_from_inside_says_so_and_leaves_none_open() -> None:
    """Each such start of uvloop left four open, and the error told people to allow user namespaces."""

    async def main() -> None:
        await confine._run(["true"], 60.0)  # a loop's first process opens more
        before, refused = psutil.Process().num_fds(), list[str]()
        for number in range(24):
            with free_descriptors(number):
                try:
                    await confine._run(["true"], 60.0)
                except ClaudeUnavailable as exc:
                    refused.append(exc.message)
            await until(lambda: psutil.Process().num_fds() == before)
        assert 0 < len(refused) < 24
        assert all("raise the limit of open files" in why for why in refused)

    uvloop.run(main())


async def test_serve_lets_no_confined_agent_ask_it_for_every_chain(tmp_path: Path) -> None:
    """The network stays open: without a key an agent's shell would read all chains over loopback."""
    settings = Settings(var=tmp_path / "var", port=0, profiles={"coder": CONFINED})
    with pytest.raises(ConfigError, match="--make-key"):
        await asyncio.wait_for(serve(settings, lambda _line: None, Watchdog(), report=report), 60)


async def test_agents_whose_directories_lie_in_a_git_repository_are_not_shown_each_others_notes(
    shells: Shells, tmp_path: Path
) -> None:
    """The CLI keeps the model's notes in one folder for the whole repository."""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    for name in ("objects", "refs"):
        (tmp_path / ".git" / name).mkdir()
    config = shells.settings.claude_config_dir or Path()
    notes = config / "projects" / re.sub("[^a-zA-Z0-9]", "-", str(tmp_path)) / "memory"
    notes.mkdir(parents=True)
    (notes / "MEMORY.md").write_text("marmalade")
    async with running(shells.settings) as engine:
        await ask(engine, "hello", agent="one")
        await ask(engine, "hello", agent="two", profile="free")
    assert "marmalade" not in json.dumps([seen.body for seen in shells.upstream.requests])


async def test_agents_whose_directories_lie_in_a_git_repository_are_not_shown_what_others_commit(
    shells: Shells, tmp_path: Path
) -> None:
    """A CLI shows its model the newest commits and changed files. 1.0.120 does so without tools, too."""
    commit = "git -c user.name=a -c user.email=a@b commit -q --allow-empty"
    await output_of("sh", "-c", f"git init -q; {commit} -m first", cwd=tmp_path, env=dict(os.environ))
    async with running(shells.settings) as engine:
        said = await shells.run(engine, "free", f"touch plums; git add -f plums && {commit} -m marmalade")
        assert "not a git repository" in said
        await ask(engine, "hello", agent="other", profile="free")
        shown = json.dumps(shells.upstream.requests[-1].body)
        assert "marmalade" not in shown
        assert "own" in await shells.run(engine, "free", f"git init -q; {commit} -m own; git log --format=%s")


async def test_a_cli_does_not_speak_in_the_conversation_of_another(shells: Shells) -> None:
    """CLI 2.1 lists the others of its user to its model, and takes their messages as prompts."""
    profiles = {"all": Profile(tools=("default",), permission_mode="bypassPermissions"), "none": Profile()}
    settings, upstream = shells.settings.model_copy(update={"profiles": profiles}), shells.upstream
    config = settings.claude_config_dir or Path()
    async with running(settings) as engine:
        await ask(engine, "hello", agent="jam", owner="somebody")
        register = [json.loads(one.read_text()) for one in (config / "sessions").glob("*.json")]
        [name] = [one.get("name", "nobody") for one in register if "jam~" in one["cwd"]]
        upstream.when("who is there", ToolUse([("ListAgents", {})]))
        assert "jam" not in text(await ask(engine, "who is there", agent="one", profile="all"))
        message = {"to": name, "summary": "plums", "message": "marmalade"}
        upstream.when("speak", ToolUse([("SendMessage", message)]))
        assert "marmalade" not in text(await ask(engine, "speak", agent="one", profile="all"))
        await ask(engine, "again", agent="jam", owner="somebody")
        assert heard(upstream) == ["hello", "again"]


async def test_agents_whose_sessions_the_cli_would_keep_in_one_folder_do_not_share_it(
    shells: Shells, tmp_path: Path
) -> None:
    first, second = (shells.settings.model_copy(update={"var": tmp_path / name}) for name in ("x.y", "x-y"))
    async with running(first) as engine:
        await ask(engine, "marmalade", agent="ada")
    async with running(second) as engine:
        for _ in range(2):
            with pytest.raises(SandboxError, match="with those of another agent"):
                await ask(engine, "hello", agent="ada", profile="confined")
        await engine.delete("local", "ada")
    [folder] = ((shells.settings.claude_config_dir or Path()) / "projects").iterdir()
    assert [*folder.glob("*.jsonl")] != []


def test_an_agents_first_turn_does_not_wait_for_a_proxy_that_is_paused_while_it_replaces_an_owner(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings()
    projects = Projects(settings, Sandboxes(settings), tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    projects.own(tmp_path / "first")
    with open(tmp_path / "cli-session-proxy" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        noting = threading.Thread(target=projects.own, args=(tmp_path / "second",))
        noting.start()
        noting.join(PATIENCE)
        waits = noting.is_alive()
    noting.join(PATIENCE)
    assert not waits
    assert len([*(tmp_path / "cli-session-proxy").glob("*-second")]) == 1


def test_of_two_agents_that_follow_one_that_is_gone_one_gets_its_folder(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    projects = Projects(settings, Sandboxes(settings), tmp_path)
    for name in ("x.y", "x-y", "x_y"):
        (tmp_path / name).mkdir()
    projects.own(tmp_path / "x.y")
    (tmp_path / "x.y").rmdir()
    (note,) = (tmp_path / "cli-session-proxy").iterdir()
    make = os.symlink

    def beside_another(*args: object) -> None:
        """The other one's first step, which waits for no lock, comes just before."""
        with contextlib.suppress(FileExistsError):
            make(tmp_path / "x_y", note)
        make(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "symlink", beside_another)
    projects.own(tmp_path / "x-y")
    assert os.readlink(note) == str(tmp_path / "x-y")


def test_a_folder_of_the_clis_sessions_is_one_agents_until_its_directory_is_gone(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """For the CLI `x.y` and `x-y` are one name, and of long paths it takes 32 bits of a hash."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    for one, other in (("x.y/a", "x-y/a"), (f"{deep}/xc0", f"{deep}/xan")):
        settings = make_settings()
        projects = Projects(settings, Sandboxes(settings), tmp_path / "config")
        first, second = tmp_path / one, tmp_path / other
        for folder in (first, second):
            folder.mkdir(parents=True)
        for _ in range(2):
            projects.own(first)
            with pytest.raises(SandboxError, match="with those of another agent"):
                projects.own(second)
        projects.disown(second)
        assert projects.is_others_own(second)
        first.rmdir()
        projects.own(second)
        projects.disown(second)
        first.mkdir()
        projects.own(first)
    assert projects.folder(first) == projects.folder(second)
    second.rmdir()
    first.rename(second)  # and a link is left for those who know the old path
    first.symlink_to(second)
    projects.own(second)
    assert (tmp_path / "config").stat().st_mode & 0o777 == 0o700  # it will have logins and transcripts
    (tmp_path / "full").write_bytes(b"")
    Projects(settings, Sandboxes(settings), tmp_path / "full").own(second)  # nothing can be noted there
