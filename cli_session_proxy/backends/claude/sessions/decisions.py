"""Decides the head of a turn's request (system prompt and tools), and which parts of the path the model is not shown.

Decided before a turn, by changes of its head and by refusals of the provider in earlier attempts; and after it, by what
the CLI itself left out. The decisions are stored in the chain as records of our own (`transcript.mending`).
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ....domain import system_prompts
from ....domain.client_tools import PREFIX, Offers
from ....domain.evidence import Note, NoteCode
from ....domain.models import JSON, Block, Record, Tool, Turn
from ....domain.options import left_out
from ....domain.sizes import size_of
from ....errors import ConfigError, ContextTooLong, ProxyError, RequestTooLarge
from ....settings import Profile, Settings, SystemPromptChanges
from ....stores.base import Store
from ...base import Job, Remedy
from ..process import failures
from ..process.turn_reader import SYNTHETIC_MODEL
from ..transcript import mending
from ..transcript.mending import Head, LeftOut
from . import paths
from .capture import LiveSession
from .repair import TurnContext

# How many turns' heads are cached; others are read from the chain.
HEADS = 1024
# If a too long path consists to this share of images or documents, these are left out before it is summarised.
SHARE = 0.5
# The note's code for each kind that is left out.
CODES: Mapping[LeftOut, NoteCode] = {
    "thinking": "thinking_left_out",
    "images": "images_left_out",
    "documents": "documents_left_out",
    "calls": "calls_left_out",
}


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision on what is left out from a turn on: marks for the chain, and notes for the turn. `why`: the code if
    the session has to be written again."""

    records: tuple[Record, ...] = ()
    notes: tuple[Note, ...] = ()
    why: Literal["left_out", "window"] = "left_out"


# Summarises a path: returns the marks and notes; none if there is nothing to summarise.
Summarise = Callable[[Sequence[Record]], Awaitable["Decided"]]


class Decisions:
    """One per engine."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._heads: OrderedDict[str, Head] = OrderedDict()  # by turn id, the newest turns
        # Windows are configured: ask each turn for its own.
        of_models = any(model.window for model in settings.models.values())
        self._windows = of_models or any(profile.window for profile in settings.profiles.values())

    async def head_at(self, own: Turn | None) -> Head | None:
        """The head of this turn's request; None if there was none, or it is unknown."""
        if own is None or own.session_id is None:
            return None
        if (known := self._heads.get(own.id)) is not None:
            return known
        head = mending.head_of(await self._store.records(own.id))
        profile = None if own.placed.rule == "adopted" else self._profile_of(own)
        if head is None and profile is not None:
            system = self._settings.system_prompt_for(profile, own.system)
            tools = own.options.tools
            head = Head(system, system, tuple(tool.as_json() for tool in tools))
        if head is not None:
            self.remember(own.id, head)
        return head

    def remember(self, turn_id: str, head: Head) -> None:
        self._heads[turn_id] = head
        while len(self._heads) > HEADS:
            self._heads.popitem(last=False)

    def _profile_of(self, turn: Turn) -> Profile | None:
        """None: the profile was removed from the settings."""
        try:
            return self._settings.profile_for(turn.profile)
        except ConfigError:
            return None

    async def before(
        self,
        context: TurnContext,
        own: Turn | None,
        opened: Opening,
        summarise: Summarise,
    ) -> Decided:
        """What else is not shown to the model from this turn on. `own`: the path's newest turn that the CLI
        answered."""
        job, parent = context.job, context.job.parent
        kinds = CODES.keys() & job.remedies  # to leave out
        if parent is None:
            return Decided()
        if not context.capability.heals_thinking:
            last = own or parent
            profile = self._profile_of(last)
            model = None if profile is None else self._settings.model_for(last.model, profile)
            upgraded = job.session is not None and job.session.cli_version != context.capability.version
            # From the fifth turn on, CLI 1.0.120 puts a reminder into the newest message and removes it at the next
            # turn, which makes the thinking after it invalid. After one refusal all such thinking is left out.
            known = await self._store.records(parent.id)
            changed = not opened.same or upgraded or (model, profile) != (job.model, job.profile)
            if changed or mending.was_refused(known, "thinking"):
                kinds.add("thinking")
        first = Decided()
        if self._windows or job.window is not None or (own is not None and own.options.window is not None):
            first = await self._in_window(parent, own, job)
        only_window = not kinds and "summary" not in job.remedies
        if only_window and not first.records:
            return first
        path = await paths.shown(self._store, parent.id, first.records)
        if "summary" in job.remedies:
            summed = await summarise(path)
            first = Decided((*first.records, *summed.records), (*first.notes, *summed.notes))
        path = await self._store.records(parent.id)
        decided = await asyncio.to_thread(_leave_out, path, kinds, first, refused="thinking" in job.remedies)
        return replace(decided, why="window") if only_window else decided

    async def _in_window(self, parent: Turn, own: Turn | None, job: Job) -> Decided:
        """Leave out turns older than the window from here on, or show again what a narrower window left out."""
        profile = self._profile_of(own) if own is not None else None
        earlier = self._settings.window_for(own.model, profile, own.options.window) if own and profile else None
        if job.window is None and earlier is None:
            return Decided()
        turns = [*await self._store.path(parent.id), job.turn]
        sizes = [size_of(one, before) for one, before in zip(turns, [None, *turns], strict=False)]
        outside = left_out(job.window, sizes)
        if outside and outside == len(turns) - 1:  # a session must begin with a stored turn
            outside = max(at for at in range(outside) if sizes[at].opens)
        kept_from = None
        if outside:
            own_records = await self._store.own_records(turns[outside].id)
            kept_from = next((one.uuid for one in own_records if one.uuid is not None), None)
        marks: tuple[Record, ...] = ()
        if mending.window_of(await self._store.records(parent.id)) != kept_from:
            marks = (mending.window(kept_from),)
        return Decided(marks, (Note("outside_window", outside),) if outside else ())

    async def seen(self, ready: LiveSession, records: Sequence[Record]) -> tuple[Note, ...]:
        """Notes of what the CLI itself left out or changed, by its transcript."""
        counts = own_repairs(records, ready.prompt)
        tip = ready.session.tip_turn_id
        left_out = "cli_left_out_thinking" in counts  # how many blocks is unknown
        if left_out or (ready.fresh and tip is not None):  # a change of the model starts a new process
            path = await paths.shown(self._store, tip, ready.decisions)
            # Thinking before this record is already left out.
            start = next((at for at in range(len(path), 0, -1) if '"thinking_stripped"' in path[at - 1].line), 0)
            if left_out:
                counts["cli_left_out_thinking"] = await asyncio.to_thread(mending.count, path[start:], "thinking")
            else:
                counts["other_models_thinking"] = await asyncio.to_thread(of_other_models, path[start:], records)
        return tuple(Note(code, number) for code, number in counts.items() if number)

    async def remedy(self, parent: Turn | None, error: ProxyError, *, tried: Collection[Remedy]) -> Remedy | None:
        """What to leave out so that the provider accepts the request, the least loss first."""
        remedies = [remedy for remedy in failures.remedies(error) if remedy not in tried]
        too_long = isinstance(error, ContextTooLong | RequestTooLarge)
        if parent is None or not remedies or (too_long and self._settings.on_context_full == "error"):
            return None
        path = await paths.shown(self._store, parent.id)

        def first() -> Remedy | None:
            for remedy in remedies:
                what = next((kind for kind in CODES if kind == remedy), None)
                if what is None:  # no kind of block, such as a summary
                    return remedy
                # Images are left out of a too long request only if they are a large part of it.
                least = SHARE * sum(len(record.line) for record in path) if too_long else 0
                if mending.count(path, what) and mending.weight(path, what) >= least:
                    return remedy
            return None

        return await asyncio.to_thread(first)


def _leave_out(path: Sequence[Record], kinds: Collection[LeftOut], first: Decided, *, refused: bool) -> Decided:
    """The decision `first`, extended by marks and notes for the path's blocks of these kinds, and for thinking that
    becomes invalid without them. `refused`: the provider refused the path's thinking."""
    path = mending.shown([*path, *first.records])
    counts = {what: number for what in CODES if what in kinds and (number := mending.count(path, what))}
    marks = [*first.records, *(mending.leave_out(what, refused=refused and what == "thinking") for what in counts)]
    if "thinking" not in counts:
        # Thinking behind a change is invalid, and a summary or a window changes the path's beginning.
        later = path if first.records else mending.since_first(path, counts)
        if invalid := mending.count(later, "thinking"):
            counts["thinking"] = invalid
            since = next(record.uuid for record in later if record.uuid is not None)
            marks.append(mending.leave_out("thinking", since))
    return Decided(tuple(marks), (*first.notes, *(Note(CODES[what], number) for what, number in counts.items())))


# --- The head of a request: kept byte-identical if a change can be told to the model in another way

# The CLI always tells the model its working directory, which is the agent's.
ELSEWHERE = (
    f"Tools whose names begin with {PREFIX} run on the user's side, not in this session's own working directory: "
    "use the paths that the conversation names."
)


@dataclass(frozen=True, slots=True)
class Opening:
    """The head of a turn's request, and the tools that the turn offers. `reminder`: a block of its prompt that states
    what has changed in the system prompt; `notes`: for the client; `same`: the head has not changed."""

    head: Head
    offers: Offers
    reminder: Block | None = None
    notes: tuple[Note, ...] = ()
    same: bool = True


def opening(
    before: Head | None, system: str | None, offers: Offers, changes: SystemPromptChanges, *, asks: bool
) -> Opening:
    """The head for a turn with this system prompt and these tools. `before`: the path's head, None for a new
    conversation; `changes`: the setting; `asks`: the turn has a prompt."""
    tools = tuple(tool.as_json() for tool in offers.tools)
    line = f"\n\n{ELSEWHERE}"  # about tools: not the client's, so compare without it
    known = None if before is None or before.known_system is None else before.known_system.removesuffix(line)
    same_words = before is not None and known == system
    # A conversation that already had tools without this line does not get it: its head stays the same.
    if tools and system is not None and not (before is not None and before.tools and before.known_system == system):
        system += line
    if before is None or (same_words and before.known_system != system):  # the line about tools was added or removed
        return Opening(Head(system, system, tools), offers, same=before is None)
    same_tools = before.tools == tools or _normal_form(before.tools) == _normal_form(tools)
    if same_tools and before.tools:  # keep the first spelling of equal tools
        tools, offers = before.tools, Offers.of([Tool.from_json(tool) for tool in before.tools])
    head = before if before.tools == tools else replace(before, tools=tools)
    if system == before.known_system:
        return Opening(head, offers, same=same_tools)
    fits = (  # only of a changed prompt: the comparison takes long for a long one
        changes != "replace"
        and system is not None
        and before.system is not None
        and system_prompts.is_same_but_for_values(before.system, system)
    )
    if fits and not asks:  # no prompt to state the change in: it waits for the next one
        return Opening(head, offers, same=same_tools)
    in_prompt = (fits and changes == "auto") or changes == "newest-turn" or system == before.system
    if asks and in_prompt and system is not None and before.system is not None and before.known_system is not None:
        text = system_prompts.change_reminder(before.known_system, system)
        notes = (Note("system_prompt_in_newest_turn"),)
        return Opening(replace(head, known_system=system), offers, text, notes, same_tools)
    return Opening(Head(system, system, tools), offers, None, (Note("system_prompt_replaced"),), same=False)


def _normal_form(tools: Sequence[JSON]) -> list[str]:
    """The tools in a normal form, independent of their order and the order of keys."""
    fields = ({name: tool.get(name) for name in ("name", "description", "schema")} for tool in tools)
    return sorted(json.dumps(tool, sort_keys=True) for tool in fields)


# --- Repairs by the CLI itself, which it only notes in its transcript (2.1.330)

# Thinking that it leaves out from then on is noted in an attachment. If the provider refused an image or a document,
# there is an API error record in the middle of the turn, and the CLI replaces the block by a text in its requests.

# Types of these attachments.
_ATTACHMENTS: Mapping[str, NoteCode] = {
    "thinking_stripped": "cli_left_out_thinking",
    "thinking_drop": "cli_left_out_thinking",
    "tool_results_cut": "cli_left_out_tool_results",
}
_REMOVED: Mapping[str, NoteCode] = {
    "[Image removed": "cli_left_out_images",
    "[Document removed": "cli_left_out_documents",
}


def own_repairs(records: Iterable[Record], prompt: Sequence[Block]) -> dict[NoteCode, int]:
    """Counts by code. `prompt`: what we sent; an image that the CLI recorded differently was changed."""
    counts: dict[NoteCode, int] = {}
    sent = {_data(block) for block in prompt if block.get("type") == "image"}
    for record in records:
        if record.uuid is None:
            for text, removed in _REMOVED.items():
                if number := record.line.count(text):
                    counts[removed] = max(counts.get(removed, 0), number)
            continue
        if not (sent or '"attachment"' in record.line):
            continue
        data = json.loads(record.line)
        attachment = data.get("attachment")
        code = _ATTACHMENTS.get(str(attachment.get("type"))) if isinstance(attachment, dict) else None
        if code is not None:
            counts[code] = counts.get(code, 0) + 1
        for block in mending.blocks_of(data) if data.get("type") == "user" and sent else ():
            if block.get("type") == "image" and _data(block) not in sent:
                counts["cli_changed_images"] = counts.get("cli_changed_images", 0) + 1
    return counts


def of_other_models(path: Sequence[Record], records: Iterable[Record]) -> int:
    """How many thinking blocks of this path are not sent because these records are the first of another model."""
    models = {model for record in records if (model := _model(record)) is not None}
    earlier = next((model for record in reversed(path) if (model := _model(record)) is not None), None)
    if not models or earlier is None or earlier in models:
        return 0
    return mending.count((record for record in path if _model(record) not in models), "thinking")


def _model(record: Record) -> str | None:
    """The model of this answer; None if it is no answer, or a message of the CLI itself."""
    if record.uuid is None or '"assistant"' not in record.line:
        return None
    message = json.loads(record.line).get("message")
    is_answer = isinstance(message, dict) and message.get("role") == "assistant"
    model = message.get("model") if is_answer else None
    return model if isinstance(model, str) and model != SYNTHETIC_MODEL else None


def _data(block: Block) -> str | None:
    source = block.get("source")
    data = source.get("data") if isinstance(source, dict) else None
    return data if isinstance(data, str) else None
