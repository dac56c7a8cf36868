"""Finding a CLI, asking what it can do, and the environment and command line it gets."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy import machine, redact
from cli_session_proxy.backends.claude.process import capability, environment
from cli_session_proxy.backends.claude.process.capability import (
    Capability,
    failed,
    find,
    heard,
    how_to_install,
    probe,
)
from cli_session_proxy.backends.claude.process.child import ALWAYS_OFF, Launch
from cli_session_proxy.errors import ClaudeUnavailable
from cli_session_proxy.settings import Profile, Settings

from ....talking import events
from ....wrappers import KINDS, wrapped

ENV = {"PATH": os.defpath}
HELP = "  -p, --print  x\n  --session-id <uuid>  x\n  -r, --resume [id]  x\n  --input-format <f>  x"


def program(path: Path, version: str = "2.9.9 (Claude Code)", code: int = 0) -> Path:
    path.write_text(f"#!{sys.executable}\nimport sys\nprint({version!r} if '--version' in sys.argv else {HELP!r})\n"
                    f"sys.exit({code})\n")  # fmt: skip
    path.chmod(0o755)
    return path


def launch(capability: Capability, **options: object) -> Launch:
    given: dict[str, object] = {
        "cwd": Path("/sandbox"), "session_id": "S", "resume": False, "model": "sonnet", "profile": Profile(), "env": (),
    }  # fmt: skip
    return Launch(capability, **{**given, **options})  # type: ignore[arg-type]  # any field


def able(*flags: str, version: tuple[int, int, int] = (2, 1, 329)) -> Capability:
    return Capability(Path("claude"), ".".join(map(str, version)), version, frozenset(flags), frozenset({"plan"}))


async def test_it_asks_again_only_when_the_file_has_changed(tmp_path: Path) -> None:
    binary = program(tmp_path / "claude")
    first = await probe(binary, ENV)
    assert (first.version, first.version_tuple, first.warm) == ("2.9.9", (2, 9, 9), True)
    assert await probe(binary, ENV) is first
    program(binary, "1.0.17 (Claude Code)")
    older = await probe(binary, ENV)
    assert (older.version, older.keeps_session_id, older.warm, older.client_composed) == ("1.0.17", False, False, False)
    binary.unlink()
    with pytest.raises(ClaudeUnavailable, match="install it"):
        await probe(binary, ENV)


@pytest.mark.parametrize(("version", "code"), [("2.9.9 (Claude Code)", 3), ("no number", 0)])
async def test_what_is_no_working_cli_is_unavailable(tmp_path: Path, version: str, code: int) -> None:
    with pytest.raises(ClaudeUnavailable):
        await probe(program(tmp_path / "claude", version, code), ENV)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("2.9.9 (Claude Code)", ("2.9.9", (2, 9, 9))),
        ("Update 9.9.9 is available\n2.9.9 (Claude Code)", ("2.9.9", (2, 9, 9))),
        ("Claude Code 3.1", ("3.1", (3, 1, 0))),
        ("Claude Code, build of today", ("unknown", (999, 0, 0))),
    ],
)
async def test_a_version_is_read_in_other_words_too(
    tmp_path: Path, said: str, version: tuple[str, tuple[int, int, int]]
) -> None:
    found = await probe(program(tmp_path / "claude", said), ENV)
    assert (found.version, found.version_tuple) == version


async def test_what_a_cli_failed_at_is_not_used_any_more_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    binary = program(tmp_path / "claude", "2.1.330 (Claude Code)")
    cli = await probe(binary, ENV)
    assert cli.takes_parameters
    failed(cli, "apply_flag_settings", "it refused")
    failed(cli, "apply_flag_settings", "it refused once more")
    assert not (await probe(binary, ENV)).takes_parameters
    assert "it refused" in (await probe(binary, ENV)).cannot("apply_flag_settings", "sing")
    assert len([one for one in events(caplog) if one["event"] == "claude_degraded"]) == 1
    program(binary, "2.1.331 (Claude Code)")
    assert (await probe(binary, ENV)).takes_parameters


async def test_a_file_that_cannot_run_is_unavailable(tmp_path: Path) -> None:
    plain = tmp_path / "claude"
    plain.write_text("hello")
    with pytest.raises(ClaudeUnavailable, match=r"cannot be started \(Permission denied\)"):
        await probe(plain, ENV)
    plain.chmod(0o755)
    plain.write_bytes(b"\x7fELF but not really")
    with pytest.raises(ClaudeUnavailable):
        await probe(plain, ENV)


async def test_one_that_never_answers_is_given_up_and_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.capability.PROBE_TIMEOUT", 0.3)
    stuck = tmp_path / "claude"
    stuck.write_text("#!/bin/sh\nsleep 3600\n")
    stuck.chmod(0o755)
    with pytest.raises(ClaudeUnavailable, match="did not answer"):
        await probe(stuck, ENV)  # `no_process_left` checks the rest


async def test_one_that_does_not_answer_is_asked_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.capability.PROBE_TIMEOUT", 2.0)
    binary, stuck = tmp_path / "claude", tmp_path / "stuck"
    answers = program(tmp_path / "answers")
    stuck.touch()
    binary.write_text(f'#!/bin/sh\n[ $1 = --help ] && rm "{stuck}" && exec sleep 3600\nexec "{answers}" $1\n')
    binary.chmod(0o755)
    assert (await probe(binary, ENV)).keeps_session_id
    assert not stuck.exists()


def test_the_setting_goes_before_path_and_path_before_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claude_2: Path
) -> None:
    on_path = program(tmp_path / "claude")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find(Settings(claude_bin=tmp_path / "other")) == tmp_path / "other"
    assert find(Settings()) == on_path
    on_path.unlink()
    before = set(sys.modules)
    assert find(Settings()) == claude_2
    assert "claude_agent_sdk" not in set(sys.modules) - before
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ClaudeUnavailable, match="install it"):
        find(Settings())


async def test_the_real_ones_are_told_apart(
    claude_1_itself: Path, claude_1: Path, claude_2: Path, claude_env: dict[str, str]
) -> None:
    env = claude_env | WITH_NODE
    old, new = await probe(claude_1_itself, env), await probe(claude_2, env)
    assert replace(await probe(claude_1, env), path=claude_1_itself) == old
    assert (old.version, old.warm, old.keeps_session_id, old.client_composed) == ("1.0.120", False, False, False)
    assert (old.takes_tools, old.takes_claim, old.takes_system_prompt) == (False, False, False)
    assert (new.warm, new.keeps_session_id, new.client_composed, new.chooses_tools) == (True, True, True, True)
    assert (new.takes_tools, new.takes_claim, new.takes_system_prompt) == (True, True, True)
    assert {"--system-prompt", "--include-partial-messages"} <= old.flags & new.flags
    assert not old.chooses_tools
    assert old.permission_modes >= {"plan", "bypassPermissions", "acceptEdits"}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_script_that_starts_a_cli_can_what_that_cli_can(
    kind: str, claude: Path, claude_env: dict[str, str], tmp_path: Path
) -> None:
    script, env = wrapped(claude, tmp_path / "bin", kind), claude_env | WITH_NODE
    assert await probe(script, env) == replace(await probe(claude, env), path=script)


async def test_who_asks_meanwhile_waits_for_the_same_answer_and_may_leave(tmp_path: Path) -> None:
    binary = program(tmp_path / "claude")
    calls = tmp_path / "calls"
    binary.write_text(
        f"{binary.read_text()}\nopen({str(calls)!r}, 'a').write(sys.argv[1])\n".replace("sys.exit(0)", "")
    )
    first, *others = [asyncio.create_task(probe(binary, ENV)) for _ in range(8)]
    await asyncio.sleep(0)
    first.cancel()
    answers = await asyncio.gather(*others)
    assert {id(answer) for answer in answers} == {id(answers[0])}
    assert sorted(calls.read_text().split("--")) == ["", "help", "version"]


async def test_what_a_process_says_of_itself_goes_before_what_was_asked(tmp_path: Path) -> None:
    binary = program(tmp_path / "claude")  # it says 2.9.9, and starts another one
    first = await probe(binary, ENV)
    heard(first, "2.0.0")
    second = await probe(binary, ENV)
    assert (second.version, second.takes_tools) == ("2.0.0", False)
    assert await probe(binary, ENV) is second


@pytest.mark.parametrize("certain", [True, False])
async def test_a_cli_that_reports_another_version_at_each_start_is_not_probed_at_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certain: bool
) -> None:
    """A confined agent can say anything in its CLI's place: each start of any agent's CLI began with two others."""
    binary = program(tmp_path / "claude")
    probes = 0
    ask = capability._ask

    async def counted(*given: Any) -> str:
        nonlocal probes
        probes += given[1] == "--version"
        return await ask(*given)

    monkeypatch.setattr(capability, "_ask", counted)
    for number in range(20):
        heard(await probe(binary, ENV), f"2.0.{number}" if certain else None)
    assert probes == 1 + capability.MOST_HEARD
    monkeypatch.setattr(capability, "HEARD_WITHIN", 0.0)
    heard(await probe(binary, ENV), "2.5.0")
    assert (await probe(binary, ENV)).version == "2.5.0"


async def test_forged_reports_of_other_versions_hide_no_true_one(tmp_path: Path) -> None:
    """A script may start another version than its --version says: only a running CLI tells which."""
    binary = program(tmp_path / "claude")
    for _ in range(2 * capability.MOST_HEARD):
        heard(await probe(binary, ENV), None)
    heard(await probe(binary, ENV), "2.5.0")
    assert (await probe(binary, ENV)).version == "2.5.0"


WITH_NODE = {"PATH": os.environ.get("PATH", os.defpath)}


def test_on_alpine_the_advice_is_not_a_wheel_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cli-session-proxy[claude]" in how_to_install()
    monkeypatch.setattr(machine, "SYSTEM", "musl")
    advice = how_to_install()
    assert "apk add" in advice
    assert "[claude]" not in advice


# --- environment


def test_nothing_but_the_allowed_reaches_the_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_SOMEONE", "x")
    monkeypatch.setenv("CLAUDECODE", "1")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-fake")
    monkeypatch.setenv("LC_TIME", "C")
    settings = Settings(claude_env={"MORE": "1", "TMPDIR": "/elsewhere"}, idle_timeout=7.5, cli_retries=3)
    env = environment.build(settings, tmpdir=tmp_path, config_dir=environment.config_dir(settings))
    assert not {"SECRET_OF_SOMEONE", "CLAUDECODE", "CLAUDE_CONFIG_DIR", "DISABLE_AUTO_COMPACT"} & set(env)
    assert (env["ANTHROPIC_API_KEY"], env["LC_TIME"], env["MORE"]) == ("sk-ant-fake", "C", "1")
    assert (env["TMPDIR"], env["CLAUDE_CODE_MAX_RETRIES"]) == (str(tmp_path), "3")
    assert env["CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS"] == "3750"
    assert (env["CLAUDE_CODE_FORK_SUBAGENT"], env["CLAUDE_CODE_STARTUP_FAILURE_RESULTS"]) == ("0", "1")
    assert env["ENABLE_CLAUDEAI_MCP_SERVERS"] == "false"


CLOUDS = {
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-aws", "AWS_PROFILE": "work", "GOOGLE_APPLICATION_CREDENTIALS": "/g.json",
    "CLOUD_ML_REGION": "global",
}  # fmt: skip
AWS, GOOGLE = {"AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"}, {"GOOGLE_APPLICATION_CREDENTIALS", "CLOUD_ML_REGION"}


@pytest.mark.parametrize(
    ("switch", "passed"),
    [
        (None, set()), ("CLAUDE_CODE_USE_BEDROCK", AWS), ("CLAUDE_CODE_USE_MANTLE", AWS),
        ("CLAUDE_CODE_USE_VERTEX", GOOGLE),
        ("CLAUDE_CODE_USE_FOUNDRY", set()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["environment", "settings"])
def test_a_clouds_credentials_reach_the_cli_only_when_it_uses_that_cloud(
    switch: str | None, passed: set[str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CLOUDS.items():
        monkeypatch.setenv(name, value)
    settings = Settings(claude_env={switch: "1"} if switch and where == "settings" else {})
    if switch and where == "environment":
        monkeypatch.setenv(switch, "1")
    assert set(CLOUDS) & set(environment.inherited(settings)) == passed
    if switch:
        monkeypatch.setenv(switch, "0")
        assert not set(CLOUDS) & set(environment.inherited(Settings()))


def test_a_secret_of_the_environment_is_hidden_wherever_it_turns_up(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.inherited(Settings(claude_env={"AWS_SECRET_ACCESS_KEY": "of no form at all"}))
    assert redact.text("it said: of no form at all") == "it said: [redacted]"


def test_the_config_dir_is_the_setting_then_the_variable_then_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.config_dir(Settings()) == tmp_path / "home" / ".claude"
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "named"))
    assert environment.config_dir(Settings()) == tmp_path / "named"
    settings = Settings(claude_config_dir=tmp_path / "set", on_context_full="error")
    assert environment.config_dir(settings) == tmp_path / "set"
    env = environment.build(settings, tmpdir=tmp_path, config_dir=tmp_path / "set")
    assert (env["CLAUDE_CONFIG_DIR"], env["DISABLE_AUTO_COMPACT"]) == (str(tmp_path / "set"), "1")


# --- command line


def test_only_flags_that_the_cli_knows_are_used() -> None:
    argv = launch(able(), effort="high", system_prompt="S").argv()
    known = {"-p", "--input-format", "--output-format", "--verbose", "--session-id", "--model", "--disallowedTools",
             "--append-system-prompt", "--allowedTools"}  # fmt: skip
    assert {part.split("=")[0] for part in argv if part.startswith("-")} == known


def test_no_cli_compacts_or_deletes_between_turns_or_hears_another() -> None:
    given = next(part for part in launch(able("--settings")).argv() if part.startswith("--settings="))
    told = {
        "cleanupPeriodDays": 36500, "idleCompaction": False, "crossSessionInbound": "refuse",
        "autoMemoryEnabled": False,
    }  # fmt: skip
    assert json.loads(given.partition("=")[2]) == told


def test_a_cli_keeps_notes_only_with_tools_and_beside_the_agents_sessions() -> None:
    def told(version: tuple[int, int, int]) -> dict[str, object]:
        argv = launch(able("--settings", version=version), profile=Profile(tools=("Write",)), env=env).argv()
        given = next(part for part in argv if part.startswith("--settings="))
        return {name: value for name, value in json.loads(given.partition("=")[2]).items() if "Memory" in name}

    env = (("CLAUDE_CONFIG_DIR", "/config"), ("HOME", "/home"))
    assert told((2, 1, 74)) == {"autoMemoryDirectory": "/config/projects/-sandbox/memory"}
    assert told((2, 1, 71)) == {"autoMemoryEnabled": False}  # it would keep those of a whole git repository together


def test_tools_are_off_without_a_profile_and_exactly_its_own_with_one() -> None:
    new, old = able("--tools"), able(version=(1, 0, 120))
    assert "--tools=" in launch(new).argv()
    profile = Profile(tools=("Read", "Bash(git *)", "mcp__x__y"))
    argv = launch(new, profile=profile).argv()
    prompting = f"--disallowedTools={','.join(ALWAYS_OFF)}"
    assert {"--tools=Read,Bash", "--allowedTools=mcp__client,Bash(git *),mcp__x__y", prompting} <= set(argv)
    denied = next(part for part in launch(old, profile=profile).argv() if part.startswith("--disallowedTools="))
    names = denied.partition("=")[2].split(",")
    assert "Write" in names
    assert not {"Read", "Bash"} & set(names)
    assert prompting in launch(old, profile=Profile(tools=("default",))).argv()


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "opus"}, {"effort": "low"}, {"cwd": Path("/other")}, {"session_id": "T"},
        {"env": (("A", "1"),)}, {"profile": Profile(tools=("Read",))}, {"profile": Profile(permission_mode="plan")},
    ],
)  # fmt: skip
def test_a_warm_process_serves_only_an_equal_launch(changed: dict[str, object]) -> None:
    capability = able("--effort", "--tools", "--settings")
    assert launch(capability) == launch(capability, resume=True)
    assert launch(capability) != launch(capability, **changed)


def test_a_secret_or_a_prompt_is_never_in_its_repr() -> None:
    shown = repr(launch(able(), env=(("KEY", "sk-ant-fake"),), system_prompt="PRIVATE"))
    assert "sk-ant" not in shown
    assert "PRIVATE" not in shown
