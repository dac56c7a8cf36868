"""simonw's llm: a model of extra-openai-models.yaml, its conversation in Python and `-c` on the command line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from cli_session_proxy.testing.upstream import Upstream

from ..conftest import MakeSettings
from .remembering import TURNS, answer_to, facts, served_without_cli

# llm starts in 1 to 2 s (s)
TIMEOUT = 60.0
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
    async with served_without_cli(make_settings(), upstream) as proxy:
        (home / "extra-openai-models.yaml").write_text(MODELS.format(url=proxy.url))
        for turn, text in enumerate(facts(2)):
            more = ["-c"] if turn else ["-m", "proxied"]
            process = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).parent / "llm"), *more, text,
                env={"LLM_USER_PATH": str(home), "HOME": str(home), "PATH": "/usr/bin:/bin"},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await asyncio.wait_for(process.communicate(), TIMEOUT)
            assert said.decode().strip() == answer_to(turn)
        await proxy.assert_one_chain(facts(2))
