"""What the real CLI writes behind calls of the client's tools when its proxy is gone: results that nobody gave.

Recorded from CLI 2.1.330, whose stdin was closed while two calls waited: a made-up result for each, what the model
said to them, and its own notes.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from ..conftest import ROOT

RECORDED = ROOT / "tests" / "backends" / "claude" / "sessions" / "data" / "interrupted_2.1.330.jsonl"
MADE_UP = "The tool call was interrupted before a result was received."


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]


def calls_in(path: Path) -> list[tuple[str, str]]:
    """The calls of the client's tools in a transcript, with the uuids of their records."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        content = record.get("message", {}).get("content")
        for block in content if isinstance(content, list) else []:
            if block["type"] == "tool_use" and block["name"].startswith("mcp__client__"):
                found.append((block["id"], record["uuid"]))
    return found


def leave(path: Path, calls: list[tuple[str, str]]) -> None:
    """Append to a transcript what a CLI that waited for these calls leaves there."""
    results = [one for one in recorded() if one["type"] == "user"]
    [answer] = [one for one in recorded() if one["type"] == "assistant"]
    notes = [one for one in recorded() if "uuid" not in one]
    lines: list[dict[str, Any]] = []
    for (call, record), result in zip(calls, results[: len(calls)], strict=True):
        [block] = result["message"]["content"]
        message = {**result["message"], "content": [{**block, "tool_use_id": call}]}
        hangs = {"parentUuid": record, "sourceToolAssistantUUID": record, "uuid": str(uuid.uuid4())}
        lines.append({**result, **hangs, "message": message})
    lines += [{**answer, "parentUuid": lines[-1]["uuid"], "uuid": str(uuid.uuid4())}, *notes]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**line, "sessionId": path.stem}, separators=(",", ":")) + "\n" for line in lines)
