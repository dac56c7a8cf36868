"""Converts the `reason` of 0.1, one JSON object per turn and partly in sentences, into fields and codes. Pure.

Stores of schema 3 and older and exports of version 2 and older have it. Unknown fields are kept in `Evidence.other`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .evidence import DONE, OUTPUT_REFUSED, RECORDS, WHY, Evidence, ExternalOrigin, Repair, StreamCut
from .models import JSON, LinkReason, Placed, TurnOptions

_PLACED = ("rule", "messages", "matched", "imported", "diverged_at", "delta")
_BY_CLIENT = "sent by the client as history"
_WAITED = "waited for these results"
_EXIT_CODE = re.compile(r"had ended with exit code (-?\d+)")
# 0.1 stored the words of a dump: back to their codes.
_CODE_OF_WHY = {words: code for code, words in WHY.items()}
_CODE_OF_DONE = {words: code for code, words in DONE.items()}
_CODE_OF_RECORDS = {words: code for code, words in RECORDS.items()}


class SplitReason(NamedTuple):
    """What a `reason` is converted to."""

    placed: Placed
    options: TurnOptions
    evidence: Evidence
    stop_sequence: str | None


# What `split_reason` raises for an object that 0.1 did not write.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError)


def split_reason(old: JSON) -> SplitReason:
    """Raises one of `MALFORMED`."""
    rest = dict(old)  # the fields that are not converted yet
    placed = Placed(**{name: rest.pop(name) for name in _PLACED if name in rest})
    options = TurnOptions.from_json(rest.pop("wants", {}) | {"format": rest.pop("format", None)})
    evidence: dict[str, Any] = {}
    for name, (field, convert) in _EVIDENCE.items():
        if name in rest:
            value = rest[name] if convert is None else convert(rest[name])
            if value is not None:
                evidence[field] = value
                del rest[name]
    if isinstance(rest.get("session"), dict):
        evidence["written"] = repair(rest.pop("session"))
    elif rest.get("session") == _WAITED:
        evidence["waited"] = bool(rest.pop("session"))
    if placed.rule == "adopted" and isinstance(rest.get("session"), str):
        evidence["brought"] = ExternalOrigin("adoption", rest.pop("session"), rest.pop("why", None))
    elif rest.get("why") == _BY_CLIENT:
        evidence["brought"] = ExternalOrigin("client")
        del rest["why"]
    stop_sequence = rest.pop("stop_sequence", None)
    evidence["other"] = {name: value for name, value in rest.items() if value is not None}
    return SplitReason(placed, options, Evidence(**evidence), stop_sequence)


def repair(old: JSON) -> Repair:
    return Repair.from_json(link_detail("rebuilt", old))


def link_detail(reason: LinkReason, old: JSON) -> JSON:
    """The evidence of a link with this reason. A `code` or `note` is dropped: 0.1 wrote neither."""
    new = {name: value for name, value in old.items() if name not in ("code", "note")}
    if "settled" in new:
        new["settled"] = True
    if reason not in ("rebuilt", "branched", "moved", "adopted"):
        return new
    why = new.pop("why", None)
    if str(why) in _CODE_OF_WHY:
        new["code"] = _CODE_OF_WHY[why]
    elif why is not None:
        new["note"] = why
    if str(new.get("done")) in _CODE_OF_DONE:
        new["code"] = _CODE_OF_DONE[new.pop("done")]
    return new


def attempt(old: JSON, output_refused: str | None) -> JSON:
    """One attempt. `output_refused`: why the turn's output was invalid, in the words that its attempts have, too."""
    new = dict(old)
    if isinstance(new.get("repaired"), dict):
        new["repaired"] = repair(new["repaired"]).as_json()
    if output_refused is not None and new.get("why") == output_refused:
        new["code"] = OUTPUT_REFUSED
    return new


def _exit_code(value: Any) -> int | None:
    match = _EXIT_CODE.fullmatch(str(value))
    return None if match is None else int(match[1])


# For each field of `reason`: the field of `Evidence`, and the function that converts its value (None: unchanged).
_EVIDENCE: Mapping[str, tuple[str, Any]] = {
    "left_off": ("left_off", None),
    "sandbox": ("sandbox", None),
    "verified": ("verified", None),
    "repaired": ("repaired", repair),
    "process": ("exit_code", _exit_code),
    "reloaded": ("reloaded", lambda how: tuple(map(str, how))),
    "output_refused": ("output_refused", None),
    "retries": ("retries", tuple),
    "cuts": ("cuts", lambda cuts: tuple(StreamCut(cut["text"], cut["thinking"]) for cut in cuts)),
    "compacted": ("compacted", None),
    "settled": ("settled", bool),
    "records": ("records", _CODE_OF_RECORDS.get),
}
