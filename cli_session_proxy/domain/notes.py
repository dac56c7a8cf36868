"""Differences between messages and what the model was shown, as codes with counts. `export.explain` has the words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .forms import Recorded

Code = Literal[
    "system_prompt_in_newest_turn",  # changes of it were sent with the prompt
    "system_prompt_replaced",
    "thinking_left_out",  # its signature was for another head of the request
    "cut_thinking_left_out",  # from an answer that the provider cut
    "images_left_out",
    "documents_left_out",
    "summarised",  # the model was shown a summary of the oldest turns
    "model_takes_no_images",
    "model_takes_no_documents",
    "outside_window",  # turns older than the request's window
    "not_summarised",  # of these, turns that are in no summary
    "files_elsewhere",  # files of the agent's tools are on an unreachable host
    "said_beside",  # a person's prompts in the session during the turn, on no path
    "session_not_written",  # its CLI reported a failed write: the transcript was repaired
    # by the CLI itself
    "cli_left_out_thinking",
    "other_models_thinking",
    "cli_left_out_tool_results",
    "cli_left_out_images",
    "cli_left_out_documents",
    "cli_changed_images",
    # in a client's history
    "foreign_thinking_left_out",
    "ids_rewritten",
    "calls_without_result",
    "results_without_call",
    "empty_messages",
    "characters_replaced",
    "arguments_kept_as_text",
    "images_made_smaller",
    "unreadable_images_left_out",
    "unreadable_documents_left_out",
]


@dataclass(frozen=True, slots=True)
class Note(Recorded):
    """`count`: of the blocks or turns that the code is about; 1 if there can be only one."""

    code: Code
    count: int = 1


def header(notes: Iterable[Note]) -> str:
    """The value of `X-Continuity-Note`: `code=count` of each, in order."""
    return ", ".join(f"{note.code}={note.count}" for note in notes)
