"""What stands before the messages of a request: kept byte for byte where a change can reach the model otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....domain import system_prompts
from ....domain.client_tools import PREFIX, Offers
from ....domain.models import JSON, Block, Tool
from ....domain.notes import Note
from ....settings import SystemPromptChanges
from ..transcript import Head

# The CLI tells the model its own working directory, the agent's sandbox, and there is no way to leave that out.
ELSEWHERE = (
    f"Tools whose names begin with {PREFIX} run on the user's side, not in this session's own working directory: "
    "use the paths that the conversation names."
)


@dataclass(frozen=True, slots=True)
class Opening:
    """The head of a turn's request, and what goes to the model with its prompt. `same`: no byte of it has changed."""

    head: Head
    offers: Offers
    reminder: Block | None = None
    notes: tuple[Note, ...] = ()
    same: bool = True


def opening(
    before: Head | None, system: str | None, offers: Offers, changes: SystemPromptChanges, *, asks: bool
) -> Opening:
    """`before` is the path's head, None for a new conversation; `asks`: the turn has a prompt of its own."""
    tools = tuple(tool.as_json() for tool in offers.tools)
    line = f"\n\n{ELSEWHERE}"
    told = None if before is None or before.told is None else before.told.removesuffix(line)
    same_words = before is not None and told == system
    # A conversation that had tools before this line was said goes on without it: its head stays as it is.
    if tools and system is not None and not (before is not None and before.tools and before.told == system):
        system += line
    if before is None or (same_words and before.told != system):  # tools came or went: their line does
        return Opening(Head(system, system, tools), offers, same=before is None)
    same_tools = _in_one_spelling(before.tools) == _in_one_spelling(tools)
    if same_tools:
        tools, offers = before.tools, Offers.of([Tool.from_json(tool) for tool in before.tools])
    head = replace(before, tools=tools)
    if system == before.told or (changes != "replace" and not asks and system is not None and _fits(before, system)):
        return Opening(head, offers, same=same_tools)  # results go out alone: new values wait for the next prompt
    if system is not None and before.system is not None and before.told is not None and asks:
        fits = changes == "auto" and _fits(before, system)
        if fits or changes == "newest-turn" or system == before.system:
            said = system_prompts.reminder(before.told, system)
            notes = (Note("system_prompt_in_newest_turn"),)
            return Opening(replace(head, told=system), offers, said, notes, same_tools)
    return Opening(Head(system, system, tools), offers, None, (Note("system_prompt_replaced"),), same=False)


def _fits(before: Head, system: str) -> bool:
    return before.system is not None and system_prompts.is_same_but_for_values(before.system, system)


def _in_one_spelling(tools: Sequence[JSON]) -> list[str]:
    """The set of tools, whatever the order in which they and the names in their schemas were written down."""
    shown = ({name: tool.get(name) for name in ("name", "description", "schema")} for tool in tools)
    return sorted(json.dumps(tool, sort_keys=True) for tool in shown)
