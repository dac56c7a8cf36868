"""Where the CLI keeps a session's file."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def project_dir(config_dir: Path, cwd: Path) -> Path:
    """The folder in which the CLI keeps the sessions of this working directory."""
    return config_dir / "projects" / re.sub(r"[^a-zA-Z0-9]", "-", os.path.realpath(cwd))


def path_of(config_dir: Path, cwd: Path, session_id: str) -> Path:
    return project_dir(config_dir, cwd) / f"{session_id}.jsonl"


def find_elsewhere(config_dir: Path, session_id: str, expected: Path) -> list[Path]:
    """The same session's file under other working directories' folders (moved sandbox, doubled prefix)."""
    found = (config_dir / "projects").glob(f"*/{session_id}.jsonl")
    return sorted(path for path in found if path != expected)


def beside(path: Path) -> Path:
    """The folder of the session's name beside its transcript: large tool results, sub-agents' own transcripts."""
    return path.with_suffix("")


def remove(path: Path) -> None:
    """Remove a transcript and the folder beside it."""
    path.unlink(missing_ok=True)
    shutil.rmtree(beside(path), ignore_errors=True)
