"""The checker finds every planted fault, and nothing in an honest history. Hand-made journals; nothing runs."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends import summarising
from cli_session_proxy.backends.claude.sessions import summaries
from cli_session_proxy.backends.claude.sessions.composing import CLOSING
from cli_session_proxy.backends.claude.sessions.history import NO_RESULT
from cli_session_proxy.backends.claude.transcript import mending
from cli_session_proxy.domain.client_tools import NOT_ANSWERED, cli_name
from cli_session_proxy.git_memory.records import CLOSE, OPEN
from turnfault.provider.seen import parts

from .checker import NOT_JSON, ON_ITS_WAY, Fault, Kind, judge
from .journal import (
    JSON,
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
    Outcome,
    Result,
    Said,
    Sent,
    Stale,
    Summed,
    TakenOff,
    Told,
    Uncounted,
    Unserved,
)  # fmt: skip
from .model import TOOL
from .pictures import split, with_picture
from .reading import GO_ON, KEPT_PICTURE, REMINDER, SUMMED_UP, arguments, exchanges, without_closing

INTERRUPTED = "The tool call was interrupted before a result was received."
Pair = tuple[Asking, Answer]
Shown = Sequence[tuple[Asking, Answer | None]]  # None: the next message is the user's, too


def prompt(turn: int) -> str:
    return f"Turn #{turn}# of somebody"


def results(*calls: str, turn: int = 0) -> tuple[Result, ...]:
    said = f" in turn {turn}" if turn else ""
    return tuple(Result(call, f"result of {call}{said}") for call in calls)


def as_messages(pairs: Shown, newest: Asking) -> list[JSON]:
    """A request as the CLI sends it, with its own reminders and `system` messages."""
    messages: list[JSON] = []
    ids: dict[str, str] = {}
    for asked, answer in [*pairs, (newest, None)]:
        content: list[JSON] = [{"type": "text", "text": "<system-reminder>be kind</system-reminder>"}]
        if isinstance(asked, str):
            image, words = split(asked)
            if image is not None:
                data = base64.b64encode(image).decode()
                content.append({"type": "image", "source": {"type": "base64", "data": data}})
                content.append({"type": "text", "text": f"{KEPT_PICTURE}/tmp/images/1.png]"})
            content.append({"type": "text", "text": words})
        else:
            content = [
                {"type": "tool_result", "tool_use_id": ids.get(one.call, one.call), "content": one.text}
                for one in asked
            ]
        messages.append({"role": "user", "content": content})
        if answer is not None:
            said: list[JSON] = [{"type": "text", "text": answer.text}] if answer.text else []
            for call in answer.calls:
                ids[call] = f"toolu_{call}"
                said.append({"type": "tool_use", "id": ids[call], "name": cli_name(TOOL), "input": arguments(call)})
            messages += [{"role": "assistant", "content": said}, {"role": "system", "content": "the time has changed"}]
    return messages


@dataclass
class Tale:
    """Writes a journal. `path` of an agent is what the model should be shown next."""

    journal: list[Entry] = field(default_factory=list)
    paths: dict[str, list[Pair]] = field(default_factory=dict)
    clock: float = 0.0
    attempts: int = 0
    requests: int = 0

    def now(self) -> float:
        self.clock += 1.0
        return self.clock

    def send(
        self, turn: int, *, agent: str = "ada", asked: Asking | None = None, path: Sequence[Pair] | None = None,
        anew: bool = False,
    ) -> int:  # fmt: skip
        """An attempt begins; its number. `path`: what its client names as the conversation before it."""
        self.attempts += 1
        named = None if path is None else tuple(Said(self._turn(said), answer) for said, answer in path)
        self.journal.append(Sent(self.now(), self.attempts, turn, agent, asked or prompt(turn), named, anew))
        return self.attempts

    def _turn(self, asked: Asking) -> int:
        return next(entry.turn for entry in self.journal if isinstance(entry, Sent) and entry.asked == asked)

    def ask(
        self, asked: Asking, pairs: Shown, *, calls: Sequence[str] = (), whole: bool = True, proxy: str = "p"
    ) -> Answer:
        """A request reaches the model; what it answers."""
        self.requests += 1
        answer = Answer(f"ok-{self.requests} to something", tuple(calls))
        self.journal.append(Asked(self.now(), self.requests, proxy, as_messages(pairs, asked), answer))
        if whole:
            self.journal.append(Told(self.requests))
        return answer

    def hear(self, attempt: int, outcome: Outcome, answer: Answer | None = None, code: str = "") -> None:
        self.journal.append(Heard(self.now(), attempt, outcome, answer, code))

    def turn(
        self, turn: int, *, agent: str = "ada", outcome: Outcome = "acknowledged", calls: Sequence[str] = (),
        asked: Asking | None = None, shown: Callable[[list[Pair]], Shown] = list,
    ) -> Answer:  # fmt: skip
        """A whole turn of a named agent. `shown` plants a fault in what the model is shown before it."""
        asked = asked or prompt(turn)
        path = self.paths.setdefault(agent, [])
        attempt = self.send(turn, agent=agent, asked=asked)
        answer = self.ask(asked, shown(path), calls=calls)
        self.hear(attempt, outcome, answer if outcome == "acknowledged" else None)
        if outcome == "acknowledged":
            path.append((asked, answer))
        return answer

    def faults(self) -> list[Fault]:
        return judge(self.journal).faults

    def kinds(self) -> set[tuple[Kind, int | None]]:
        return {(fault.kind, fault.turn) for fault in self.faults()}


@pytest.fixture
def tale() -> Tale:
    """Two agents, three turns of the first."""
    tale = Tale()
    tale.turn(1)
    tale.turn(2, agent="bob")
    tale.turn(3)
    tale.turn(4)
    return tale


# --- honest histories ---------------------------------------------------------------------------------------


def test_a_request_is_read_without_what_the_cli_adds() -> None:
    asked = results("c1")
    pairs: list[Pair] = [("one", Answer("ok-1", ("c1",)))]
    told = exchanges(as_messages(pairs, asked))
    assert [(one.asked, one.answer) for one in told] == [("one", Answer("ok-1", ("c1",))), (asked, None)]


def test_nothing_is_wrong_with_an_honest_history(tale: Tale) -> None:
    assert tale.faults() == []


def test_each_request_extends_the_one_whose_answer_it_goes_on_from(tale: Tale) -> None:
    assert judge(tale.journal).extends == {3: 1, 4: 3}


@pytest.mark.parametrize("kept", [True, False])
def test_an_unknown_turn_may_be_on_the_path_or_not(tale: Tale, kept: bool) -> None:
    answer = tale.turn(5, outcome="unknown")
    if kept:
        tale.paths["ada"].append((prompt(5), answer))
    tale.turn(6)
    assert tale.faults() == []


def test_a_retry_that_gets_the_first_answer_is_sound(tale: Tale) -> None:
    answer = tale.turn(5, outcome="unknown")
    tale.hear(tale.send(5), "acknowledged", answer)
    tale.paths["ada"].append((prompt(5), answer))
    tale.turn(6)
    assert tale.faults() == []


def test_a_retry_of_a_failed_turn_may_run_again(tale: Tale) -> None:
    tale.turn(5, outcome="failed")
    tale.turn(5)
    tale.turn(6)
    assert tale.faults() == []


def test_words_that_are_said_anew_may_be_there_twice(tale: Tale) -> None:
    first = tale.turn(5, outcome="unknown")
    tale.paths["ada"].append((prompt(5), first))
    attempt = tale.send(5, anew=True)
    answer = tale.ask(prompt(5), tale.paths["ada"])
    tale.hear(attempt, "acknowledged", answer)
    tale.paths["ada"].append((prompt(5), answer))
    tale.turn(6)
    assert tale.faults() == []


def test_who_asks_again_for_words_that_were_said_anew_may_be_given_either_answer(tale: Tale) -> None:
    tale.turn(5)
    attempt = tale.send(5, anew=True)
    answer = tale.ask(prompt(5), tale.paths["ada"])
    tale.paths["ada"].append((prompt(5), answer))
    for asked in (attempt, tale.send(5)):
        tale.hear(asked, "acknowledged", answer)
    tale.turn(6)
    assert tale.faults() == []


def test_a_turn_that_was_said_meanwhile_may_come_before_or_after(tale: Tale) -> None:
    first, second = tale.send(5), tale.send(6)
    after = tale.ask(prompt(6), tale.paths["ada"])
    tale.paths["ada"].append((prompt(6), after))
    before = tale.ask(prompt(5), tale.paths["ada"])
    tale.paths["ada"].append((prompt(5), before))
    tale.hear(first, "acknowledged", before)
    tale.hear(second, "acknowledged", after)
    tale.turn(7)
    assert tale.faults() == []


def test_a_branch_that_its_client_named_leaves_the_later_turns_off(tale: Tale) -> None:
    path = tale.paths["ada"][:1]
    attempt = tale.send(5, path=path)
    answer = tale.ask(prompt(5), path)
    tale.hear(attempt, "acknowledged", answer)
    tale.paths["ada"] = [*path, (prompt(5), answer)]
    tale.turn(6)
    assert tale.faults() == []


def test_calls_and_their_results_are_sound() -> None:
    tale = Tale()
    tale.turn(1, calls=("c1", "c2"))
    tale.turn(2, asked=results("c1", "c2"), calls=("c3",))
    tale.turn(3, asked=results("c3"))
    tale.turn(4)
    assert tale.faults() == []


@pytest.mark.parametrize("says", [NOT_ANSWERED, NO_RESULT])  # to the CLI's own turns; where another model answered
def test_calls_that_a_client_leaves_open_are_sound(says: str) -> None:
    tale = Tale()
    tale.turn(1, calls=("c1",))
    attempt = tale.send(2)
    messages = as_messages(tale.paths["ada"], (Result("c1", says),))
    messages[-1]["content"].append({"type": "text", "text": prompt(2)})
    tale.journal += [Asked(tale.now(), 2, "p", messages, Answer("ok-2")), Told(2)]
    tale.hear(attempt, "acknowledged", Answer("ok-2"))
    assert tale.faults() == []


def test_a_request_that_was_on_its_way_when_its_proxy_died_is_no_orphan(tale: Tale) -> None:
    tale.journal.append(Died(tale.clock + 2.0 - ON_ITS_WAY / 2, "p"))
    tale.turn(5)
    assert tale.faults() == []


# --- planted faults -----------------------------------------------------------------------------------------


def test_a_lost_turn_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [path[0], path[2]])
    assert tale.kinds() == {("lost", 3)}


def test_a_whole_conversation_that_was_lost_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [])
    assert tale.kinds() == {("lost", 1), ("lost", 3), ("lost", 4)}


def test_a_turn_that_is_lost_from_one_request_only_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: path[:-1])
    tale.turn(6)
    tale.turn(7)
    assert tale.kinds() == {("lost", 4)}


def test_a_doubled_turn_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [*path[:2], path[1], path[2]])
    assert tale.kinds() == {("doubled", 3)}


def test_an_unknown_turn_that_is_doubled_by_its_retry_is_found(tale: Tale) -> None:
    first = tale.turn(5, outcome="unknown")
    tale.paths["ada"].append((prompt(5), first))
    tale.turn(5)
    assert ("doubled", 5) in tale.kinds()


def test_reordered_turns_are_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [path[1], path[0], path[2]])
    assert tale.kinds() == {("reordered", 1)}


def test_a_foreign_turn_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [*path, tale.paths["bob"][0]])
    assert tale.kinds() == {("foreign", 2)}


def test_a_foreign_conversation_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: tale.paths["bob"])
    assert ("foreign", 2) in tale.kinds()
    assert ("lost", 4) in tale.kinds()


def test_a_foreign_answer_under_the_own_prompt_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [*path[:2], (path[2][0], tale.paths["bob"][0][1])])
    assert tale.kinds() & {("foreign", 4), ("half", 4)}


def test_a_foreign_answer_that_a_client_read_is_found(tale: Tale) -> None:
    attempt = tale.send(5)
    tale.ask(prompt(5), tale.paths["ada"])
    tale.hear(attempt, "acknowledged", tale.paths["bob"][0][1])
    assert tale.kinds() == {("foreign", 5)}


@pytest.mark.parametrize(
    "pair", [("[Request interrupted by user]", Answer("No response requested.")), ("Continue.", Answer("ok-9 never"))]
)
def test_phantom_words_are_found(tale: Tale, pair: Pair) -> None:
    tale.turn(5, shown=lambda path: [*path, pair])
    assert ("phantom", None) in tale.kinds()


def test_a_phantom_answer_under_a_real_prompt_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [*path[:2], (path[2][0], Answer("No response requested."))])
    assert tale.kinds() == {("phantom", 4)}


def test_a_flattened_history_is_found(tale: Tale) -> None:
    def told(path: list[Pair]) -> str:
        return "\n".join(f"Human: {asked}\nAssistant: {answer.text}" for asked, answer in path)

    attempt = tale.send(5)
    answer = tale.ask(f"{told(tale.paths['ada'])}\nHuman: {prompt(5)}", [])
    tale.hear(attempt, "acknowledged", answer)
    assert any(kind == "phantom" for kind, _ in tale.kinds())


def test_a_failed_turn_that_was_kept_is_found(tale: Tale) -> None:
    answer = tale.turn(5, outcome="failed")
    tale.paths["ada"].append((prompt(5), answer))
    tale.turn(6)
    assert tale.kinds() == {("kept", 5)}


def test_a_failed_prompt_that_is_sent_along_with_the_next_is_found(tale: Tale) -> None:
    tale.turn(5, outcome="failed")
    attempt = tale.send(6)
    messages = as_messages(tale.paths["ada"], prompt(5))
    messages[-1]["content"].append({"type": "text", "text": prompt(6)})
    tale.journal += [Asked(tale.now(), 99, "p", messages, Answer("ok-99")), Told(99)]
    tale.hear(attempt, "acknowledged", Answer("ok-99"))
    assert tale.kinds() == {("kept", 5), ("half", 5)}


def test_an_answer_that_changed_after_it_was_read_is_found(tale: Tale) -> None:
    attempt = tale.send(5)
    tale.ask(prompt(5), tale.paths["ada"])
    second = tale.ask(prompt(5), tale.paths["ada"])
    tale.hear(attempt, "acknowledged", second)
    tale.turn(6, shown=lambda path: [*path, (prompt(5), Answer("ok-5 to something"))])
    assert tale.kinds() == {("altered", 5)}


def test_a_flipped_letter_is_found(tale: Tale) -> None:
    tale.turn(
        5, shown=lambda path: [*path[:2], (path[2][0], Answer(path[2][1].text.replace("something", "sxmething")))]
    )
    assert tale.kinds() == {("altered", 4)}


def test_a_flipped_letter_of_a_prompt_is_found(tale: Tale) -> None:
    tale.turn(5, shown=lambda path: [*path[:2], ("Turn #4# of sxmebody", path[2][1])])
    assert ("lost", 4) in tale.kinds()


def test_the_words_of_a_cut_attempt_before_the_answer_are_found(tale: Tale) -> None:
    attempt = tale.send(5)
    cut = tale.ask(prompt(5), tale.paths["ada"], whole=False)
    whole = tale.ask(prompt(5), tale.paths["ada"])
    tale.hear(attempt, "acknowledged", Answer(cut.text[:4] + whole.text))
    assert tale.kinds() == {("unsaid", 5)}


def test_the_words_of_a_cut_attempt_are_part_of_the_answer_where_the_path_has_them_too(tale: Tale) -> None:
    attempt = tale.send(5)
    cut = tale.ask(prompt(5), tale.paths["ada"], whole=False)
    whole = tale.ask(prompt(5), tale.paths["ada"])
    answer = Answer(f"{cut.text[:-2]}\n\n{whole.text}")
    tale.hear(attempt, "acknowledged", answer)
    tale.paths["ada"].append((prompt(5), answer))
    tale.turn(6)
    assert tale.kinds() == set()


def test_the_words_of_a_cut_attempt_that_the_path_leaves_out_are_found(tale: Tale) -> None:
    attempt = tale.send(5)
    cut = tale.ask(prompt(5), tale.paths["ada"], whole=False)
    whole = tale.ask(prompt(5), tale.paths["ada"])
    tale.hear(attempt, "acknowledged", Answer(f"{cut.text[:-2]}\n\n{whole.text}"))
    tale.paths["ada"].append((prompt(5), whole))
    tale.turn(6)
    assert ("altered", 5) in tale.kinds()


def test_a_cut_answer_that_was_acknowledged_is_found(tale: Tale) -> None:
    attempt = tale.send(5)
    tale.hear(attempt, "acknowledged", tale.ask(prompt(5), tale.paths["ada"], whole=False))
    assert tale.kinds() == {("unsaid", 5)}


def test_calls_that_are_made_before_the_streams_end_are_the_answer(tale: Tale) -> None:
    attempt = tale.send(5)
    tale.hear(attempt, "acknowledged", tale.ask(prompt(5), tale.paths["ada"], calls=("c1",), whole=False))
    assert tale.kinds() == set()


def test_two_answers_of_one_turn_are_found(tale: Tale) -> None:
    tale.turn(5)
    second = tale.ask(prompt(5), tale.paths["ada"][:-1])
    tale.hear(tale.send(5), "acknowledged", second)
    assert {("two answers", 5), ("run again", 5)} <= tale.kinds()


def test_a_turn_that_runs_again_after_its_answer_was_read_is_found(tale: Tale) -> None:
    tale.turn(5)
    tale.ask(prompt(5), tale.paths["ada"][:-1])
    assert tale.kinds() == {("run again", 5)}


@pytest.mark.parametrize(
    ("sent", "kinds"),
    [
        ((Result("c1", INTERRUPTED), Result("c2", INTERRUPTED)), {"result", "lost"}),
        ((Result("c1", "result of c1"), Result("c2", "result o")), {"result", "lost"}),
        ((Result("c1", "result of c1"),), {"result", "lost"}),
        ((Result("c1", "result of c2"), Result("c2", "result of c1")), {"result", "lost"}),
    ],
)
def test_other_results_than_the_clients_are_found(sent: tuple[Result, ...], kinds: set[Kind]) -> None:
    tale = Tale()
    tale.turn(1, calls=("c1", "c2"))
    tale.turn(2, asked=results("c1", "c2"))
    tale.turn(3, shown=lambda path: [path[0], (sent, path[1][1])])
    assert {kind for kind, _ in tale.kinds()} == kinds


def test_a_call_without_its_result_is_found() -> None:
    tale = Tale()
    tale.turn(1, calls=("c1",))
    tale.turn(2, asked=results("c1"))
    tale.turn(3, shown=lambda path: path[:1])
    assert tale.kinds() == {("result", 3), ("lost", 2)}


def test_an_interrupted_result_that_reaches_the_model_is_found() -> None:
    tale = Tale()
    tale.turn(1, calls=("c1",))
    tale.ask((Result("c1", INTERRUPTED),), tale.paths["ada"])
    assert tale.kinds() == {("result", 1)}


def test_another_path_than_the_named_one_is_found(tale: Tale) -> None:
    path = tale.paths["ada"]
    attempt = tale.send(5, path=path[:2])
    tale.hear(attempt, "acknowledged", tale.ask(prompt(5), path))
    assert tale.kinds() == {("unasked", 4)}


def test_another_answer_than_the_named_one_is_found(tale: Tale) -> None:
    attempt = tale.send(5)
    first = tale.ask(prompt(5), tale.paths["ada"])
    second = tale.ask(prompt(5), tale.paths["ada"])
    tale.hear(attempt, "unknown")
    named = [*tale.paths["ada"], (prompt(5), first)]
    tale.hear(tale.send(6, path=named), "acknowledged", tale.ask(prompt(6), [*named[:-1], (prompt(5), second)]))
    assert tale.kinds() == {("altered", 5)}


def test_a_turn_that_was_taken_off_is_not_lost(tale: Tale) -> None:
    tale.journal.append(TakenOff(tale.now(), "ada", frozenset({4}), certain=True))
    del tale.paths["ada"][2:]
    tale.turn(5)
    assert tale.faults() == []


def test_a_turn_that_was_taken_off_and_is_shown_all_the_same_is_found(tale: Tale) -> None:
    tale.journal.append(TakenOff(tale.now(), "ada", frozenset({4}), certain=True))
    tale.turn(5)
    assert tale.kinds() == {("unasked", 4)}


def test_nobody_knows_of_a_turn_whose_taking_off_was_not_answered(tale: Tale) -> None:
    tale.journal.append(TakenOff(tale.now(), "ada", frozenset({4}), certain=False))
    tale.turn(5)
    tale.turn(6, shown=lambda path: path[:2] + path[3:])
    assert tale.faults() == []


@pytest.mark.parametrize(
    ("shown", "kind"), [([0, 1, 1], None), ([0, 1], "lost"), ([0, 1, 1, 1], "doubled"), ([1, 0, 1], "reordered")]
)
def test_a_history_that_tells_an_exchange_twice_is_shown_as_it_is_told(
    tale: Tale, shown: list[int], kind: Kind | None
) -> None:
    path = tale.paths["ada"]
    attempt = tale.send(5, path=[path[0], path[1], path[1]])
    tale.hear(attempt, "acknowledged", tale.ask(prompt(5), [path[at] for at in shown]))
    assert {fault.kind for fault in tale.faults()} == ({kind} if kind else set())


def test_a_request_does_not_extend_another_one_that_its_client_has_edited(tale: Tale) -> None:
    path = tale.paths["ada"]
    attempt = tale.send(5, path=[path[2], path[1]])
    tale.hear(attempt, "acknowledged", tale.ask(prompt(5), [path[2], path[1]]))
    assert judge(tale.journal).extends == {3: 1, 4: 3}


def test_another_picture_than_the_clients_is_found(tale: Tale) -> None:
    asked = with_picture(5, prompt(5))
    answer = tale.turn(5, asked=asked)
    tale.paths["ada"][-1] = (with_picture(6, prompt(5)), answer)
    tale.turn(6)
    assert {fault.kind for fault in tale.faults()} >= {"phantom"}


def test_other_arguments_than_the_models_are_found() -> None:
    tale = Tale()
    tale.turn(1, calls=["c1"])
    tale.turn(2, asked=results("c1"))
    [called] = [block for block in last_messages(tale)[1]["content"] if block["type"] == "tool_use"]
    assert tale.faults() == []
    called["input"]["where"]["line"] += 1
    assert {fault.kind for fault in tale.faults()} >= {"phantom"}


def last_messages(tale: Tale) -> list[JSON]:
    return [entry for entry in tale.journal if isinstance(entry, Asked)][-1].messages


def test_a_request_of_an_orphan_is_found(tale: Tale) -> None:
    tale.journal.append(Died(tale.clock - ON_ITS_WAY, "p"))
    tale.turn(5)
    assert tale.kinds() == {("orphan", 5)}


def test_what_was_seen_from_outside_is_told(tale: Tale) -> None:
    attempt = tale.send(5)
    tale.journal += [Crashed("q", -11), Orphans("p", (17,)), Hung(attempt, 30.0), Unserved("bob", ("503 x",))]
    assert tale.kinds() == {("crashed", None), ("orphan", None), ("hung", 5), ("unserved", None)}


@pytest.mark.parametrize("words", [*GO_ON, *(f"{REMINDER}\n{words}" for words in GO_ON)])
def test_an_answer_that_the_cli_lets_the_model_go_on_from_is_one(tale: Tale, words: str) -> None:
    said = prompt(5)
    whole = Answer("ok-1 begins here\n\nok-2 ends here")
    messages = [*as_messages([], said), {"role": "assistant", "content": "ok-1 begins here"}]
    messages.append({"role": "user", "content": f"{words} Resume directly."})
    assert exchanges(messages) == exchanges(as_messages([], said))
    messages.append({"role": "assistant", "content": "ok-2 ends here"})
    assert [(one.asked, one.answer) for one in exchanges(messages)] == [(said, whole)]


def test_a_stale_write_that_was_taken_or_not_counted_is_found(tale: Tale) -> None:
    tale.journal += [Stale("turn", "p0-1", "p1-1"), Uncounted("p2-1", refused=2, counted=1)]
    assert tale.kinds() == {("stale", None), ("uncounted", None)}


def test_an_answer_that_no_client_of_its_wire_can_read_is_found(tale: Tale) -> None:
    tale.hear(tale.send(5), "failed", code=f"500 {NOT_JSON}: b'Internal Server Error'")
    assert tale.kinds() == {("unreadable", 5)}


def test_a_fault_that_shows_in_every_request_is_told_once(tale: Tale) -> None:
    for turn in range(5, 9):
        tale.turn(turn, shown=lambda path: path[1:])
    assert [(fault.kind, fault.turn) for fault in tale.faults()] == [("lost", 1)]


# --- what stands beside a conversation ----------------------------------------------------------------------


def summed(tale: Tale, pairs: Sequence[Pair], newest: Asking | None = None) -> str:
    """The CLI has these summed up, perhaps with results that wait for their answer; how its next request begins."""
    tale.requests += 1
    messages = as_messages(pairs, "Your task is to create a detailed summary")
    if newest is not None:
        messages = [*as_messages(pairs, newest), messages[-1]]
    tale.journal.append(Summed(tale.requests, messages))
    return f"{SUMMED_UP} that ran out of context. Summary:\nsummary-{tale.requests} of all"


def test_a_summary_stands_for_what_the_model_was_shown_when_it_made_it(tale: Tale) -> None:
    path = tale.paths["ada"]
    first = summed(tale, path)
    tale.turn(5, shown=lambda path: [(first, path[-1][1])])  # the CLI repeats the last answer behind it
    assert not tale.faults()
    again = summed(tale, [(first, path[2][1]), path[3]])  # a summary of a summary
    tale.turn(6, calls=("one",), shown=lambda path: [(again, path[3][1])])
    asked = results("one")
    last = summed(tale, [(again, path[3][1]), path[4]], asked)  # at results: they follow once more
    tale.turn(7, asked=asked, shown=lambda path: [(last, path[4][1])])
    assert not tale.faults()


@pytest.mark.parametrize(("told", "wrong"), [((Result("one", NOT_ANSWERED),), set()), (None, {("result", 6)})])
def test_calls_that_were_left_open_before_a_summary_are_sound(
    tale: Tale, told: Asking | None, wrong: set[tuple[Kind, int]]
) -> None:
    """CLI 2.1.332 says that they were left open in its request for the summary, and not again behind it."""
    tale.turn(5, calls=("one",))
    summary = summed(tale, tale.paths["ada"], told)
    tale.turn(6, shown=lambda path: [(summary, None)])
    assert tale.kinds() == wrong


def test_what_is_missing_from_a_summary_or_told_behind_it_again_is_found(tale: Tale) -> None:
    whole, less = summed(tale, tale.paths["ada"]), summed(tale, tale.paths["ada"][1:])
    tale.turn(5, shown=lambda path: [(less, path[-1][1])])
    assert tale.kinds() == {("lost", 1)}
    tale.turn(6, shown=lambda path: [(whole, path[2][1]), path[3], path[0]])
    assert ("doubled", 1) in tale.kinds()


def summed_by_proxy(tale: Tale, pairs: Sequence[Pair], before: str = "", newest: Asking | None = None) -> str:
    """The proxy has these summed up behind an earlier summary, perhaps with results; how a request begins then."""
    tale.requests += 1
    said = [str(part) for message in as_messages(pairs, newest or "") for part in parts(message["content"])]
    text = summarising.prompt(summaries.ASK, before.removeprefix(mending.SUMMARY), "\n\n".join(said))
    tale.journal.append(Summed(tale.requests, [{"role": "user", "content": text}]))
    return f"{mending.SUMMARY}summary-{tale.requests} of all"


@pytest.mark.parametrize(("left_out", "wrong"), [(0, set()), (1, {("lost", 1)})])
def test_a_summary_of_the_proxys_stands_for_what_its_text_says(
    tale: Tale, left_out: int, wrong: set[tuple[Kind, int]]
) -> None:
    tale.turn(5, calls=("one",))
    tale.turn(6, asked=results("one"), calls=("two",))
    path = list(tale.paths["ada"])
    tale.send(8, asked=results("one", turn=8))  # a branch, later: the same calls have other results
    first = summed_by_proxy(tale, path[left_out:2])
    whole = summed_by_proxy(tale, path[2:4], first, results("one"))
    tale.turn(7, asked=results("two"), shown=lambda path: [(whole, path[-1][1])])  # in the middle of an exchange
    assert tale.kinds() == wrong


def told_of(number: int) -> str:
    return f"{OPEN} Attempt: commit-{number} {CLOSE}"


def begun(tale: Tale, turn: int, *attempts: int, joined: bool = False) -> None:
    """The agent's path begins anew, with these attempts told at its head. `joined`: in one text, as another model is
    given them."""
    off = frozenset(entry.turn for entry in tale.journal if isinstance(entry, Sent))
    tale.journal.append(TakenOff(tale.now(), "ada", off, certain=True))
    attempt = tale.send(turn)
    messages = as_messages([], prompt(turn))
    messages[-1]["content"] += [{"type": "text", "text": told_of(number)} for number in attempts]
    messages[-1]["content"].append(messages[-1]["content"].pop(1))
    if joined:
        texts = "\n\n".join(block["text"] for block in messages[-1]["content"][1:])
        messages[-1]["content"][1:] = [{"type": "text", "text": texts}]
    tale.requests += 1
    tale.journal.append(Asked(tale.now(), tale.requests, "p", messages, Answer(f"ok-{tale.requests}")))
    tale.journal.append(Told(tale.requests))
    tale.hear(attempt, "acknowledged", Answer(f"ok-{tale.requests}"))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("told", "wrong"), [((9,), False), ((), True), ((9, 8), True)])
def test_the_first_prompt_is_told_exactly_what_was_committed(
    tale: Tale, told: tuple[int, ...], wrong: bool, joined: bool
) -> None:
    tale.journal += [Committed(tale.now(), "ada", 9, certain=True), Committed(tale.now(), "bob", 8, certain=True)]
    begun(tale, 5, *told, joined=joined)
    assert tale.kinds() == ({("untold", 5)} if wrong else set())


def test_what_is_asked_beside_a_conversation_is_shown_it_and_is_never_on_it(tale: Tale) -> None:
    aside = "the last words"
    tale.journal.append(Sent(tale.now(), -9, 9, "ada", aside, aside=True))
    answer = tale.ask(aside, tale.paths["ada"])
    tale.hear(-9, "unknown")
    tale.turn(5)
    assert not tale.faults()
    tale.turn(6, shown=lambda path: [*path, (aside, answer)])
    assert tale.kinds() == {("phantom", 9)}


# --- any history, any fault ---------------------------------------------------------------------------------

Plant = Callable[[random.Random, list[Pair], list[Pair]], list[Pair]]


def _dropped(dice: random.Random, path: list[Pair], other: list[Pair]) -> list[Pair]:
    at = dice.randrange(len(path))
    return path[:at] + path[at + 1 :]


def _doubled(dice: random.Random, path: list[Pair], other: list[Pair]) -> list[Pair]:
    at = dice.randrange(len(path))
    return path[: at + 1] + path[at:]


def _swapped(dice: random.Random, path: list[Pair], other: list[Pair]) -> list[Pair]:
    at = dice.randrange(len(path) - 1)
    return [*path[:at], path[at + 1], path[at], *path[at + 2 :]]


def _foreign(dice: random.Random, path: list[Pair], other: list[Pair]) -> list[Pair]:
    at = dice.randrange(len(path) + 1)
    return [*path[:at], dice.choice(other), *path[at:]]


def _crossed(dice: random.Random, path: list[Pair], other: list[Pair]) -> list[Pair]:
    at = dice.randrange(len(path) - 1)
    (one, first), (two, second) = path[at : at + 2]
    return [*path[:at], (one, second), (two, first), *path[at + 2 :]]


def _cut(dice: random.Random, path: list[Pair], other: list[Pair]) -> list[Pair]:
    at = dice.randrange(len(path))
    asked, answer = path[at]
    return [*path[:at], (asked, Answer(answer.text[:-3], answer.calls)), *path[at + 1 :]]


def _phantom(dice: random.Random, path: list[Pair], other: list[Pair]) -> list[Pair]:
    at = dice.randrange(len(path) + 1)
    return [*path[:at], ("hello?", Answer("No response requested.")), *path[at:]]


def _planted(plant: Plant, dice: random.Random, other: list[Pair], path: list[Pair]) -> list[Pair]:
    return plant(dice, path, other)


PLANTS: tuple[Plant, ...] = (_dropped, _doubled, _swapped, _foreign, _crossed, _cut, _phantom)


@given(seed=st.integers(0, 1 << 32), plant=st.sampled_from([None, *PLANTS]))
def test_any_planted_fault_in_any_history_is_found_and_none_in_an_honest_one(seed: int, plant: Plant | None) -> None:
    dice = random.Random(seed)
    tale = Tale()
    number = 0
    for agent in ("ada", "bob"):
        for _ in range(2):
            number += 1
            tale.turn(number, agent=agent)
    planted = dice.randint(1, 12)
    for at in range(12):
        number += 1
        agent, other = dice.sample(("ada", "bob"), 2)
        path = tale.paths[agent]
        waiting = path[-1][1].calls
        calls = tuple(f"c{number}-{n}" for n in range(dice.choice((0, 0, 1, 2))))
        outcome: Outcome = dice.choice(("acknowledged", "acknowledged", "failed", "unknown"))
        shown: Callable[[list[Pair]], Shown] = list
        if plant is not None and at + 1 == planted:
            shown = partial(_planted, plant, dice, tale.paths[other])

        asked = results(*waiting, turn=number) if waiting else None
        tale.turn(number, agent=agent, outcome=outcome, calls=calls, asked=asked, shown=shown)
    assert bool(tale.faults()) == (plant is not None)


def test_calls_that_were_left_open_are_told_without_the_answer_that_the_proxy_wrote_behind_them() -> None:
    """The CLI shows that answer in the request for a summary alone."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": arguments("call-1-0")}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": NOT_ANSWERED}
    told: list[JSON] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [{"type": "text", "text": CLOSING}]},
        {"role": "user", "content": "two"},
    ]
    _, last = exchanges(without_closing(told))
    assert (last.asked, last.left_open) == ("two", ("call-1-0",))
