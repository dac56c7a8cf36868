"""The observations of the self-check, which runs a CLI offline. Pure.

Each has a first version from which it is expected. This decides until the CLI was checked; then the check's result
does, and a difference between the two is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ....domain.models import JSON
from ... import base

Version = tuple[int, int, int]
Outcome = Literal["ok", "failed", "not tried"]
Name = Literal[
    "start", "frames", "tag", "tools_off", "place", "complete", "records", "round_trip", "same_id", "initialize",
    "words", "set_model", "apply_flag_settings", "mcp_set_servers", "interrupt", "rewind_conversation",
    "claim_session", "can_use_tool", "login", "prompt_file", "blocks", "whole_records", "heals_thinking",
    "keeps_prompt", "no_inbox",
]  # fmt: skip
NAMES: tuple[Name, ...] = get_args(Name)

# A description of each, for people.
SAYS: Mapping[Name, str] = {
    "start": "it starts with the options that the proxy gives it",
    "frames": "its frames and its result give the words of the model",
    "tag": "its result names the prompt that it answers",
    "tools_off": "its own tools are off when they should be",
    "place": "a session's transcript is where the proxy looks for it",
    "complete": "the transcript is whole when the result comes",
    "records": "the transcript's records have the known shape, and are linked",
    "round_trip": "a transcript that the proxy wrote reaches the model whole, and is only appended to",
    "same_id": "a resumed session keeps its id",
    "initialize": "it answers `initialize`, and has read its session by then",
    "words": "every prompt reaches the model as plain text",
    "set_model": "a running process takes another system prompt",
    "apply_flag_settings": "a running process takes a turn's parameters",
    "mcp_set_servers": "the client's tools are offered, and a process that is started again goes on from results",
    "interrupt": "a running turn can be interrupted, and the process serves the next one",
    "rewind_conversation": "a running process can be rewound to an earlier prompt",
    "claim_session": "a process that was started ahead can become a new session's",
    "can_use_tool": "it asks before it runs a tool that waits for a person, and obeys the answer",
    "login": "a subscription's login is used where no key is set",
    "prompt_file": "a system prompt is read from a file",
    "blocks": "a prompt may hold an image beside its text",
    "whole_records": "records of several blocks, and of equal times, are loaded under the names that they have",
    "heals_thinking": "if the provider refuses signed thinking, it asks again without thinking",
    "keeps_prompt": "if it compacts before a turn, the turn's prompt is not part of the summary",
    "no_inbox": "it listens on no socket, so other agents' CLIs cannot speak to it",
}

# The first version that is known to do it; (0, 0, 0): every supported one.
ANY: Version = (0, 0, 0)
EXPECTED: Mapping[Name, Version] = {
    "start": ANY,
    "frames": ANY,
    "tag": (2, 1, 0),
    "tools_off": ANY,
    "place": ANY,
    "complete": ANY,
    "records": ANY,
    "round_trip": ANY,
    # Below it every --resume answers with a new id.
    "same_id": (2, 0, 0),
    # The CLI answers after it has loaded the resumed session: with every read of the transcript delayed by 1.5 s, the
    # answer came after the last read (run on 1.0.90, 1.0.120 and 2.1.330). 1.0.60 never answers.
    "initialize": (1, 0, 90),
    # 2.1.229 does not know the field `client_composed`.
    "words": (2, 1, 260),
    # Below it a `set_model` with a system prompt answers "success" and changes nothing (2.1.295).
    "set_model": (2, 1, 304),
    # Sets environment variables, which apply from the next request to the model.
    "apply_flag_settings": (2, 1, 329),
    # 2.1.278 accepts tools, but after a restart it continues with "Continue from where you left off." instead of
    # results.
    "mcp_set_servers": (2, 1, 295),
    "interrupt": ANY,
    "rewind_conversation": (2, 1, 329),
    "claim_session": (2, 1, 295),  # 2.1.278 has no option --await-claim
    # Earlier ones were not tried. A version is never enough (`Capability.not_seen_asking`).
    "can_use_tool": (2, 1, 71),
    # `--bare`, which reads no login, is to become the default (run on 2.1.332: with it the CLI sends no request).
    "login": ANY,
    "prompt_file": (1, 0, 60),  # not in every --help
    # Below it a prompt is one text: "Expected message content to have exactly one item, got 2" (1.0.60; not in 1.0.63).
    "blocks": (1, 0, 63),
    "whole_records": (2, 1, 200),  # see `transcript.loading`
    # By its change log; its program text says "server rejected a thinking block; stripping all thinking blocks".
    "heals_thinking": (2, 1, 156),
    # 1.0.120, 2.1.71 and 2.1.100 make the new prompt part of the summary, and then only ask the model to go on;
    # 2.1.200, 2.1.260 and 2.1.332 do not (run).
    "keeps_prompt": (2, 1, 200),
    # Without CLAUDE_CODE_HARBOR_KITE=0 a CLI listens at $TMPDIR/cc-socks/<pid>.sock, and lists all that do to its model
    # (run on 2.1.260, 2.1.300 and 2.1.332). 1.0.120, 2.1.71, 2.1.120 and 2.1.200 never listen.
    "no_inbox": ANY,
}

# A CLI that fails one of these may lose or invent messages, show them to others, or act without permission: another
# one is used.
ESSENTIAL: tuple[Name, ...] = ("start", "frames", "tools_off", "place", "records", "round_trip", "no_inbox")

DETAIL = 400  # the most characters of a CLI's message


@dataclass(frozen=True, slots=True)
class Observation:
    """The `outcome` of the check of this name. `detail`: more about it, perhaps a quote of the CLI, at most `DETAIL`
    characters."""

    name: Name
    outcome: Outcome
    detail: str = ""

    @staticmethod
    def of(name: Name, outcome: Outcome, detail: str = "") -> Observation:
        one_line = " ".join(detail.split())
        return Observation(name, outcome, one_line if len(one_line) <= DETAIL else f"{one_line[: DETAIL - 2]} …")

    def as_json(self) -> JSON:
        return {"name": self.name, "outcome": self.outcome, "detail": self.detail}


# By name; empty: not checked yet.
Observed = Mapping[str, Observation]


def read(found: Iterable[JSON]) -> dict[str, Observation]:
    """Parse observations of another process or another version of this program. Unknown ones are dropped."""
    outcomes: tuple[str, ...] = get_args(Outcome)
    return {
        one["name"]: Observation.of(one["name"], one["outcome"], str(one.get("detail", "")))
        for one in found
        if one.get("name") in NAMES and one.get("outcome") in outcomes
    }


def expected(name: Name, version: Version) -> bool:
    return version >= EXPECTED[name]


def mismatches(observed: Observed, version: Version) -> list[Observation]:
    """Observations that differ from the version's expected ones, for better or worse."""
    tried = [one for one in observed.values() if one.outcome != "not tried"]
    return [one for one in tried if (one.outcome == "ok") != expected(one.name, version)]


def program(version: str, path: str, runs: str, seen: Observed, numbers: Version) -> base.Program:
    """The CLI in the core's form."""
    surprising = mismatches(seen, numbers)
    each = [base.Observed(one.name, one.outcome, one.detail, one in surprising) for one in seen.values()]
    return base.Program(version, path, runs, tuple(each))


def is_fit(observed: Observed, essential: Sequence[Name] = ESSENTIAL) -> bool:
    """Whether everything essential works."""
    return all(name in observed and observed[name].outcome == "ok" for name in essential)
