"""The judge: a history's journal in, every broken promise out. Pure.

Each request that reached the model is judged, not only the last. Its `messages` are read as a path of turns, which is
compared with what the clients know: a turn that a client acknowledged, one that failed for certain, and one of which
nobody knows. The model's words are unique to each request, so an answer tells which request it was made for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .journal import (
    Answer,
    Asked,
    Asking,
    Committed,
    Crashed,
    Died,
    Entry,
    Heard,
    Hung,
    Orphans,
    Result,
    Said,
    Sent,
    Stale,
    Summed,
    TakenOff,
    Told,
    Uncounted,
    Unserved,
)
from .reading import SUMMARY, Exchange, exchanges, in_full, is_told, piece, without_closing

Kind = Literal[
    "lost",  # an acknowledged turn is not on the path
    "doubled",  # a turn is on the path more often than it was said
    "reordered",  # a turn comes after one that was said only when it had been acknowledged
    "foreign",  # words of another agent, in a request or in an answer
    "phantom",  # words that no client sent and no model said
    "kept",  # a turn that failed for certain is on the path
    "unasked",  # a turn on a path that its client named without it
    "half",  # a prompt without an answer, or with the answer to another one
    "altered",  # the answer on the path is not the one that the client read
    "result",  # a call without exactly the results that its client sent
    "unsaid",  # a client read words that are no answer of the model to this turn
    "two answers",  # one turn was answered twice, differently
    "run again",  # the model was asked for a turn whose answer had been acknowledged
    "crashed",  # a proxy ended that nobody had ended
    "orphan",  # a CLI lived on, or asked, after its proxy had died
    "unreadable",  # a client got an answer that is not in its wire's shape
    "hung",  # an attempt got no answer
    "stale",  # the store took a write from a proxy that did not hold the agent's lease
    "uncounted",  # stale writes were refused that the metrics do not show
    "unserved",  # in the end, with nothing in the way, an agent got no answer any more
    "untold",  # an attempt does not begin with exactly the earlier ones that were committed
]

# Seconds after a proxy's death in which a request of its CLI may still arrive: it was on its way.
ON_ITS_WAY = 0.5

# In the code of an attempt whose answer no client of its wire can read.
NOT_JSON = "not JSON"

# The model's own mark in each of its answers: see `model`.
MARK = re.compile(r"ok-(\d+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken promise. `turn` is the one it is about, `request` the number of the model's request that shows it."""

    kind: Kind
    agent: str
    turn: int | None
    says: str
    request: int | None = None

    def __str__(self) -> str:
        where = "" if self.request is None else f" (request {self.request} to the model)"
        return f"{self.kind}: agent {self.agent}, turn {self.turn}{where}: {self.says}"


@dataclass(slots=True)
class Attempt:
    sent: Sent
    heard: Heard | None = None

    @property
    def acknowledged(self) -> bool:
        return self.heard is not None and self.heard.outcome == "acknowledged"

    @property
    def failed(self) -> bool:
        return self.heard is not None and self.heard.outcome == "failed"


@dataclass(slots=True)
class Turn:
    """A turn as its clients know it."""

    number: int
    agent: str
    asked: Asking
    path: tuple[Said, ...] | None
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def aside(self) -> bool:
        return self.attempts[0].sent.aside

    @property
    def begun(self) -> float:
        return self.attempts[0].sent.at

    @property
    def known(self) -> float | None:
        """When its answer was first acknowledged."""
        return min((one.heard.at for one in self.attempts if one.acknowledged and one.heard), default=None)

    @property
    def answers(self) -> set[Answer]:
        """Every answer that a client has read to its end."""
        return {one.heard.answer for one in self.attempts if one.acknowledged and one.heard and one.heard.answer}

    def copies(self, before: float) -> int:
        """How often its words may be on one path."""
        if self.path is not None:
            return 1
        return 1 + sum(one.sent.anew for one in self.attempts if one.sent.at < before)

    @property
    def said_anew(self) -> bool:
        return any(one.sent.anew for one in self.attempts)

    def failed(self, before: float) -> bool:
        """Every attempt that had begun by then ended in an error, whenever."""
        return all(one.failed for one in self.attempts if one.sent.at < before)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`faults` without repetitions; `extends` tells for each request which earlier one its path goes on from."""

    faults: list[Fault]
    extends: dict[int, int]
    turn_of: dict[int, int]
    counts: Counter[str]


def judge(journal: Iterable[Entry]) -> Verdict:
    return _Judge(list(journal)).verdict()


class _Judge:
    def __init__(self, journal: Sequence[Entry]) -> None:
        self._turns: dict[int, Turn] = {}
        self._attempts: dict[int, Attempt] = {}
        self._asked: dict[int, Asked] = {}
        self._died: dict[str, float] = {}
        self._prompts: dict[str, Turn] = {}
        self._results: dict[frozenset[Result], Turn] = {}
        self._answers: dict[Answer, int] = {}  # the request that each answer was made for
        self._turn_of: dict[int, Turn] = {}  # the turn that each request was made for
        self._extends: dict[int, int] = {}
        self._told: set[int] = set()
        self._off: list[TakenOff] = []
        self._summed: dict[int, Summed] = {}
        self._committed: list[Committed] = []
        self._rest: list[Crashed | Orphans | Hung | Unserved | Stale | Uncounted] = []
        for entry in journal:
            self._note(entry)
        self._read: dict[int, list[Exchange]] = {}
        summed: dict[int, list[Exchange]] = {}
        texts: dict[int, str] = {}  # of which the proxy's summaries were made, with the pieces before
        for number in sorted({*self._asked, *self._summed}):
            if number in self._asked:
                self._read[number] = in_full(exchanges(self._asked[number].messages), summed)
            elif (made_of := piece(self._summed[number].messages)) is not None:
                before, text = made_of
                texts[number] = "".join(texts.get(int(mark), "") for mark in SUMMARY.findall(before)) + text
                within = [one for mark in SUMMARY.findall(before + text) for one in summed.get(int(mark), ())]
                summed[number] = [
                    one for one in self._up_to(texts[number]) if one in within or is_told(one, texts[number])
                ]
            else:  # without the CLI's own request
                *whole, asks = in_full(exchanges(without_closing(self._summed[number].messages)), summed)
                summed[number] = [*whole, Exchange("", None, asks.left_open)] if asks.left_open else whole
        for number, told in self._read.items():
            turn = self._turn(told[-1].asked) if told else None
            if turn is not None:
                self._turn_of[number] = turn

    def _up_to(self, text: str) -> list[Exchange]:
        """The conversation up to the last answer in this text, and the results behind it."""
        number = next((mark for mark in reversed([*map(int, MARK.findall(text))]) if self._read.get(mark)), None)
        if number is None:
            return []
        *before, last = self._read[number]
        turn, made = self._turn(last.asked), self._asked[number].answer
        answer = next((one for one in (turn.answers if turn else ()) if one.text in text), made)
        behind = (tuple(one) for one in self._results if made.calls and {each.call for each in one} == {*made.calls})
        return [*before, replace(last, answer=answer), *(Exchange(results, None) for results in behind)]

    def verdict(self) -> Verdict:
        first: dict[tuple[object, ...], Fault] = {}
        for fault in self._faults():
            first.setdefault((fault.kind, fault.agent, fault.turn), fault)
        counts = Counter(
            acknowledged=sum(turn.known is not None for turn in self._turns.values()),
            turns=len(self._turns),
            requests=len(self._asked),
        )
        turn_of = {number: turn.number for number, turn in self._turn_of.items()}
        return Verdict(list(first.values()), self._extends, turn_of, counts)

    # --- the journal

    def _note(self, entry: Entry) -> None:
        match entry:
            case Sent():
                turn = self._turns.get(entry.turn)
                if turn is None:
                    turn = self._turns[entry.turn] = Turn(entry.turn, entry.agent, entry.asked, entry.path)
                    if isinstance(entry.asked, str):
                        self._prompts[entry.asked] = turn
                    else:
                        self._results[frozenset(entry.asked)] = turn
                self._attempts[entry.attempt] = attempt = Attempt(entry)
                turn.attempts.append(attempt)
            case Heard():
                self._attempts[entry.attempt].heard = entry
            case Asked():
                self._asked[entry.number] = entry
                self._answers[entry.answer] = entry.number
            case Summed():
                self._summed[entry.number] = entry
            case Committed():
                self._committed.append(entry)
            case Told():
                self._told.add(entry.number)
            case Died():
                self._died[entry.proxy] = entry.at
            case TakenOff():
                self._off.append(entry)
            case Crashed() | Orphans() | Hung() | Unserved() | Stale() | Uncounted():
                self._rest.append(entry)

    def _turn(self, asked: Asking) -> Turn | None:
        if isinstance(asked, str):
            return self._prompts.get(asked)
        return self._results.get(frozenset(asked))

    # --- what may be wrong

    def _faults(self) -> Iterator[Fault]:
        for asked in self._asked.values():
            yield from self._of_request(asked)
            died = self._died.get(asked.proxy)
            if died is not None and asked.at > died + ON_ITS_WAY:
                turn = self._turn_of.get(asked.number)
                says = f"asked {asked.at - died:.1f} s after its proxy {asked.proxy} had died"
                agent, about = (turn.agent, turn.number) if turn else ("?", None)
                yield Fault("orphan", agent, about, says, asked.number)
        for turn in self._turns.values():
            yield from self._of_answers(turn)
        for entry in self._rest:
            match entry:
                case Orphans():
                    says = f"CLIs {list(entry.pids)} of the dead proxy {entry.proxy} are alive"
                    yield Fault("orphan", entry.proxy, None, says)
                case Crashed():
                    yield Fault("crashed", entry.proxy, None, f"it ended by itself, with exit code {entry.code}")
                case Hung():
                    turn = self._turns[self._attempts[entry.attempt].sent.turn]
                    yield Fault("hung", turn.agent, turn.number, f"no answer in {entry.seconds:.0f} s")
                case Stale():
                    says = f"{entry.by} wrote {entry.turn_id} while {entry.holder} held its agent"
                    yield Fault("stale", entry.by, None, says)
                case Uncounted():
                    says = f"{entry.refused} stale writes were refused, {entry.counted} were counted"
                    yield Fault("uncounted", entry.proxy, None, says)
                case Unserved():
                    yield Fault("unserved", entry.agent, None, f"every try ended in {', '.join(entry.codes)}")

    def _made_for(self, answer: Answer) -> int | None:
        """The request that this answer was made for.

        Words that a client was given of attempts that the provider cut are part of the answer, before the whole one.
        """
        if answer in self._answers:
            return self._answers[answer]
        *cut, last = answer.text.split("\n\n")
        number = self._answers.get(Answer(last, answer.calls))
        if number is None:
            return None
        for words in cut:
            mark = MARK.match(words)
            asked = self._asked.get(int(mark[1])) if mark else None
            if asked is None or not asked.answer.text.startswith(words) or asked.number in self._told:
                return None
            if self._turn_of.get(asked.number) is not self._turn_of.get(number):
                return None
        return number

    def _of_answers(self, turn: Turn) -> Iterator[Fault]:
        """What the clients of this turn read."""
        for answer in turn.answers:
            number = self._made_for(answer)
            made_for = None if number is None else self._turn_of.get(number)
            # Calls are made when their blocks are whole: 2.1.330 goes on from them without the end of the stream.
            if made_for is turn and (number in self._told or answer.calls):
                continue
            other = made_for or self._author(answer.text)
            if other is not None and other.agent != turn.agent:
                yield Fault("foreign", turn.agent, turn.number, f"its client read the words of agent {other.agent}")
            else:
                says = f"its client read {_short(answer)}, no whole answer of the model to it"
                yield Fault("unsaid", turn.agent, turn.number, says)
        for one in turn.attempts:
            if one.heard is not None and NOT_JSON in one.heard.code:
                yield Fault("unreadable", turn.agent, turn.number, f"its client read {one.heard.code}")
        # Words that were said anew have an answer each time, and who asks for them again may be given either.
        if len(turn.answers) > 1 + sum(one.sent.anew and not one.failed for one in turn.attempts):
            said = " and ".join(map(_short, turn.answers))
            yield Fault("two answers", turn.agent, turn.number, f"its client read {said}")

    def _author(self, text: str) -> Turn | None:
        """The turn for which the model said something of this."""
        numbers = (int(mark) for mark in MARK.findall(text))
        return next((self._turn_of[number] for number in numbers if number in self._turn_of), None)

    def _of_request(self, asked: Asked) -> Iterator[Fault]:
        told = self._read[asked.number]
        turn = self._turn_of.get(asked.number)
        if turn is None or not turn.attempts or turn.begun > asked.at:
            newest = told[-1].asked if told else "nothing"
            about = self._near(newest)
            agent, number = (about.agent, about.number) if about else ("?", None)
            kind: Kind = "result" if about is not None and not isinstance(newest, str) else "phantom"
            yield Fault(kind, agent, number, f"the model was asked {_short(newest)}", asked.number)
            return
        if told[-1].answer is not None:
            says = f"the request ends in words of the model: {_short(told[-1].answer)}"
            yield Fault("phantom", turn.agent, turn.number, says, asked.number)
        if turn.known is not None and turn.known < asked.at and not turn.said_anew:
            says = f"asked {asked.at - turn.known:.1f} s after its answer was acknowledged"
            yield Fault("run again", turn.agent, turn.number, says, asked.number)
        path: list[Turn] = []
        before: Answer | None = None
        for exchange in told[:-1]:
            yield from self._of_exchange(asked, turn, exchange, before)
            one = self._turn(exchange.asked)
            if one is not None and one.agent == turn.agent:
                path.append(one)
            before = exchange.answer
        yield from self._of_calls(asked, turn, told[-1], before)
        number = None if before is None else self._made_for(before)
        if number is not None and not turn.aside and _goes_on(told, self._read[number]):
            self._extends[asked.number] = number
        yield from self._of_path(asked, turn, path, told[:-1])
        yield from self._of_attempts(asked, turn, told)

    def _of_exchange(self, asked: Asked, turn: Turn, exchange: Exchange, before: Answer | None) -> Iterator[Fault]:
        """One exchange on the path of `turn`: somebody said it, the model answered it, and its client read that."""

        def fault(kind: Kind, says: str, number: int | None) -> Fault:
            return Fault(kind, turn.agent, number, says, asked.number)

        one = self._turn(exchange.asked)
        if one is None:
            near = self._near(exchange.asked)
            if near is not None and near.agent != turn.agent:
                yield fault("foreign", f"{_short(exchange.asked)} is of agent {near.agent}", near.number)
            elif near is not None and not isinstance(exchange.asked, str):
                yield fault("result", f"not what its client sent: {_short(exchange.asked)}", near.number)
            else:
                yield fault("phantom", f"nobody said {_short(exchange.asked)}", near.number if near else None)
            return
        if one.agent != turn.agent:
            yield fault("foreign", f"turn {one.number} is of agent {one.agent}", one.number)
            return
        if one.aside:
            yield fault("phantom", "what was asked beside the conversation", one.number)
            return
        yield from self._of_calls(asked, one, exchange, before)
        if one.failed(asked.at):
            yield fault("kept", "every attempt had failed for certain", one.number)
        if exchange.answer is None:
            yield fault("half", "its prompt has no answer", one.number)
            return
        number = self._made_for(exchange.answer)
        if number is None:
            author = self._author(exchange.answer.text)
            if author is None:
                yield fault("phantom", f"no model said {_short(exchange.answer)}", one.number)
            elif author.agent != turn.agent:
                yield fault("foreign", f"the words of agent {author.agent}", one.number)
            else:
                yield fault("altered", f"no whole answer of the model: {_short(exchange.answer)}", one.number)
        elif self._turn_of.get(number) is not one:
            yield fault("half", f"the answer on the path was made for turn {self._number(number)}", one.number)
        elif one.answers and exchange.answer not in one.answers and not one.said_anew:
            read = " and ".join(map(_short, one.answers))
            yield fault("altered", f"on the path: {_short(exchange.answer)}; its client read {read}", one.number)

    def _of_calls(self, asked: Asked, one: Turn, exchange: Exchange, before: Answer | None) -> Iterator[Fault]:
        """The calls of the answer before this exchange have exactly the results that this exchange brings."""
        called = before.calls if before else ()
        given = tuple(result.call for result in exchange.asked) if not isinstance(exchange.asked, str) else ()
        if sorted(called) != sorted(given + exchange.left_open):
            says = f"calls {list(called)} have the results {list(given)}, left open {list(exchange.left_open)}"
            yield Fault("result", one.agent, one.number, says, asked.number)

    def _of_path(self, asked: Asked, turn: Turn, path: Sequence[Turn], told: Sequence[Exchange]) -> Iterator[Fault]:
        def fault(kind: Kind, one: Turn, says: str) -> Fault:
            return Fault(kind, turn.agent, one.number, says, asked.number)

        if turn.path is not None:
            yield from self._of_named_path(asked, turn, path, told)
            return
        for number, count in Counter(one.number for one in (*path, turn)).items():
            one = self._turns[number]
            if count > one.copies(asked.at):
                yield fault("doubled", one, f"on the path {count} times")
        on_path = {one.number for one in path}
        taken_off = [off for off in self._off if off.agent == turn.agent and off.at <= turn.begun]
        for off in taken_off:
            for number in sorted(off.turns & on_path):
                if off.certain and not self._turns[number].said_anew:
                    yield fault("unasked", self._turns[number], f"taken off {turn.begun - off.at:.1f} s before")
        branches = [one for one in path if one.path is not None]
        for one in self._turns.values():
            if one.agent != turn.agent or one is turn or one.known is None or one.known >= turn.begun:
                continue
            if any(one.number in off.turns for off in taken_off):
                continue
            if one.number not in on_path and not any(_leaves_off(branch, one) for branch in branches):
                ago = turn.begun - one.known
                yield fault("lost", one, f"acknowledged {ago:.1f} s before turn {turn.number} was sent")
        latest: Turn | None = None  # of those before
        for one in path:
            late = latest is not None and latest is not one and one.known is not None and one.known < latest.begun
            if late and latest is not None and not one.said_anew:
                yield fault("reordered", one, f"it comes after turn {latest.number}, which was said later")
            if latest is None or one.begun > latest.begun:
                latest = one

    def _of_attempts(self, asked: Asked, turn: Turn, told: Sequence[Exchange]) -> Iterator[Fault]:
        """The first prompt of a path is told the attempts that its agent had committed, and no other prompt is."""
        first = self._turn(told[0].asked)
        if first is None:
            return
        mine = [one for one in self._committed if one.agent == turn.agent and one.at < first.begun]
        certain = {one.number for one in mine if one.certain}
        found = told[0].attempts
        if not certain <= found <= {one.number for one in mine} or any(one.attempts for one in told[1:]):
            says = (
                f"attempts {sorted(certain)} were committed before, told are {[sorted(one.attempts) for one in told]}"
            )
            yield Fault("untold", turn.agent, first.number, says, asked.number)

    def _of_named_path(
        self, asked: Asked, turn: Turn, path: Sequence[Turn], told: Sequence[Exchange]
    ) -> Iterator[Fault]:
        """The client said what comes before: exactly that, word for word."""
        assert turn.path is not None
        wanted = [said.turn for said in turn.path]
        found = [one.number for one in path]
        for number in wanted:
            if number not in found:
                says = f"turn {turn.number} continues {wanted}, the model was shown {found}"
                yield Fault("lost", turn.agent, number, says, asked.number)
        for number in found:
            if number not in wanted:
                says = f"turn {turn.number} continues {wanted}, the model was shown {found}"
                yield Fault("unasked", turn.agent, number, says, asked.number)
        for number, count in Counter(found).items():
            if 0 < wanted.count(number) < count:
                says = f"on the path {count} times, its client named it {wanted.count(number)} times"
                yield Fault("doubled", turn.agent, number, says, asked.number)
            elif count < wanted.count(number):
                says = f"on the path {count} times, its client named it {wanted.count(number)} times"
                yield Fault("lost", turn.agent, number, says, asked.number)
        if sorted(wanted) == sorted(found) and wanted != found:
            yield Fault("reordered", turn.agent, turn.number, f"{wanted} became {found}", asked.number)
        if wanted == found and len(told) == len(wanted):
            for said, exchange in zip(turn.path, told, strict=True):
                if exchange.answer is not None and exchange.answer != said.answer:
                    says = f"on the path: {_short(exchange.answer)}; the client named {_short(said.answer)}"
                    yield Fault("altered", turn.agent, said.turn, says, asked.number)

    # --- telling

    def _near(self, asked: Asking) -> Turn | None:
        """The turn that these words resemble: its mark is in them, or it has results for the same calls."""
        if not isinstance(asked, str):
            calls = {result.call for result in asked}
            for results, turn in self._results.items():
                if calls & {result.call for result in results}:
                    return turn
            callers = (number for answer, number in self._answers.items() if calls & set(answer.calls))
            return next((self._turn_of[number] for number in callers if number in self._turn_of), None)
        return next((turn for prompt, turn in self._prompts.items() if prompt in asked), None) or self._author(asked)

    def _number(self, request: int) -> int | None:
        turn = self._turn_of.get(request)
        return None if turn is None else turn.number


def _goes_on(told: Sequence[Exchange], before: Sequence[Exchange]) -> bool:
    """Is this the conversation of that request, and what was said since? Not where a client has edited it."""
    return [(one.asked, one.answer) for one in told[: len(before) - 1]] == [
        (one.asked, one.answer) for one in before[:-1]
    ]


def _leaves_off(branch: Turn, one: Turn) -> bool:
    """`branch` went on from a path of its client's own without this turn, and perhaps after it."""
    assert branch.path is not None
    named = any(said.turn == one.number for said in branch.path)
    certainly_before = branch.known is not None and branch.known < one.begun
    return not named and branch is not one and not certainly_before


def _short(said: Answer | Asking | None) -> str:
    if isinstance(said, Answer):
        said = said.text + "".join(f" [call {call}]" for call in said.calls)
    elif said is not None and not isinstance(said, str):
        said = ", ".join(f"{result.call}: {result.text[:40]}" for result in said)
    text = repr(said)
    return text if len(text) <= 100 else f"{text[:60]} … {text[-35:]}"
