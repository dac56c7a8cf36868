"""The head of a request: what a change of the system prompt or of the tools comes to."""

from __future__ import annotations

import pytest

from cli_session_proxy.backends.claude.sessions.decisions import ELSEWHERE, opening
from cli_session_proxy.backends.claude.transcript.mending import Head
from cli_session_proxy.domain.client_tools import Offers
from cli_session_proxy.domain.models import Tool
from cli_session_proxy.settings import SystemPromptChanges

NONE = Offers()
AT_10, AT_11 = "You are A. It is 10:00.", "You are A. It is 11:00."
OTHER = "You are B. It is 10:00."


def codes(head: Head | None, system: str | None, changes: SystemPromptChanges, *, asks: bool = True) -> list[str]:
    return [note.code for note in opening(head, system, NONE, changes, asks=asks).notes]


NEWEST, REPLACED = ["system_prompt_in_newest_turn"], ["system_prompt_replaced"]


@pytest.mark.parametrize(
    ("changes", "values", "words"),
    [("auto", NEWEST, REPLACED), ("newest-turn", NEWEST, NEWEST), ("replace", REPLACED, REPLACED)],
)
def test_the_setting_decides_where_a_change_goes(
    changes: SystemPromptChanges, values: list[str], words: list[str]
) -> None:
    head = Head(AT_10, AT_10)
    assert codes(head, AT_11, changes) == values
    assert codes(head, OTHER, changes) == words
    assert codes(head, AT_10, changes) == []
    assert codes(head, None, changes) == REPLACED
    assert codes(None, AT_10, changes) == []


def test_new_values_are_told_once_and_the_head_stays() -> None:
    first = opening(Head(AT_10, AT_10), AT_11, NONE, "auto", asks=True)
    assert first.head == Head(AT_10, AT_11)
    assert first.same
    assert first.reminder is not None
    assert "It is 11:00." in first.reminder["text"]
    again = opening(first.head, AT_11, NONE, "auto", asks=True)
    assert (again.head, again.reminder, again.notes) == (first.head, None, ())
    back = opening(first.head, AT_10, NONE, "auto", asks=True)
    assert back.head == Head(AT_10, AT_10)
    assert back.reminder is not None
    assert "It is 10:00." in back.reminder["text"]


def test_results_alone_carry_no_new_values_and_the_next_prompt_does() -> None:
    waits = opening(Head(AT_10, AT_10), AT_11, NONE, "auto", asks=False)
    assert (waits.head, waits.reminder, waits.notes) == (Head(AT_10, AT_10), None, ())
    assert opening(waits.head, AT_11, NONE, "auto", asks=True).reminder is not None


def test_another_prompt_replaces_the_head() -> None:
    made = opening(Head(AT_10, AT_11), OTHER, NONE, "auto", asks=True)
    assert (made.head, made.reminder, made.same) == (Head(OTHER, OTHER), None, False)


A = Tool("a", "The first.", {"type": "object", "properties": {"x": {}, "y": {}}})
A_AGAIN = Tool("a", "The first.", {"properties": {"y": {}, "x": {}}, "type": "object"})
B = Tool("b", "The second.")


@pytest.mark.parametrize("spelt", [[B, A_AGAIN], [A_AGAIN, B]])
def test_an_unchanged_set_of_tools_is_offered_as_it_was_first(spelt: list[Tool]) -> None:
    first = opening(None, AT_10, Offers.of([A, B]), "auto", asks=True)
    again = opening(first.head, AT_10, Offers.of(spelt), "auto", asks=True)
    assert again.same
    assert str(again.head) == str(first.head)
    assert list(again.offers.entries.items()) == list(first.offers.entries.items())
    assert str(again.offers.entries) == str(first.offers.entries)


def test_with_tools_the_model_is_told_that_they_run_elsewhere() -> None:
    told = f"{AT_10}\n\n{ELSEWHERE}"
    first = opening(None, AT_10, Offers.of([A]), "auto", asks=True)
    assert (first.head.system, first.head.known_system) == (told, told)
    again = opening(first.head, AT_10, Offers.of([A]), "auto", asks=True)
    assert (again.head, again.same, again.notes) == (first.head, True, ())
    later = opening(first.head, AT_11, Offers.of([A]), "auto", asks=True)
    assert (later.head.system, [note.code for note in later.notes]) == (told, NEWEST)
    gone = opening(first.head, AT_10, NONE, "auto", asks=True)
    assert (gone.head, gone.same, gone.notes) == (Head(AT_10, AT_10), False, ())
    back = opening(gone.head, AT_10, Offers.of([A]), "auto", asks=True)
    assert (back.head, back.same, back.notes) == (first.head, False, ())
    assert opening(None, None, Offers.of([A]), "auto", asks=True).head.system is None  # the CLI's own prompt


def test_a_conversation_from_before_that_line_keeps_its_head() -> None:
    tools = opening(None, AT_10, Offers.of([A]), "auto", asks=True).head.tools
    before = Head(AT_10, AT_10, tools)
    again = opening(before, AT_10, Offers.of([A]), "auto", asks=True)
    assert (again.head, again.same, again.notes) == (before, True, ())


def test_another_set_of_tools_is_another_head() -> None:
    first = opening(None, AT_10, Offers.of([A, B]), "auto", asks=True)
    for tools in ([A], [A, B, Tool("c")], [A, Tool("b", "Another.")]):
        made = opening(first.head, AT_10, Offers.of(tools), "auto", asks=True)
        assert not made.same
        assert list(made.offers.tools) == tools
