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


def asked(waiting: Waiting, *, most: int | None = SHOWN) -> JSON:
    """One request. `kind`: command, diff or arguments; `text`: redacted, without its last `left_out` characters;
    `before`: when an earlier attempt of the turn was allowed the same, so that it may be done already."""
    one = waiting.approval
    kind, whole = wanted(waiting.input)
    text = visible(redact.text(whole))
    return {
        "id": one.id,
        "tool": one.tool,
        "sub_agent": waiting.agent,
        "asked": visible(redact.text(one.asked)),
        "kind": kind,
        "text": text if most is None else text[:most],
        "left_out": 0 if most is None else max(0, len(text) - most),
        "at": one.at,
        "until": waiting.until,
        "before": waiting.before,
    }


def elsewhere(one: Approval) -> JSON:
    """A request at another proxy. Only a line of it is stored; its agent's events have the whole."""
    about = {"id": one.id, "tool": one.tool, "asked": visible(redact.text(one.asked)), "at": one.at}
    return {**about, "sub_agent": None, "kind": None, "text": None, "left_out": 0, "until": None, "before": None}


def event(waiting: Sequence[JSON]) -> str:
    """One server-sent event with all waiting requests."""
    return f"event: approvals\ndata: {json.dumps({'data': waiting}, separators=(',', ':'))}\n\n"


def wanted(given: JSON) -> tuple[str, str]:
    """The kind and the text, which has all arguments."""
    match given:
        case {"command": str(command)}:
            return "command", _with_rest(command, given, "command")
        case {"file_path": str(path), "old_string": str(old), "new_string": str(new)}:
            return "diff", _with_rest(_diff(path, old, new), given, "file_path", "old_string", "new_string")
        case {"file_path": str(path), "edits": [*edits]} if all(map(_is_edit, edits)):
            parts = (_diff(path, edit["old_string"], edit["new_string"]) for edit in edits)
            rest = [extra for edit in edits if (extra := _rest(edit, "old_string", "new_string"))]
            return "diff", _with_rest("\n".join([*parts, *rest]), given, "file_path", "edits")
        case {"file_path": str(path), "content": str(content)}:
            lines = "".join(f"+{line}\n" for line in content.split("\n"))
            return "diff", _with_rest(f"the whole of {path} becomes\n{lines}", given, "file_path", "content")
    return "arguments", json.dumps(given, ensure_ascii=False, indent=1)


def _is_edit(edit: Any) -> bool:
    return (
        isinstance(edit, dict) and isinstance(edit.get("old_string"), str) and isinstance(edit.get("new_string"), str)
    )


def _diff(path: str, old: str, new: str) -> str:
    was, becomes = old.split("\n"), new.split("\n")
    if len(was) > COMPARED or len(becomes) > COMPARED:
        lines = [*(f"-{line}" for line in was), *(f"+{line}" for line in becomes)]
    else:
        _file, _file, _place, *lines = [*difflib.unified_diff(was, becomes, n=COMPARED, lineterm=""), *[""] * 3]
        lines = lines[:-3] if was != becomes else [f" {line}" for line in was]
    return "\n".join((f"in {path}", *lines))


def _rest(given: JSON, *but: str) -> str:
    rest = {name: value for name, value in given.items() if name not in but}
    return json.dumps(rest, ensure_ascii=False) if rest else ""


def _with_rest(text: str, given: JSON, *but: str) -> str:
    rest = _rest(given, *but)
    return f"{text}\n\n{rest}" if rest else text
