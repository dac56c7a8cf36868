"""A row of the matrix: one thing that breaks after some acknowledged turns, and what must come of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .score import Fact
from .talk import Talk

Says = Mapping[int, str]
Breaks = Callable[[Talk], Awaitable[None]]
BOTH = ("2.1", "1.0")
NEW = ("2.1",)


def void(first: int, last: int) -> Says:
    """What CLI 1.0.120 makes of thoughts: from the 5th turn on it adds a reminder to the request, and what was sealed
    over a request without it is void. Said at each of these turns."""
    return dict.fromkeys(
        range(first, last + 1), r"would have refused \d+ thoughts? of earlier answers, because the text"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """`continuity` is what the proxy must say of the next turn.

    `says` is what a person reads in the markdown dump: a pattern for each turn by its number (0: at some turn), and
    of no other turn anything broken; a pair where CLI 1.0.x comes to something else.
    `prefix`: the next request extends the last one byte for byte (2.1.x). `quick`: the CLIs with which every run of
    the tests tries it; the full matrix tries all of `clis`. `bare`: it means something without a proxy. `probe` is
    the next turn's text, `refused` the error that it must get, with the chain as before. `after` looks at what
    reached the model with it. `thinks`: the model thinks before each answer, which it cannot where somebody goes on by
    hand: another head of the request makes every thought void. `calls`: the requests upstream that any turn from the
    breakage on may take for its prompt (one for a summary has another). `summarised`: the model knows the acknowledged
    turns by a summary. `replaced`: another CLI comes in the place of the one that was there. `on_hosts`: it means
    something where the next turn is at another host.
    """

    group: str
    name: str
    breaks: Breaks
    clis: tuple[str, ...] = BOTH
    quick: tuple[str, ...] = ()
    bare: bool = True
    continuity: str | None = None
    says: Says | tuple[Says, Says] = field(default_factory=dict)
    link: str | None = None
    prefix: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    probe: Callable[[], Fact] | None = None
    refused: str | None = None
    wrapped: bool = False
    replaced: bool = False
    after: Callable[[Talk], None] | None = None
    thinks: bool = True
    calls: int | None = None
    summarised: bool = False
    on_hosts: bool = True

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"
