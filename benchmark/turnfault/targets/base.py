"""What every target offers, and the environment in which it runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, Protocol

import psutil

from ..provider.upstream import Upstream
from ..talk import Talk

# `id`: the target keeps the conversation, under a name; `history`: the client sends all of it each time. The others are
# what can be broken: the CLI's files, the target's processes.
Surface = Literal["id", "history", "files", "process"]

FAKE_KEY = "sk-ant-fake-continuity"
# Seconds: for a turn, for a target to be ready, and to end by itself.
TURN = 90.0
START = 60.0
STOP = 15.0


class Target(Protocol):
    """`config`: where its CLI keeps transcripts, where that is known."""

    @property
    def surfaces(self) -> frozenset[Surface]: ...

    @property
    def config(self) -> Path | None: ...

    def talk(self, agent: str, *, by_id: bool) -> Talk:
        """A new conversation. `by_id`: the target keeps it under this name; else the client sends all of it."""

    async def up(self) -> None:
        """Start it, and wait until it is ready. Raises `TargetError`."""

    async def down(self, *, kill: bool = False) -> None:
        """End it and all that it started. `kill`: without a chance to write anything."""

    def kill_clis(self) -> bool:
        """End every CLI below it. False where there is none."""


def environment(home: Path, upstream: Upstream, config: Path) -> dict[str, str]:
    """Built up, never inherited, but for PATH and what a language needs to find its modules: no account and none of the
    user's files can be reached from it."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH", "NODE_PATH") if name in os.environ}
    home.mkdir(parents=True, exist_ok=True)
    return passed | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "CLAUDE_CONFIG_DIR": str(config),
        "ANTHROPIC_API_KEY": FAKE_KEY,
        "ANTHROPIC_BASE_URL": upstream.url,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def transcript_of(config: Path | None, talk: Talk) -> Path | None:
    """The newest transcript that holds the conversation. Each of several hosts has a folder of its own in `config`."""
    if config is None:
        return None
    files = sorted(config.glob("**/projects/*/*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    key = talk.facts[-1].key
    return next((path for path in files if key in path.read_text(encoding="utf-8", errors="replace")), None)


def kill(processes: list[psutil.Process]) -> bool:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(processes, timeout=STOP)
    return bool(processes)
