"""Shows what a tool that needs approval wants to do: a command, a diff, or its arguments. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from .. import redact
from ..domain.approvals import Approval, Waiting
from ..domain.models import JSON
from .words import visible

# Characters of one request in an event. GET /v1/approvals has the whole.
SHOWN = 20_000
# The most lines of a text that is diffed: the time is the product of both lengths, at worst.
COMPARED = 300


def request_json(waiting: Waiting, *, most: int | None = SHOWN) -> JSON:
    """A request for approval. `kind`: command, diff or arguments. `text`: redacted, at most `most` characters of it,
    without its last `left_out`. `before`: when an earlier attempt of the turn was allowed the same, so that it may be
    done already."""
    kind, whole = action(waiting.input)
    text = visible(redact.text(whole))
    return stored_request_json(waiting.approval) | {
        "sub_agent": waiting.agent,
        "kind": kind,
        "text": text if most is None else text[:most],
        "left_out": 0 if most is None else max(0, len(text) - most),
        "until": waiting.until,
        "before": waiting.before,
    }


def stored_request_json(approval: Approval) -> JSON:
    """A request that waits at another proxy. The store has only a line of it; its agent's events have the whole."""
    return {
        "id": approval.id,
        "tool": approval.tool,
        "sub_agent": None,
        "asked": visible(redact.text(approval.asked)),
        "kind": None,
        "text": None,
        "left_out": 0,
        "at": approval.at,
        "until": None,
        "before": None,
    }


def event(waiting: Sequence[JSON]) -> str:
    """One server-sent event with all waiting requests."""
    return f"event: approvals\ndata: {json.dumps({'data': waiting}, separators=(',', ':'))}\n\n"


def action(arguments: JSON) -> tuple[str, str]:
    """What a tool with these arguments wants to do: the kind, and a text that has all arguments."""

    def is_edit(edit: Any) -> bool:
        """Whether this is one of the edits of a file, with its old and new text."""
        return isinstance(edit, dict) and all(isinstance(edit.get(name), str) for name in ("old_string", "new_string"))

    match arguments:
        case {"command": str(command)}:
            return "command", _with_rest(command, arguments, "command")
        case {"file_path": str(path), "old_string": str(old), "new_string": str(new)}:
            return "diff", _with_rest(_diff(path, old, new), arguments, "file_path", "old_string", "new_string")
        case {"file_path": str(path), "edits": [*edits]} if all(map(is_edit, edits)):
            parts = (_diff(path, edit["old_string"], edit["new_string"]) for edit in edits)
            rest = [extra for edit in edits if (extra := _rest(edit, "old_string", "new_string"))]
            return "diff", _with_rest("\n".join([*parts, *rest]), arguments, "file_path", "edits")
        case {"file_path": str(path), "content": str(content)}:
            lines = "".join(f"+{line}\n" for line in content.split("\n"))
            return "diff", _with_rest(f"the whole of {path} becomes\n{lines}", arguments, "file_path", "content")
    return "arguments", json.dumps(arguments, ensure_ascii=False, indent=1)


def _diff(path: str, old: str, new: str) -> str:
    before, after = old.split("\n"), new.split("\n")
    if len(before) > COMPARED or len(after) > COMPARED:
        lines = [*(f"-{line}" for line in before), *(f"+{line}" for line in after)]
    elif before == after:
        lines = [f" {line}" for line in before]
    else:  # the first three lines name the files and the place
        lines = list(difflib.unified_diff(before, after, n=COMPARED, lineterm=""))[3:]
    return "\n".join((f"in {path}", *lines))


def _rest(arguments: JSON, *shown: str) -> str:
    """The arguments that are not `shown` already, as JSON; empty if there are none."""
    rest = {name: value for name, value in arguments.items() if name not in shown}
    return json.dumps(rest, ensure_ascii=False) if rest else ""


def _with_rest(text: str, arguments: JSON, *shown: str) -> str:
    rest = _rest(arguments, *shown)
    return f"{text}\n\n{rest}" if rest else text
