"""What the CLI was seen to do by itself, from what it noted."""

from __future__ import annotations

from pathlib import Path

from cli_session_proxy.backends.claude.sessions import own_repairs
from cli_session_proxy.backends.claude.sessions.reopening import SYNTHETIC_MODEL
from cli_session_proxy.backends.claude.transcript import Scribe
from cli_session_proxy.domain.models import Block, Message, Record

THOUGHT: Block = {"type": "thinking", "thinking": "hm", "signature": "sealed"}
WORDS: Block = {"type": "text", "text": "Well."}


def said(*models: str) -> list[Record]:
    """An answer with a thought of each of these models."""
    scribe = Scribe("s", Path("/sandbox"), "2.1.330", 1_790_000_000.0)
    return [scribe.record(Message("assistant", (THOUGHT, WORDS)), model) for model in models]


def test_thoughts_of_other_models_are_counted_where_the_model_changes() -> None:
    path = said("sonnet", "sonnet", "opus", "sonnet")
    assert own_repairs.of_other_models(path, said("opus")) == 3
    assert own_repairs.of_other_models([*path, *said("opus")], said("sonnet")) == 2


def test_where_the_model_stays_nothing_new_is_left_out() -> None:
    assert own_repairs.of_other_models(said("opus", "sonnet"), said("sonnet")) == 0
    assert own_repairs.of_other_models(said("sonnet", SYNTHETIC_MODEL), said("sonnet")) == 0
    assert own_repairs.of_other_models([], said("sonnet")) == 0
    assert own_repairs.of_other_models(said("sonnet"), said(SYNTHETIC_MODEL)) == 0
