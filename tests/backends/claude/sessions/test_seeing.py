"""What the model was sent, told from the CLI's records: it is what reached the provider."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.backends.claude.sessions.seeing import _seen
from cli_session_proxy.domain.models import Usage
from cli_session_proxy.export import explain
from turnfault.provider.upstream import Upstream

from ....clis import old_cli_in_full
from ....conftest import MakeSettings
from ....talking import ask, heard, running


@old_cli_in_full
async def test_it_is_what_reached_the_provider_after_a_repair_too(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude)
    async with running(settings) as engine:
        first = await ask(engine, "remember: the colour is teal")
        await ask(engine, "remember: the city is Porto")
        session = await engine.store.session(first.session_id or "")
        assert session is not None
        await asyncio.to_thread(Path(session.transcript).write_text, "")
        last = await ask(engine, "what is the colour?")
        found = await engine.backend.request_of(last)
        assert found is not None
        assert (found.turns, found.missing, found.summarised, found.extends) == (3, (), 0, True)
        asked = [block["text"] for role, block in found.messages if role == "user" and block["type"] == "text"]
        assert [words for words in heard(upstream) if "remember" in words or "what is" in words] == [
            words for words in asked if "remember" in words or "what is" in words
        ]
        beginning = await engine.backend.request_of(first)
        assert beginning is not None
        assert (beginning.turns, beginning.missing, beginning.extends) == (1, (), None)
        # a record of the chain that is lost is told, by the turn
        records = await engine.store.records(last.id)
        path = await engine.store.path(last.id)
        second = {record.uuid for record in await engine.store.own_records(path[1].id)}
        lost = _seen(path, [record for record in records if record.uuid not in second], records)
        assert (lost.missing, lost.summarised) == ((path[1].id,), 0)


async def test_the_command_to_go_on_by_hand_goes_on_and_the_chain_takes_it_in(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        turn = await ask(engine, "remember: the colour is teal")
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        compared = await engine.backend.compare(agent, turn)
        assert compared.by_hand is not None
        env = {"PATH": os.environ["PATH"], **settings.claude_env}
        process = await asyncio.create_subprocess_shell(
            f"{compared.by_hand} -p 'what is the colour?'", env=env, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
        assert b"teal" in said


def test_a_command_names_a_folder_only_where_it_is_not_the_usual_one(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    usual = make_settings(claude_config_dir=None, claude_bin=None)
    own = make_settings(claude_bin=None, claude_config_dir=tmp_path / "a b")
    assert environment.resume_command(usual, Path("/s p"), "id") == "cd '/s p' && claude --resume id"
    named = f"CLAUDE_CONFIG_DIR='{tmp_path}/a b'"
    assert environment.resume_command(own, Path("/s"), "id") == f"cd /s && {named} claude --resume id"


def test_the_verdict_is_one_line() -> None:
    usage = Usage(input_tokens=2, cache_read_tokens=98)
    assert explain.context(14, 0, 0, usage, extends=True) == (
        "nothing forgotten: 14 of 14 turns were sent; 98 % of it was read from the cache"
    )
    assert explain.context(14, 0, 10, Usage(), extends=None) == (
        "nothing forgotten: 4 of 14 turns were sent, 10 as a summary"
    )
    assert explain.context(14, 2, 0, usage, extends=False) == (
        "forgotten: 2 of 14 turns not sent; 98 % of it was read from the cache; this request does not "
        "begin with the one before it"
    )
