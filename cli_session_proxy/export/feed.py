"""Live changes of a chain as text: lines for a terminal, JSON lines for programs, server-sent events for pages.

Also the tools that wait for approval: what each wants to do, as a command, a diff, or its arguments.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from .. import redact
from ..domain import times
from ..domain.approvals import Approval, PendingApproval
from ..domain.models import JSON
from ..engine.live import TAIL, Progress
from ..engine.subscription import Happened
from ..errors import printable
from . import explain, shown
from .shown import TurnDump
from .words import KINDS, mark_of, visible

# Characters of a text that are shown on a line of a terminal.
WIDTH = 200


def _json_of(happened: Happened, dump: TurnDump) -> str:
    """`{"turn": …, "links": […]}` as in the JSON dump."""
    links = [shown.link(link) for link in happened.links]
    return json.dumps({"seq": happened.turn.seq, "turn": dump, "links": links}, separators=(",", ":"))


def json_line(happened: Happened, *, verbatim: bool = False) -> str:
    return _json_of(happened, shown.turn(happened.turn, happened.links, verbatim=verbatim)) + "\n"


def turn_event(happened: Happened, dump: TurnDump) -> str:
    """One server-sent event with the turn's dump. A client resumes with its id as `Last-Event-ID`."""
    return f"id: {happened.turn.seq}\nevent: turn\ndata: {_json_of(happened, dump)}\n\n"


def progress(unfinished: Sequence[Progress]) -> list[JSON]:
    """Unfinished turns: what each is doing since when (UTC seconds), the end of its answer so far (redacted, after
    `skipped` characters), tokens used, and tools that wait for approval."""
    return [
        {
            "turn_id": one.turn.id,
            "doing": one.doing,
            "says": redact.text(explain.doing(one.doing, one.detail)),
            "at": one.turn.created_at,
            "since": one.since,
            "text": ending(redact.text(one.text), TAIL),
            "skipped": one.skipped,
            "tokens_read": one.used.prompt_tokens,
            "tokens_written": one.used.output_tokens,
            "approvals": [request_json(waiting) for waiting in one.asking],
        }
        for one in unfinished
    ]


def ending(text: str, most: int) -> str:
    """The last characters of a text, at most so many, from the beginning of a word."""
    return text if len(text) <= most else text[-most:].partition(" ")[2] or text[-most:]


def progress_event(going: Sequence[JSON]) -> str:
    """One server-sent event of `progress`. It has no id, because it is not repeated after a reconnect."""
    return f"event: progress\ndata: {json.dumps({'turns': going}, separators=(',', ':'))}\n\n"


def lines(happened: Happened, *, verbatim: bool = False) -> str:
    """For a person: question, answer, and every repair with its evidence."""
    dump = shown.turn(happened.turn, happened.links, verbatim=verbatim)
    turn = happened.turn
    out = [f"{times.written(turn.finished_at or turn.started_at or turn.created_at)}  {turn.status:10} {turn.id}"]
    for link in happened.links:
        mark = mark_of(link.reason)
        out.append(f"    {mark} ({link.reason}): {shown.link(link)['says']}")
    out += [f"    {KINDS[one.kind]}: {one.says}" for one in shown.briefs(turn, happened.links)]
    if turn.status in ("queued", "running"):
        out += [f"    user: {_words(message['content'])}" for message in dump["input"]]
    else:
        facts = [turn.continuity or "not run", f"session {(turn.session_id or 'none')[:8]}"]
        out.append(f"    {', '.join(facts)}: {_words(dump['output'])}")
    if dump["error"] is not None:
        out.append(f"    {dump['error'].get('code')}: {dump['error'].get('message')}")
    return "".join(f"{printable(line)}\n" for line in out)


def _words(content: list[dict[str, Any]]) -> str:
    parts = [str(block["text"]) if block.get("type") == "text" else f"[{block.get('type')}]" for block in content]
    text = " ".join(" ".join(parts).split())
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}…"


# --- tools that wait for approval

# Characters of one request in an event. GET /v1/approvals has the whole.
SHOWN = 20_000
# The most lines of a text that is diffed: the time is the product of both lengths, at worst.
COMPARED = 300
# 200 blank characters or more, or empty lines of a diff, would move the rest out of sight: their number is shown
# instead. Blank, too, are letters and a Braille sign that fonts show as nothing. The search begins only at the first
# one of a run: else a call of a megabyte would hold the event loop for 0.2 s each time it is shown.
_NOTHING = r"[\s\u115f\u1160\u2800\u3164\uffa0]"
_BLANK = re.compile(rf"(?<!{_NOTHING})(?<!\n[-+])(?:{_NOTHING}|(?<=\n)[-+](?=\n)){{200,}}")


def request_json(waiting: PendingApproval, *, most: int | None = SHOWN) -> JSON:
    """A request for approval. `kind`: command, diff or arguments. `text`: without keys, and cut to `most` characters:
    `left_out` are missing. `before`: when an earlier attempt of the turn was allowed the same, so that it may be done
    already."""
    kind, whole = action(waiting.input)
    text = _BLANK.sub(lambda run: f"\n[{len(run[0]):,} blank characters]\n", visible(redact.of_call(whole)))
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
        "asked": visible(redact.of_call(approval.asked)),
        "kind": None,
        "text": None,
        "left_out": 0,
        "at": approval.at,
        "until": None,
        "before": None,
    }


def approvals_event(waiting: Sequence[JSON]) -> str:
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
            return "diff", _with_rest(
                f"the whole of {_in_one_line(path)} becomes\n{lines}", arguments, "file_path", "content"
            )
    return "arguments", json.dumps(arguments, ensure_ascii=False, indent=1)


def _diff(path: str, old: str, new: str) -> str:
    before, after = old.split("\n"), new.split("\n")
    if len(before) > COMPARED or len(after) > COMPARED:
        lines = [*(f"-{line}" for line in before), *(f"+{line}" for line in after)]
    elif before == after:
        lines = [f" {line}" for line in before]
    else:  # the first three lines name the files and the place
        lines = list(difflib.unified_diff(before, after, n=COMPARED, lineterm=""))[3:]
    return "\n".join((f"in {_in_one_line(path)}", *lines))


def _in_one_line(path: str) -> str:
    """The path; in JSON if it has lines, which would be taken for those of the file."""
    return json.dumps(path, ensure_ascii=False) if "\n" in path or "\r" in path else path


def _rest(arguments: JSON, *shown: str) -> str:
    """The arguments that are not `shown` already, as JSON; empty if there are none."""
    rest = {name: value for name, value in arguments.items() if name not in shown}
    return json.dumps(rest, ensure_ascii=False) if rest else ""


def _with_rest(text: str, arguments: JSON, *shown: str) -> str:
    rest = _rest(arguments, *shown)
    return f"{text}\n\n{rest}" if rest else text
