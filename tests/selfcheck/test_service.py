"""A proxy that serves has each CLI checked once, goes by what was seen, and never trusts memory to one that failed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process import capability
from cli_session_proxy.backends.claude.process.observed import NAMES, Name, Observation, Observed
from cli_session_proxy.commands import doctor
from cli_session_proxy.commands.doctor import _was_checked
from cli_session_proxy.selfcheck import service
from cli_session_proxy.selfcheck.keeping import KeptBinaries, sha256_of
from cli_session_proxy.selfcheck.running import Report
from cli_session_proxy.selfcheck.service import SelfChecks, by_subject
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sqlite.store import SqliteStore

from ..until import until

HELP = "Usage\n  -p, --print\n  --session-id <id>\n  --resume [id]\n  --input-format <format>\n"
Binary = Callable[[str], Path]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config", claude_bin=tmp_path / "bin" / "claude")


@pytest.fixture
def install(tmp_path: Path) -> Binary:
    """`install("2.1.330")`: a program of that version lies there. It says so, and does nothing else."""

    def make(version: str) -> Path:
        place = tmp_path / "bin" / "claude"
        place.parent.mkdir(exist_ok=True)
        fresh = place.with_name("fresh")
        text = f'#!/bin/sh\ncase "$1" in --version) echo "{version} (Claude Code)";; *) printf "{HELP}";; esac\n'
        fresh.write_text(text.replace("\n  ", "\\n  "))
        fresh.chmod(0o755)
        os.replace(fresh, place)
        return place

    return make


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of these tests are kept like programs. What was learned of CLIs, in other tests of this process too,
    is forgotten: the service looks at each that is known."""
    monkeypatch.setattr("cli_session_proxy.selfcheck.keeping._PROGRAMS", (b"#!",))
    for known in ("_probed", "_observed", "_replacements"):
        monkeypatch.setattr(capability, known, {})


def forget_all() -> None:
    """As a restart does."""
    for known in (capability._probed, capability._observed, capability._replacements):
        known.clear()


class Checker:
    """In place of the real check: what fails in which version, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: dict[str, tuple[Name, ...]] = {}
        self.why: str | None = None
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        monkeypatch.setattr(service, "check", self.check)

    async def check(self, path: Path, _settings: Settings) -> Report:
        version = (await capability.probe(path, {})).version if path.name != "claude" else self._version(path)
        self.asked.append(version)
        await self.go.wait()
        if self.why is not None:
            return Report(path, version, why=self.why)
        failed = self.fails.get(version, ())
        observed: Observed = {
            name: Observation.of(name, "failed", "it did not") if name in failed else Observation.of(name, "ok")
            for name in NAMES
        }
        return Report(path, version, "2026-11-23", 5.0, observed)

    @staticmethod
    def _version(path: Path) -> str:
        return path.read_text().split('echo "')[1].split(" ")[0]


@pytest.fixture
async def checker(monkeypatch: pytest.MonkeyPatch) -> Checker:
    return Checker(monkeypatch)


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[SqliteStore, list[str]]]:
    store = SqliteStore(settings.var / "chains.sqlite3")
    settings.var.mkdir(exist_ok=True)
    await store.open()
    said: list[str] = []
    running = asyncio.create_task(SelfChecks(settings, store, said.append).run())
    try:
        yield store, said
    finally:
        running.cancel()
        await asyncio.wait({running})
        await store.close()


async def probed(settings: Settings) -> capability.Capability:
    assert settings.claude_bin is not None
    return await capability.probe(settings.claude_bin, {})


async def decided(settings: Settings) -> capability.Capability:
    """The CLI, once what was seen of it decides."""

    async def is_observed() -> bool:
        return bool((await probed(settings)).observed)

    await until(is_observed)
    return await probed(settings)


async def test_what_was_seen_decides_and_is_found_out_once(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    binary = install("2.1.330")
    checker.fails["2.1.330"] = ("words", "claim_session")
    async with serving(settings) as (store, said):
        before = await probed(settings)
        assert before.client_composed
        assert before.takes_claim
        cli = await decided(settings)
        assert not cli.client_composed
        assert not cli.takes_claim
        assert cli.takes_parameters
        assert before == cli  # a process that was started before serves on
        assert "failed at `words` (it did not)" in cli.cannot("words", "do it")
        ((of, observed),) = by_subject(await store.findings()).items()
        assert of == (sha256_of(binary), "2.1.330")
        assert len(observed) == len(NAMES)
        assert said == []  # nothing that memory stands on
    capability._probed.clear()
    capability._observed.clear()
    async with serving(settings):
        cli = await decided(settings)
        assert not cli.takes_claim
    assert checker.asked == ["2.1.330"]


async def test_of_two_proxies_on_one_store_one_checks(
    settings: Settings, install: Binary, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "POLL_INTERVAL", 0.01)
    install("2.1.330")
    checker.go.clear()
    async with serving(settings), serving(settings):
        await probed(settings)
        await until(lambda: checker.asked)
        checker.go.set()
        await decided(settings)
    assert checker.asked == ["2.1.330"]


async def test_a_check_that_cannot_be_run_decides_nothing(
    settings: Settings, install: Binary, checker: Checker, caplog: pytest.LogCaptureFixture
) -> None:
    install("2.1.330")
    checker.why = "no process could be started for it"
    async with serving(settings) as (store, _said):
        await probed(settings)
        await until(lambda: checker.asked)
        await until(lambda: "self_check_not_run" in caplog.text)
        assert not (await probed(settings)).observed
        assert by_subject(await store.findings()) == {}


async def test_a_check_that_could_not_be_run_is_tried_again_and_told_by_doctor(
    settings: Settings, install: Binary, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY", 0.01)
    monkeypatch.setattr(service, "CLAIM", 0.0)
    install("2.1.330")
    checker.why = "the disk is full"
    async with serving(settings) as (store, _said):
        await probed(settings)
        await until(lambda: len(checker.asked) == service.TRIES)
        cli, known = await probed(settings), await store.findings()
        told = _was_checked(cli, settings, known)
        assert (told.level, told.says) == ("warning", "it could not be run: the disk is full")
        capability._probed.clear()
        checker.why = None
        await probed(settings)
        await decided(settings)
    assert len(checker.asked) == service.TRIES + 1


async def test_what_memory_stands_on_and_fails_in_use_is_replaced_without_a_restart(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    async with serving(settings) as (_store, said):
        await kept(settings)
        install("2.1.331")
        await until(lambda: _runs(settings, "2.1.331"))
        capability.failed(await decided(settings), "place", "nothing of its answers there")
        await until(lambda: said)
        assert await _runs(settings, "2.1.330")
        assert "failed in use (place: nothing of its answers there)" in said[0]


async def test_a_version_that_fails_is_replaced_by_the_last_that_passed(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    checker.fails["2.1.331"] = ("records",)
    async with serving(settings) as (_store, said):
        old = await kept(settings)
        checker.go.clear()
        new = install("2.1.331")
        now = await probed(settings)  # until it was checked, too
        await until(lambda: len(checker.asked) == 2)
        assert (now.version, now.observed) == ("2.1.330", old.observed)
        assert now.path.is_relative_to(settings.var / "cli")
        checker.go.set()
        await until(lambda: said)
        assert (await probed(settings)).version == "2.1.330"
        (words,) = said
        assert words.startswith(f"Claude CLI 2.1.331 at {new} failed its self-check (records: it did not): turns go on")
        install("2.1.332")
        await until(lambda: _runs(settings, "2.1.332"))
    assert checker.asked == ["2.1.330", "2.1.331", "2.1.332"]


async def test_a_version_that_uses_no_login_is_replaced_where_no_key_is_set(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    checker.fails["2.1.331"] = ("login",)
    async with serving(settings) as (_store, said):
        await kept(settings)
        install("2.1.331")
        await probed(settings)
        await until(lambda: said)
        assert (await probed(settings)).version == "2.1.330"
        assert "2.1.331" in said[0]
        assert "turns go on with version 2.1.330" in said[0]
    keyed = settings.model_copy(update={"claude_env": {"ANTHROPIC_API_KEY": "sk-ant-fake"}})
    async with serving(keyed) as (_store, said):
        await until(lambda: _runs(keyed, "2.1.331"))
        assert said == []


async def kept(settings: Settings) -> capability.Capability:
    """The CLI that was decided on, once its copy is kept and was asked what it can do."""
    found = await decided(settings)
    await until(lambda: [one for one in capability._probed if one[0].startswith(str(settings.var))])
    return found


async def _runs(settings: Settings, version: str) -> bool:
    return (await probed(settings)).version == version


async def test_the_last_that_passed_is_still_there_after_a_restart(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    async with serving(settings):
        await kept(settings)
    forget_all()
    checker.fails["2.1.331"] = ("round_trip",)
    install("2.1.331")
    async with serving(settings) as (_store, said):
        await probed(settings)
        await until(lambda: said)
        cli = await probed(settings)
        assert cli.version == "2.1.330"
        assert cli.does("round_trip")


async def test_the_last_that_passed_is_checked_again_where_the_check_has_got_more(
    settings: Settings, install: Binary, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade of the proxy went back to the installed CLI, which had failed."""
    install("2.1.330")
    async with serving(settings):
        await kept(settings)
    forget_all()
    monkeypatch.setattr(service, "RUN", "run of a later version")
    checker.fails["2.1.331"] = ("round_trip",)
    install("2.1.331")
    async with serving(settings) as (_store, said):
        await probed(settings)
        await until(lambda: said)
        assert "turns go on with version 2.1.330" in said[0]
        assert await _runs(settings, "2.1.330")
    assert checker.asked == ["2.1.330", "2.1.331", "2.1.330"]


async def test_without_one_that_passed_the_sentence_says_what_to_do(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    async with serving(settings):
        await decided(settings)
    forget_all()
    shutil.rmtree(settings.var / "cli")
    checker.fails["2.1.331"] = ("place",)
    install("2.1.331")
    async with serving(settings) as (_store, said):
        await probed(settings)
        await until(lambda: said)
        assert (await probed(settings)).version == "2.1.331"
        package = "@anthropic-ai/claude-code@2.1.330"
        assert said[0].endswith(f"use version 2.1.330: npm install -g {package}, or claude install 2.1.330")


async def test_what_fails_in_use_is_not_used_again_after_a_restart_either(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    async with serving(settings) as (store, _said):
        cli = await decided(settings)
        capability.failed(cli, "apply_flag_settings", "it said: no such setting")
        assert not (await probed(settings)).takes_parameters
        await until(lambda: _is_kept(store))
    for known in (capability._probed, capability._observed):
        known.clear()
    async with serving(settings):
        cli = await decided(settings)
        assert not cli.takes_parameters
        assert cli.takes_claim
    assert checker.asked == ["2.1.330"]


async def test_what_fails_in_use_while_a_check_runs_stands_in_memory_and_in_the_store(
    settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    checker.go.clear()
    async with serving(settings) as (store, _said):
        cli = await probed(settings)
        await until(lambda: checker.asked)
        capability.failed(cli, "apply_flag_settings", "it said: no such setting")
        checker.go.set()
        await until(lambda: _is_kept(store))
        await until(lambda: _takes_parameters(settings, False))
        (kept,) = by_subject(await store.findings()).values()
        assert (await probed(settings)).observed == kept
        assert {name for name, one in kept.items() if one.outcome != "ok"} == {"apply_flag_settings"}
        told = _was_checked(await probed(settings), settings, await store.findings())
        assert f"{len(NAMES) - 1} of {len(NAMES)} seen to work" in told.says


@pytest.mark.parametrize(("name", "level"), [("frames", "error"), ("set_model", "warning")])
async def test_doctor_tells_what_failed_in_use_before_any_check_has_ended(
    name: Name, level: str, settings: Settings, install: Binary, checker: Checker
) -> None:
    install("2.1.330")
    checker.why = "the disk is full"
    async with serving(settings) as (store, _said):
        cli = await probed(settings)
        await until(lambda: checker.asked)
        capability.failed(cli, name, "it said: no")
        await until(lambda: _is_kept(store))
        told = _was_checked(cli, settings, await store.findings())
        assert (told.level, told.mend) == (level, "doctor --check-cli does it now")
        assert f"failed in use ({name}: it said: no), and no check of it has ended" in told.says


async def test_what_doctor_finds_out_at_once_is_applied_without_a_restart(
    settings: Settings, install: Binary, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY", 0.01)
    monkeypatch.setattr(doctor, "check", checker.check)
    install("2.1.330")
    async with serving(settings):
        cli = await decided(settings)
        for fails in (("apply_flag_settings",), ()):
            checker.fails["2.1.330"] = fails
            assert len(await doctor._checked(cli, settings)) == len(NAMES) + 1
            await until(partial(_takes_parameters, settings, not fails))
    assert len(checker.asked) == 3


async def _takes_parameters(settings: Settings, whether: bool) -> bool:
    return (await probed(settings)).takes_parameters is whether


async def _is_kept(store: SqliteStore) -> bool:
    return any(one.found.get("in_use") for one in await store.findings())


def test_of_the_binaries_that_passed_the_last_two_are_kept(tmp_path: Path) -> None:
    kept = KeptBinaries(tmp_path / "kept")
    program = tmp_path / "claude"
    hashes = []
    for number in range(3):
        program.unlink(missing_ok=True)
        program.write_text(f"#! {number}")
        hashes.append(sha256_of(program))
        place = kept.keep(program, hashes[-1])
        assert place is not None
        assert place.stat().st_ino == program.stat().st_ino
        os.utime(place.parent, (number, number))
    assert [kept.of(one) is not None for one in hashes] == [False, True, True]
    program.write_text("#! written over")  # in place: it is another one by now
    assert kept.of(hashes[-1]) is None


def test_a_script_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "claude").write_text("#!/bin/sh\nexec /somewhere/claude")
    assert KeptBinaries(tmp_path / "kept").keep(tmp_path / "claude", "0" * 64) is None
