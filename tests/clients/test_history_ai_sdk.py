"""The Vercel AI SDK with its whole history and no name, on each of its providers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, MakeSettings, required
from ..matrix import rest_in_full
from ..outputs import output_of
from .remembering import answer_to, facts, served_without_cli

TALK = Path(__file__).parent / "ai_sdk" / "talk.mjs"
PACKAGES = ROOT / ".tools" / "ai-sdk"
TURNS = 5


@pytest.fixture(scope="session")
def packages() -> Path:
    required(PACKAGES / "node_modules" / "ai", "make tools", what="the Vercel AI SDK")
    return PACKAGES


async def talk(packages: Path, wire: str, url: str, texts: list[str], *, script: Path = TALK) -> list[str]:
    with script.open("rb") as program:
        said = await output_of(
            "node", "--input-type=module", "-", wire, url, json.dumps(texts), stdin=program, cwd=packages,
            env={"PATH": os.environ["PATH"], "AI_SDK_LOG_WARNINGS": "false"},
        )  # fmt: skip
    answers: list[str] = json.loads(said)
    return answers


@pytest.mark.parametrize("wire", rest_in_full("responses", "google", "chat", "anthropic", quick=2))
async def test_five_turns_are_one_chain(
    make_settings: MakeSettings, upstream: Upstream, packages: Path, wire: str
) -> None:
    async with served_without_cli(make_settings(), upstream) as proxy:
        url = proxy.url.replace("/v1", "/v1beta") if wire == "google" else proxy.url
        answers = await talk(packages, wire, url, facts(TURNS))
        assert answers == [answer_to(turn) for turn in range(TURNS)]
        await proxy.assert_one_chain(facts(TURNS))
