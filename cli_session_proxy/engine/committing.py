"""Writes an agent's attempt at a fix into a git commit message, so that later attempts can read it.

The message has the path's turns and a summary by the model. The model is asked in a temporary copy of the chain, so the
agent's own chain, session and head do not change.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import logs, redact
from ..domain.forms import Recorded
from ..domain.lineage import answer_text
from ..domain.models import JSON, THINKING, Agent, Message, Turn, Usage
from ..errors import InvalidRequest, did_you_mean
from ..git_memory import records
from ..git_memory.attempts import Earlier, earlier, fix_of, write
from ..git_memory.records import FixAttempt
from ..settings import GitMemory, Settings, fix_id_of
from ..stores import held
from ..stores.base import Store

log = logs.get(__name__)

Outcome = Literal["passed", "failed"]
# Asks the model, in a temporary chain of these messages with the options of the turn, for JSON of `SUMMARY`. Raises
# `ProxyError`.
Ask = Callable[[Turn, Sequence[Message], JSON], Awaitable[str]]

# For an attempt without a summary: how many of its newest turns are listed, and characters of each line.
STEPS = 400
STEP = 300
# How many earlier attempts a new attempt lists, one a line.
PREVIOUS = 20

_TEXT: JSON = {"type": "string"}
SUMMARY: JSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["headline", "root_cause", "fix", "reasoning", "investigation", "confidence", "why_it_failed"],
    "properties": {
        "headline": _TEXT | {"description": "one line of at most 60 characters: what was done"},
        "root_cause": _TEXT,
        "fix": _TEXT | {"description": "what was changed, and where"},
        "reasoning": _TEXT | {"description": "why this, and what else was considered"},
        "investigation": {"type": "array", "items": _TEXT, "description": "what each turn tried and found, in order"},
        "confidence": {"enum": ["low", "medium", "high"]},
        "why_it_failed": _TEXT | {"description": "one line; empty where it did not fail"},
    },
}
ASK = (
    "This conversation ends here. Write down what the next person or model that tries this fix should know. They have "
    "only the repository and your words. State facts, name files and functions, and say plainly what did not work. "
    "{outcome}"
)

_FIELDS: Mapping[str, type] = {"fix_id": str, "outcome": str, "why": str, "note": str, "model": bool}
_REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._/~^-]{0,255}")


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """What to write, and where. `note`: an existing commit that gets a git note; None: a new commit is made.

    `fix_id` None: that of the agent (`fix_of`). `outcome` None: it is not known. `why`: why it passed or failed.
    `by_model`: the model writes a summary. `repo` and `options` (of `git commit`) come from a person at the terminal,
    never from a request.
    """

    fix_id: str | None = None
    outcome: Outcome | None = None
    why: str | None = None
    note: str | None = None
    by_model: bool = True
    repo: Path | None = None
    options: tuple[str, ...] = ()

    @staticmethod
    def read(body: Mapping[str, Any]) -> CommitOrder:
        """Parse a request's body. Raises `InvalidRequest`, which names the field."""
        for name, value in body.items():
            if name not in _FIELDS:
                raise InvalidRequest(
                    f"{name} is not known here{did_you_mean(name, _FIELDS)}; known are {', '.join(_FIELDS)}", param=name
                )
            if not isinstance(value, _FIELDS[name]):
                raise InvalidRequest(f"{name} must be {'true or false' if name == 'model' else 'a text'}", param=name)
        fix_id, outcome, why, note = (body.get(name) for name in ("fix_id", "outcome", "why", "note"))
        if fix_id is not None:
            try:
                fix_id_of(fix_id)
            except ValueError as exc:
                raise InvalidRequest(str(exc), param="fix_id") from exc
        if outcome not in (None, "passed", "failed"):
            raise InvalidRequest("outcome must be passed or failed", param="outcome")
        if note is not None and not _REVISION.fullmatch(note):
            raise InvalidRequest("note must be a commit's id, HEAD, or HEAD~N", param="note")
        by_model = body.get("model", True)
        if outcome == "failed" and not by_model and not (why or "").strip():
            raise InvalidRequest("why did it fail? Say it in why: without the model nothing else knows", param="why")
        return CommitOrder(fix_id, outcome, why, note, by_model)


@dataclass(frozen=True, slots=True)
class Committed(Recorded):
    """`commit` is the new commit, or the one that got the note (`note` True); `message` is what was written.
    `attempt`: its number among the attempts at this fix, from 1."""

    agent_id: str
    fix_id: str
    attempt: int
    commit: str
    note: bool
    message: str

    def as_json(self) -> JSON:
        return {"object": "chain.committed", **super(Committed, self).as_json()}


async def commit(settings: Settings, store: Store, agent: Agent, order: CommitOrder, ask: Ask) -> Committed:
    """Write the agent's attempt into a git commit or note. Raises `InvalidRequest` without turns or a repository,
    `ConfigError` if git fails."""
    path = await store.path(agent.head) if agent.head else []
    if not path:
        raise InvalidRequest(f"agent {agent.agent_id!r} has no turn yet: there is nothing to write", param="agent_id")
    if order.by_model and not held.has_room_for_another():
        raise InvalidRequest(
            f"the conversation of agent {agent.agent_id!r} is too long for a summary by the model: commit without it "
            '(`--no-model`, or `"model": false`), and say why it passed or failed',
            param="model",
        )
    memory = settings.profile_for(path[-1].profile).git_memory
    if order.repo is not None:
        memory = GitMemory(repo=order.repo) if memory is None else memory.model_copy(update={"repo": order.repo})
    if memory is None:
        raise InvalidRequest(
            "the profile of this agent names no repository: add [profiles.NAME.git_memory] with repo, and let the "
            "agent's turns use that profile",
            param="agent_id",
        )
    fix_id = order.fix_id or fix_of(memory, agent)
    inside = settings.written_inside()
    # First, so that a path without a repository fails at once.
    known = await earlier(memory.repo, fix_id, PREVIOUS, inside)
    summary: Mapping[str, Any] = {}
    if order.by_model:
        outcome = {None: "", "passed": "It passed.", "failed": "It failed."}[order.outcome]
        question = ASK.format(outcome=f"{outcome} {order.why or ''}".strip())
        messages = (*_history(path), Message.user(question.strip()))
        summary = json.loads(await ask(path[-1], messages, SUMMARY))
    attempt, message = await asyncio.to_thread(_written, agent, path, fix_id, known, summary, order)
    written = await write(memory.repo, message, note=order.note, options=order.options, written=inside)
    log.info("attempt_committed", **agent.named_in_logs, fix_id=fix_id, attempt=attempt, commit=written)
    return Committed(agent.agent_id, fix_id, attempt, written, order.note is not None, message)


def _history(path: Sequence[Turn]) -> list[Message]:
    """The conversation as a client would send it, with the earlier attempts that the model was shown. Without thinking,
    whose signature is only valid in its own chain."""
    messages: list[Message] = []
    for turn in path:
        messages += turn.shown_input
        answer = tuple(block for block in turn.output if block.get("type") not in THINKING)
        if answer:
            messages.append(Message("assistant", answer))
    return messages


def _written(
    agent: Agent, path: Sequence[Turn], fix_id: str, known: Earlier, summary: Mapping[str, Any], order: CommitOrder
) -> tuple[int, str]:
    """The attempt's number, and its text with secrets redacted."""
    number = min(known.last_number + 1, records.MOST)
    failed = order.outcome == "failed"
    why = order.why or (summary.get("why_it_failed") if failed else None) or ""
    asked = _words(path[0].input)
    steps = list(summary.get("investigation") or ())
    if not steps:
        for turn in path[-STEPS:]:
            called = [f"[calls {block.get('name')}]" for block in turn.output if block.get("type") == "tool_use"]
            used = [f"({len(turn.tools)} uses and results of the CLI's own tools)"] if turn.tools else []
            steps.append(" ".join([_words(turn.input), "→", *answer_text(turn.output).split(), *called, *used]))
    spent = Usage()
    for turn in path:
        spent = spent.plus(turn.usage)
    sections = {
        "Task": records.cut(asked, 4 * STEP),
        "Root cause": str(summary.get("root_cause") or ""),
        "Fix": str(summary.get("fix") or "") or answer_text(path[-1].output),
        "Reasoning": str(summary.get("reasoning") or ""),
        "Investigation": "\n".join(f"{at}. {records.line_of(step, STEP)}" for at, step in enumerate(steps, 1)),
        "Previous attempts": "\n".join(
            f"- {previous.name}: {previous.trailers.get('Why-It-Failed') or previous.headline}"
            for previous in known.attempts
        ),
    }
    trailers = {
        "Fix-Id": fix_id,
        "Attempt": str(number),
        "Outcome": order.outcome or "",
        "Agent": agent.agent_id,
        "Model": ", ".join(dict.fromkeys(turn.answered_by or turn.model for turn in path)),
        "Turns": str(len(path)),
        "Tokens": f"{spent.prompt_tokens} read, {spent.output_tokens} written",
        "Confidence": str(summary.get("confidence") or ""),
        "Why-It-Failed": why,
    }
    headline = str(summary.get("headline") or "") or records.line_of(asked, records.HEADLINE)
    state = "Failed attempt" if failed else "Attempt"
    # Redact before cutting: half a secret would not be recognised.
    safe_sections = {name: redact.text(text) for name, text in sections.items()}
    # Later attempts find this one by its Fix-Id, so that stays as it is.
    safe_trailers = {name: redact.text(text) for name, text in trailers.items()} | {"Fix-Id": fix_id}
    return number, records.write(FixAttempt(redact.text(f"{state} {number}: {headline}"), safe_trailers, safe_sections))


def _words(messages: Sequence[Message]) -> str:
    """The messages' text in one line. Images and tool results are only named."""
    return " ".join(
        " ".join(str(block["text"]).split()) if block.get("type") == "text" else f"[{block.get('type')}]"
        for message in messages
        for block in message.content
    )
