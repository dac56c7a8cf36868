"""What a turn wants of the process that says it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....domain.client_tools import Answers, ToolOptions
from ....domain.models import Block
from ....domain.windows import Window
from ....settings import Profile
from ...base import Remedy


@dataclass(frozen=True, slots=True)
class Plan:
    """What a turn wants of its process; `prompt` is what will be said to it, beside the `answers` to its calls.

    `plain`: it runs without its parameters, so that the CLI may compact. `window`: how much of the path is shown.
    """

    model: str
    system: str | None
    effort: str | None
    profile: Profile
    prompt: tuple[Block, ...]
    wants: ToolOptions = field(default_factory=ToolOptions)
    answers: Answers = field(default_factory=Answers)
    remedies: frozenset[Remedy] = frozenset()
    plain: bool = False
    window: Window | None = None
