"""Is a changed system prompt another one?"""

from __future__ import annotations

import pytest

from cli_session_proxy.domain.system_prompts import change_reminder, is_same_but_for_values

SAME = [
    ("It is 10:00.", "It is 9:59:30."),
    ("Today is Monday, November 3, 2026.", "Today is Tuesday, December 1, 2026."),
    ("Now: 2026-11-21T10:00:00Z", "Now: 2027-01-01T00:00:00Z"),
    ("Turn 9 of 1,000", "Turn 10 of 1,000"),
    ("Session e854f1a5-7086-4d8c-af9b-8202bda8c009.", "Session 00000000-0000-4000-8000-000000000000."),
    ("Request req_8f3a9c21d", "Request req_1b2c3d4e"),
    ("It is 11 AM", "It is 1 PM"),
    ("Balance: -3.50", "Balance: +12.75"),
]
OTHER = [
    ("You are ALPHA.", "You are BETA."),
    ("Use python3.", "Use ruby3."),
    ("Use windows11.", "Use ubuntu2404."),
    ("It is 10:00.", "It is 10:00. Be brief."),
    ("It is 10:00.", "it is 10:00."),
    ("a\nb 1", "b 2\na"),
    ("Answer in May or later.", "Answer in haste or later."),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_dates_times_numbers_and_ids_make_no_other_prompt(one: str, other: str) -> None:
    assert is_same_but_for_values(one, other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_any_changed_word_makes_another_prompt(one: str, other: str) -> None:
    assert not is_same_but_for_values(one, other)


def test_the_model_is_told_the_lines_that_changed_and_no_others() -> None:
    said = change_reminder("You are a clerk.\nIt is 10:00.\nDesk 4.", "You are a clerk.\nIt is 11:30.\nDesk 4.")["text"]
    assert said.startswith("<system-reminder>")
    assert "It is 11:30." in said
    assert "clerk" not in said
    assert "Desk" not in said


def test_the_model_is_told_the_whole_of_another_prompt() -> None:
    said = change_reminder("You are ALPHA.\nIt is 10:00.", "You are BETA.\nIt is 10:00.")["text"]
    assert "You are BETA.\nIt is 10:00." in said
