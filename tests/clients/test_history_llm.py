"""simonw's llm: a model of extra-openai-models.yaml, its conversation in Python and `-c` on the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from .remembering import TURNS, answer_to, facts, served_without_cli

MODELS = """
- model_id: proxied
  model_name: sonnet
  api_base: "{url}"
  api_key_name: proxied
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "llm"
    folder.mkdir()
    monkeypatch.setenv("LLM_USER_PATH", str(folder))
    (folder / "keys.json").write_text('{"proxied": "none"}')
    return folder


async def test_ten_turns_are_one_chain(make_settings: MakeSettings, upstream: Upstream, home: Path) -> None:
    import llm  # noqa: PLC0415 - it reads LLM_USER_PATH when it is imported

    def talk() -> list[str]:
        conversation = llm.get_model("proxied").conversation()
        return [conversation.prompt(text, stream=bool(turn % 2)).text() for turn, text in enumerate(facts())]

    async with served_without_cli(make_settings(), upstream) as proxy:
        (home / "extra-openai-models.yaml").write_text(MODELS.format(url=proxy.url))
        assert await asyncio.to_thread(talk) == [answer_to(turn) for turn in range(TURNS)]
        await proxy.assert_one_chain(facts())


async def test_the_command_continues_its_last_conversation(
    make_settings: MakeSettings, upstream: Upstream, home: Path
) -> None:
    from llm.cli import cli  # noqa: PLC0415 - as above

    def command(*arguments: str) -> str:
        """As `llm` on the command line, which takes two seconds of a processor to start."""
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output.strip()

    async with served_without_cli(make_settings(), upstream) as proxy:
        (home / "extra-openai-models.yaml").write_text(MODELS.format(url=proxy.url))
        for turn, text in enumerate(facts(3)):
            more = ["-c"] if turn else ["-m", "proxied"]
            assert await asyncio.to_thread(command, *more, text) == answer_to(turn)
        await proxy.assert_one_chain(facts(3))
