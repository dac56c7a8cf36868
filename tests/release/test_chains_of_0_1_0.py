"""Chains that 0.1.0 wrote go on: everything that its clients were acknowledged stands in the next requests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from turnfault.provider.upstream import Upstream

from ..chaos.checker import judge
from ..chaos.client import Caller
from ..chaos.journal import Asked, Told
from ..chaos.model import Model
from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..serving import serve
from .keeping import restored
from .writing import said

MORE_TURNS = 2


@pytest.mark.parametrize("transcripts", rest_in_full("gone", "there"))
async def test_a_conversation_of_0_1_0_goes_on_with_every_word(
    transcripts: str, claude_2: Path, upstream: Upstream, make_settings: MakeSettings, tmp_path: Path
) -> None:
    chains = tmp_path / "release"
    clients, journal = restored(chains)
    before = max(entry.number for entry in journal if isinstance(entry, Asked))
    model = Model(journal.append, before=before)
    if transcripts == "gone":
        shutil.rmtree(chains / "claude-config")
    upstream.behave = model.behave
    settings = make_settings(claude_bin=claude_2, var=chains / "var", claude_config_dir=chains / "claude-config")
    turn = max(turn for client in clients for turn in client.known)
    async with serve(settings, tmp_path) as (url, _):
        caller = Caller(journal.append, {})
        for _ in range(MORE_TURNS):
            for client in clients:
                turn += 1
                await said(caller, model, client, url, turn, 0)
        await caller.close()
    journal += [Told(number) for number, seen in model.seen.items() if seen.outcome == "answered"]
    verdict = judge(journal)
    assert verdict.faults == []
    assert verdict.counts["acknowledged"] == turn
    assert len(model.seen) == MORE_TURNS * len(clients)
