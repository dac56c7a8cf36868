"""The CLI's permission requests and our answers. Pure.

Run on 2.1.71 and 2.1.331: with `--permission-prompt-tool=stdio` the CLI sends a `control_request` `can_use_tool` and
waits, for as long as it takes. A rule under `permissions.ask` of `--settings` makes it ask at each call of the tool,
also where `permission_mode` (acceptEdits) or `--allowedTools` allow it and where the command only reads; the rule holds
after `apply_flag_settings`. Calls of one message are asked for one after the other.
"""

from __future__ import annotations

from typing import Any

from ....domain.approvals import Verdict
from ....domain.models import JSON
from ....settings import Profile
from .events import PermissionRequest

SUBTYPE = "can_use_tool"
# The message for the model after a refusal: the CLI's own text (2.1.331).
REFUSED = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was a file edit, the "
    "new_string was NOT written to the file). "
)
# Characters of its name, which is shown to watchers, and of the ids that are stored with it.
LONGEST_TOOL = 4096
STOP = "STOP what you are doing and wait for the user to tell you how to proceed."
SAID = "To tell you how to proceed, the user said:\n"


def arguments(profile: Profile) -> list[str]:
    return ["--permission-prompt-tool=stdio"] if profile.approve else []


def settings(profile: Profile) -> JSON:
    """The part of `--settings` about permissions."""
    return {"permissions": {"ask": list(profile.approve)}} if profile.approve else {}


def is_asked(frame: JSON) -> bool:
    request = frame.get("request")
    return isinstance(request, dict) and request.get("subtype") == SUBTYPE


def read(frame: JSON) -> PermissionRequest:
    request: dict[str, Any] = frame["request"]
    tool, tool_input = str(request.get("tool_name"))[:LONGEST_TOOL], request.get("input")
    ids = (request.get(name) for name in ("tool_use_id", "agent_id"))
    call, agent = (one if isinstance(one, str) and len(one) <= LONGEST_TOOL else None for one in ids)
    return PermissionRequest(
        str(frame.get("request_id")), tool, tool_input if isinstance(tool_input, dict) else {}, call, agent
    )


def answer(asked: PermissionRequest, verdict: Verdict) -> JSON:
    """The answer's frame. An allowed call runs with exactly the input that was shown."""
    decision: JSON
    if verdict.allows:
        decision = {"behavior": "allow", "updatedInput": asked.input}
    elif verdict.outcome == "denied" and verdict.by is not None:
        decision = {"behavior": "deny", "message": REFUSED + (f"{SAID}{verdict.word}" if verdict.word else STOP)}
    else:
        decision = {"behavior": "deny", "message": verdict.word or f"Permission to use {asked.tool} was not given."}
    return {
        "type": "control_response",
        "response": {"subtype": "success", "request_id": asked.request_id, "response": decision},
    }


def listed(profile: Profile) -> frozenset[str]:
    """Tools of which every call needs approval. The CLI itself matches rules with a pattern."""
    return frozenset(tool for tool in profile.approve if "(" not in tool)
