"""Frameworks from PyPI, each in a small program of its own: two facts, each with a tool call where there are tools."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest

from cli_session_proxy.domain.client_tools import cli_name
from turnfault.provider.script import TOOL_RESULT, Behaviour, Reply, ToolUse
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, MakeSettings, required
from ..every_wire import proxied
from ..obedient import newest
from ..outputs import output_of

PYTHON = ROOT / ".tools" / "frameworks" / "venv" / "bin" / "python"
# Of what cannot be in one environment with the others.
APART = {"aider_agent": ROOT / ".tools" / "agents-more" / "venv" / "bin" / "python"} | dict.fromkeys(
    ("adk_agent", "genai_agent", "goose_agent", "instructor_agent"),
    ROOT / ".tools" / "frameworks" / "google" / "bin" / "python",
)
PROGRAMS = Path(__file__).parent / "frameworks"
# Seconds for a program that imports much on a busy machine.
LONGEST = 240.0
# What keeps their telemetry and their look-ups off.
QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
# Those that tell the results of tools as plain text, and those whose program has no tool.
IN_TEXT = ("smolagents_agent",)
WITHOUT_TOOLS = ("aider_agent", "dspy_agent", "instructor_agent")
# Its tasks are conversations of their own.
ALONE = ("crewai_agent",)

_FACT = re.compile(r"Remember: secret (\d+) is value-")

pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]


def behave(seen: Seen, *, thinks: bool = False) -> Behaviour:
    """Has the note of the newest fact read, and answers with it; by the tool for answers, where there is one."""
    offered = [tool["name"] for tool in seen.body.get("tools") or ()]
    if cli_name("final_answer") in offered and "content-" in newest(seen):
        return ToolUse([(cli_name("final_answer"), {"answer": "It is noted."})])
    facts = _FACT.findall(newest(seen))
    if not facts or cli_name("note") not in offered or seen.texts()[-1][1].startswith(TOOL_RESULT):
        return Reply(thinking="It is to be noted.") if thinks else Reply()
    return ToolUse([(cli_name("note"), {"number": int(facts[-1])})])


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.py")))
async def test_a_framework_has_two_turns_with_a_tool_each(
    name: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    python = required(APART.get(name, PYTHON), "make agents", what="the frameworks")
    upstream.behave = partial(behave, thinks=name == "genai_agent")
    async with proxied(make_settings(claude_bin=claude_2)) as (_, root):
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ROOT": root, **QUIET}
        await output_of(str(python), str(PROGRAMS / f"{name}.py"), within=LONGEST, cwd=tmp_path, env=env)
    assert not upstream.refused
    texts = upstream.requests[-1].texts()
    for number in (2,) if name in ALONE else (1, 2):
        told = [text for role, text in texts if role == "user" and f"secret {number} is value-" in text]
        assert len(told) == 1, number
        if name not in WITHOUT_TOOLS:
            result = f"content-{number}-{number * 7919}"
            results = [
                text for _, text in texts if result in text and (name in IN_TEXT or text.startswith(TOOL_RESULT))
            ]
            assert results, number
            assert name in IN_TEXT or len(results) == 1, number
