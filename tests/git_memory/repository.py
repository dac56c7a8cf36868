"""A real repository, driven by the git program as a person would."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class Repo:
    def __init__(self, path: Path, *options: str, start: bool = True) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        if start:
            self("init", "--quiet", "--initial-branch=main", *options)

    def __call__(self, *words: str, stdin: str = "", **environment: str) -> str:
        person = {"GIT_AUTHOR_NAME": "Ada", "GIT_AUTHOR_EMAIL": "ada@example.org"}
        person |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in person.items()}
        env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "GIT_EDITOR": "true", **person, **environment}
        done = subprocess.run(
            ["git", *words], cwd=self.path, env=env, input=stdin.encode(), capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode("utf-8", "replace").strip()

    def commit(self, message: str, *options: str, file: str | None = None) -> str:
        if file is not None:
            (self.path / file).write_text(message)
            self("add", file)
        self("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", *options, stdin=message)
        return self("rev-parse", "HEAD")

    def message(self, commit: str = "HEAD") -> str:
        return self("log", "-1", "--format=%B", commit)


def attempt(number: int, *, fix: str = "login-500", model: str = "haiku", why: str = "the test still fails") -> str:
    """A commit message as ours are."""
    return (
        f"Failed attempt {number}: retried the query\n\nRoot cause:\ncause {number}\n\nFix:\nfix {number}\n\n"
        f"Investigation:\n1. looked at db.py of {number}\n\nFix-Id: {fix}\nAttempt: {number}\nOutcome: failed\n"
        f"Agent: {model}-agent\nModel: {model}\nTurns: 3\nTokens: 10 read, 5 written\nWhy-It-Failed: {why}\n"
    )
