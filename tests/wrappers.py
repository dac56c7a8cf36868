"""A `claude` that is a script around the real one, as asdf, volta, nix and companies have it."""

from __future__ import annotations

from pathlib import Path

KINDS = {"exec": 'exec "{real}" "$@"', "no exec": '"{real}" "$@"\nexit $?'}


def wrapped(real: Path, folder: Path, kind: str) -> Path:
    """The script's path; for the kind "plain" the real one's."""
    if kind == "plain":
        return real
    folder.mkdir(exist_ok=True)
    script = folder / "claude"
    script.write_text("#!/bin/sh\n" + KINDS[kind].format(real=real) + "\n")
    script.chmod(0o755)
    return script
