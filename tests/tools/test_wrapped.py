"""A `claude` that is a script around the real one does all that the real one does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli_session_proxy.errors import InvalidRequest
from turnfault.provider.upstream import Upstream

from ..backends.claude.process.test_ahead import pid, ready
from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..talking import ask, claude, heard, running, text
from ..wrappers import KINDS, wrapped
from .test_loops import TOOLS, both, calls, result, results

# A script that stays in front of the CLI is the harder kind; `tests/recovery/test_orphans.py` has it, too.
one_kind = pytest.mark.parametrize("kind", rest_in_full("no exec", *(kind for kind in KINDS if kind != "no exec")))


@one_kind
async def test_the_clients_tools_are_called_and_their_results_brought(
    kind: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=wrapped(claude_2, tmp_path / "bin", kind))
    async with running(settings) as engine:
        weather, time = calls(await both(engine, upstream))
        answered = await ask(engine, results(result(time, "noon"), result(weather, "sunny")), tools=TOOLS)
        assert (answered.status, answered.continuity) == ("completed", "warm")
        weather, time = calls(await both(engine, upstream))
    async with running(settings) as engine:  # nobody waits for the results any more
        answered = await ask(engine, results(result(time, "noon"), result(weather, "sunny")), tools=TOOLS)
    assert (answered.status, text(answered)) == ("completed", "The tool said: noon")


@one_kind
async def test_a_spare_is_taken_and_keeps_its_process(
    kind: str, claude_2: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    async with running(make_settings(claude_bin=wrapped(claude_2, tmp_path / "bin", kind), spares=1)) as engine:
        await ask(engine, "hello", agent="first")
        spare = await ready(engine)
        turn = await ask(engine, "hello", agent="second")
        assert pid(engine, turn) == spare
        assert await ready(engine) != spare


@one_kind
async def test_another_system_prompt_is_given_to_the_running_process(
    kind: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    async with running(make_settings(claude_bin=wrapped(claude_2, tmp_path / "bin", kind))) as engine:
        await ask(engine, "one", system="Be terse.")
        turn = await ask(engine, "two", system="Be verbose.")
    assert turn.continuity == "warm"
    assert b"Be verbose." in upstream.requests[-1].raw


@pytest.mark.full  # each time the next one has an old CLI behind a script
@one_kind
async def test_an_old_cli_behind_a_script_works_as_an_old_one(
    kind: str, claude_1: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    async with running(make_settings(claude_bin=wrapped(claude_1, tmp_path / "bin", kind))) as engine:
        for said in ("one", "/clear", "three"):
            await ask(engine, said)
        with pytest.raises(InvalidRequest, match=r"1\.0\.120 at .* cannot offer .* 2\.1\.295 and newer can"):
            await ask(engine, "four", tools=TOOLS)
    assert heard(upstream) == ["one", "/clea", "r", "three"]


@one_kind
@pytest.mark.parametrize("upgraded", rest_in_full(False, True))
@pytest.mark.full
async def test_a_script_that_starts_another_version_from_now_on_is_followed(
    upgraded: bool, kind: str, claude_1: Path, claude_2: Path, make_settings: MakeSettings, upstream: Upstream,
    tmp_path: Path,
) -> None:  # fmt: skip
    """As asdf's and volta's do: the script itself is not changed."""
    before, after = (claude_1, claude_2) if upgraded else (claude_2, claude_1)
    current = tmp_path / "current"
    current.symlink_to(before)
    async with running(make_settings(claude_bin=wrapped(current, tmp_path / "bin", kind))) as engine:
        first = await ask(engine, "one")
        current.unlink()
        current.symlink_to(after)
        await claude(engine).pool.discard(str(first.session_id))
        await ask(engine, "two")
        await ask(engine, "three")
        if upgraded:
            assert len(calls(await both(engine, upstream))) == 2
        else:
            with pytest.raises(InvalidRequest, match=r"1\.0\.120"):
                await ask(engine, "four", tools=TOOLS)
    assert heard(upstream)[:3] == ["one", "two", "three"]


async def test_agents_that_start_at_once_ask_it_once(
    claude_2: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    script = wrapped(claude_2, tmp_path / "bin", "exec")
    asked = tmp_path / "asked"
    script.write_text(script.read_text().replace("exec", f'[ "$1" = -p ] || echo "$1" >> "{asked}"\nexec'))
    async with running(make_settings(claude_bin=script)) as engine:
        await asyncio.gather(*(ask(engine, "hello", agent=f"agent-{n}") for n in range(2)))
    assert sorted(asked.read_text().split()) == ["--help", "--version"]
