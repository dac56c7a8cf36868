"""What reached the model, told against what was acknowledged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from .provider.prompt_cache import share_read
from .provider.seen import Seen

FAULTS = ("doubled", "lost", "reordered", "foreign")
_TOKEN = re.compile(r"fact-\d+-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Fact:
    """One turn: what was said, what was answered, and the `key` by which it is known again.

    A key that is the whole text must arrive as a whole message, verbatim; a shorter one is counted.
    """

    text: str
    key: str
    answer: str = ""

    @property
    def whole(self) -> bool:
        return self.key == self.text

    @property
    def number(self) -> int:
        """Which one it was, of those with a short key."""
        return int(self.key.split("-")[1])


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of acknowledged turns. `prefix`: bytes of the request before the breakage that are still a prefix of
    this one ÷ its bytes. `cached`: of what that request wrote into the prompt cache, the share that this one reads
    (`provider.prompt_cache`). `refused`: the client got this error instead of an answer. `flattened`: told once, with
    their answers, but squeezed into one text of the user's with others."""

    acknowledged: int
    remembered: int = 0
    doubled: int = 0
    lost: int = 0
    reordered: int = 0
    foreign: int = 0
    prefix: float | None = None
    cached: float | None = None
    refused: str | None = None
    flattened: int = 0

    @property
    def whole(self) -> bool:
        """Every acknowledged turn once, in order, and nothing else."""
        faults = self.doubled + self.lost + self.reordered + self.foreign
        return self.refused is None and not faults and self.remembered == self.acknowledged

    @property
    def complete(self) -> bool:
        """As `whole`, but turns that are flattened count as well."""
        faults = self.doubled + self.lost + self.reordered + self.foreign
        return self.refused is None and not faults and self.remembered + self.flattened == self.acknowledged

    def __str__(self) -> str:
        if self.refused is not None:
            return f"no answer ({self.refused})"
        faults = [f"{getattr(self, name)} {name}" for name in (*FAULTS, "flattened")]
        return ", ".join(
            [f"{self.remembered}/{self.acknowledged}", *(one for one in faults if not one.startswith("0"))]
        )


def messages_of(seen: Seen) -> list[tuple[str, str]]:
    """(role, text) of each message; what the CLI adds on its own is left out."""
    told: list[tuple[str, str]] = []
    for message in seen.messages:
        one = Seen(seen.method, seen.path, {}, b"", {"messages": [message]})
        texts = one.texts()
        if texts:
            told.append((message["role"], "".join(text for _, text in texts)))
    return told


def score(
    seen: Seen, facts: Sequence[Fact], probe: Fact, before: Sequence[Seen], doubtful: Sequence[Fact] = ()
) -> Score:
    """How the request that carries `probe` tells the acknowledged `facts`, and extends each of those before it. A
    `doubtful` turn may be there, once, or not."""
    told = messages_of(seen)
    said = [text for role, text in told if role == "user"]
    answered = _answers(told)
    flattened = 0
    counts: list[tuple[int, int]] = []  # how often the words of a turn are there, and its answer
    places: list[tuple[int, int]] = []
    for fact in facts:
        wanted = _squeezed(fact.answer)
        within = [text for text in said if fact.text in text]
        once = not fact.whole and len(within) == 1 and within[0].count(fact.text) == 1
        if once and wanted and _squeezed(within[0].replace(fact.text, "")).count(wanted) == 1:
            # Told, with its answer in the same text of the user's: not as it was said.
            flattened += 1
            places.append((said.index(within[0]), within[0].index(fact.text)))
            continue
        times = sum(1 if "".join(of) == wanted else of.count(wanted) for of in answered)
        # Long answers are only found by their key: equal ones may stand more than once.
        counts.append((_count(said, fact), min(times, 1) if fact.whole else times))
        at = next((n for n, text in enumerate(said) if (text == fact.key if fact.whole else fact.key in text)), None)
        if at is not None:
            places.append((at, said[at].index(fact.key)))
    # Facts anywhere in the request that nobody acknowledged: a failed prompt, another agent's, a file of ours.
    known = {fact.key for fact in (*facts, *doubtful, probe)}
    strangers = set(_TOKEN.findall(seen.raw.decode("utf-8", "replace"))) - known
    return Score(
        acknowledged=len(facts),
        remembered=sum(pair == (1, 1) for pair in counts),
        doubled=sum(asked > 1 or told > 1 for asked, told in counts)
        + sum(_count(said, fact) > 1 for fact in (*doubtful, probe)),
        lost=sum(not asked or not told for asked, told in counts) + (_count(said, probe) < 1),
        reordered=sum(later < earlier for earlier, later in pairwise(places)),
        foreign=len(strangers),
        prefix=min((seen.prefix_kept(one) for one in before), default=None),
        cached=min((share_read(seen, one) for one in before), default=None),
        flattened=flattened,
    )


def _count(said: Sequence[str], fact: Fact) -> int:
    return sum(text == fact.key for text in said) if fact.whole else sum(text.count(fact.key) for text in said)


def _answers(told: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The assistant's messages, those that follow each other together: the API takes them as one. Where a stream was
    cut, a client may have been given what was said before the cut and what was said after it."""
    return [
        [_squeezed(text) for _, text in of] for role, of in groupby(told, lambda one: one[0]) if role == "assistant"
    ]


def _squeezed(text: str) -> str:
    return "".join(text.split())
