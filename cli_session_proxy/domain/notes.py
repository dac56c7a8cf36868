"""What the model was not shown as it was said, and why: codes with numbers, put into words in one room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .forms import Recorded

Code = Literal[
    "system_prompt_in_newest_turn",  # its new values, or the whole of it, went out with the prompt
    "system_prompt_replaced",
    "thinking_left_out",  # its seal held for another head of the request
    "cut_thinking_left_out",  # it was finished before the provider cut its stream off
    "images_left_out",
    "documents_left_out",
    "summarised",  # the oldest exchanges: the model knows a summary
    "model_takes_no_images",
    "model_takes_no_documents",
    "outside_window",  # turns that are older than the request's window
    "not_summarised",  # of them, those of which there is no summary either
    "files_elsewhere",  # what the agent's tools made is on a host that could not be reached
    "said_beside",  # prompts of somebody in the session while the turn ran: they are on no path
    "session_not_written",  # by its CLI, which said so: the transcript was compared with the chain, and mended
    # the CLI's own doing
    "cli_left_out_thinking",
    "other_models_thinking",
    "cli_left_out_tool_results",
    "cli_left_out_images",
    "cli_left_out_documents",
    "cli_changed_images",
    # of a history that a client brought
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
    """`count`: of blocks or exchanges, what the code speaks of; 1 where there can be only one."""

    code: Code
    count: int = 1


def header(notes: Iterable[Note]) -> str:
    """The value of `X-Continuity-Note`: `code=count` of each, in order."""
    return ", ".join(f"{note.code}={note.count}" for note in notes)
