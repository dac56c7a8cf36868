"""What the CLI was seen to do by itself, from what it noted."""

from __future__ import annotations

import json
from pathlib import Path

from cli_session_proxy.backends.claude.process.turn_reader import SYNTHETIC_MODEL
from cli_session_proxy.backends.claude.sessions.decisions import of_other_models, own_repairs
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
    assert of_other_models(path, said("opus")) == 3
    assert of_other_models([*path, *said("opus")], said("sonnet")) == 2


def test_where_the_model_stays_nothing_new_is_left_out() -> None:
    assert of_other_models(said("opus", "sonnet"), said("sonnet")) == 0
    assert of_other_models(said("sonnet", SYNTHETIC_MODEL), said("sonnet")) == 0
    assert of_other_models([], said("sonnet")) == 0
    assert of_other_models(said("sonnet"), said(SYNTHETIC_MODEL)) == 0


def test_what_it_notes_of_its_own_repairs_is_counted() -> None:
    """The forms are those of CLI 2.1.330."""
    attachments = ["thinking_stripped", "tool_results_cut", "tool_results_cut", "of_no_interest"]
    records = [
        Record(json.dumps({"type": "attachment", "attachment": {"type": kind}}), f"uuid-{kind}") for kind in attachments
    ]
    kept = json.dumps(["[Image removed: too large]", "[Image removed: too large]", "[Document removed: damaged]"])
    assert own_repairs([*records, Record(kept, None)], ()) == {
        "cli_left_out_thinking": 1,
        "cli_left_out_tool_results": 2,
        "cli_left_out_images": 2,
        "cli_left_out_documents": 1,
    }


def test_an_image_that_it_wrote_down_otherwise_was_changed() -> None:
    scribe = Scribe("s", Path("/sandbox"), "2.1.330", 1_790_000_000.0)
    one, other, smaller = ({"type": "image", "source": {"type": "base64", "data": data}} for data in ("a", "b", "c"))
    written = [scribe.record(Message("user", (one, smaller, WORDS)), "sonnet")]
    assert own_repairs(written, (one, other, WORDS)) == {"cli_changed_images": 1}
    assert own_repairs(written, (one, smaller, WORDS)) == {}
    assert own_repairs(written, (WORDS,)) == {}
