"""The Dockerfile as data: its instructions in order, with continued lines joined."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from ..conftest import ROOT


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    text: str

    def words(self) -> list[str]:
        """The JSON form's words, or the shell's."""
        words: list[str] = json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)
        return words


def instructions() -> list[Instruction]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def only(name: str) -> Instruction:
    (found,) = [one for one in instructions() if one.name == name]
    return found


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for one in instructions() if one.name == "ENV" for word in one.words())


def health_check() -> list[str]:
    """The command that the engine runs; its options are for the engine."""
    words: list[str] = json.loads(only("HEALTHCHECK").text.partition("CMD")[2])
    return words


def start() -> list[str]:
    return [*only("ENTRYPOINT").words(), *only("CMD").words()]
