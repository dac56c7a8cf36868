"""Three attempts on the real CLI: haiku fails, sonnet fails, opus is told at the model's messages what both tried."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.engine.committing import CommitOrder
from cli_session_proxy.git_memory import git
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Reply
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, running
from .repository import Repo

TRIED = {
    "haiku": ("waited longer", "the pool was empty, waiting changes nothing"),
    "sonnet": ("doubled the pool", "the leak fills any pool"),
}


def summary(model: str) -> Reply:
    fix, why = TRIED[model]
    said = {"headline": fix, "root_cause": f"{model} thinks: connections", "fix": fix, "reasoning": "least change",
            "investigation": ["ran the test"], "confidence": "low", "why_it_failed": why}  # fmt: skip
    return Reply(json.dumps(said))


def told(seen: Seen) -> list[str]:
    return [fact for facts in TRIED.values() for fact in facts if fact in json.dumps(seen.messages[0])]


EVERYTHING = [fact for facts in TRIED.values() for fact in facts]


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    repo = Repo(tmp_path / "repo")
    repo.commit("base", file="base.txt")
    repo("checkout", "--quiet", "-b", "fix")
    return repo


@pytest.fixture
def settings(make_settings: MakeSettings, claude_2: Path, repo: Repo) -> Settings:
    profile: dict[str, Any] = {"git_memory": {"repo": str(repo.path), "fix_id": "login-500"}}
    return make_settings(claude_bin=claude_2, profiles={"fixer": profile}, profile="fixer")


async def attempts(settings: Settings, upstream: Upstream) -> None:
    """Haiku and sonnet try, each as an agent of its own, and fail."""
    for model in ("haiku", "sonnet"):
        async with running(settings) as engine:
            await ask(engine, "make the login test pass", agent=model, model=model)
            upstream.when("why_it_failed", summary(model))  # the schema is the newest text
            done = await engine.commit("local", model, CommitOrder(outcome="failed"))
            side = upstream.requests[-1]
            assert model in side.body["model"]
            assert "tools" not in side.body or not side.body["tools"]
            assert TRIED[model][1] in done.message
            before = upstream.requests[-2]
            assert told(side) == told(before) == ([] if model == "haiku" else list(TRIED["haiku"]))
            await ask(engine, "thanks", agent=model, model=model)
            # The side turn is no part of the chain: what follows extends what was said before it.
            assert upstream.requests[-1].prefix_kept(before) == 1.0
            assert "This conversation ends here" not in upstream.requests[-1].raw.decode()


async def test_opus_is_told_what_haiku_and_sonnet_tried_and_why_they_failed(
    settings: Settings, upstream: Upstream, repo: Repo
) -> None:
    await attempts(settings, upstream)
    async with running(settings) as engine:
        await ask(engine, "make the login test pass", agent="opus", model="opus")
        first = upstream.requests[-1]
        assert "opus" in first.body["model"]
        assert told(first) == EVERYTHING
        turn = await ask(engine, "go on", agent="opus", model="opus")
        assert upstream.requests[-1].prefix_kept(first) == 1.0
    # After a repair too: the block is part of the turn's record.
    assert settings.claude_config_dir is not None
    shutil.rmtree(settings.claude_config_dir / "projects")
    async with running(settings) as engine:
        last = upstream.requests[-1]
        turn = await ask(engine, "and now?", agent="opus", model="opus")
        assert turn.continuity == "rebuilt"
        assert upstream.requests[-1].prefix_kept(last) == 1.0
        assert told(upstream.requests[-1]) == EVERYTHING


@pytest.mark.full  # what it reads of a squash merge: test_reading.py
async def test_the_same_from_the_repository_alone_over_a_squash_merge(
    settings: Settings, upstream: Upstream, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attempts(settings, upstream)
    repo("checkout", "--quiet", "main")
    (repo.path / "merged.txt").write_text("1")
    repo("merge", "--quiet", "--squash", "fix")
    repo("commit", "--quiet", "--allow-empty", "--no-edit")
    repo("branch", "-D", "fix")
    clone = tmp_path / "elsewhere"
    repo("clone", "--quiet", f"file://{repo.path}", str(clone))
    assert settings.claude_config_dir is not None
    for lost in (settings.var, settings.claude_config_dir, repo.path):
        shutil.rmtree(lost)
    clone.rename(repo.path)
    monkeypatch.setattr(git, "_first_used", {})  # as after a restart
    async with running(settings) as engine:
        await ask(engine, "make the login test pass", agent="opus", model="opus")
    assert told(upstream.requests[-1]) == EVERYTHING
