"""Programs that ask hundreds of questions which have nothing to do with each other, as they come."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from turnfault.provider.script import Behaviour, Reply
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, MakeSettings, required
from ..every_wire import chains, proxied
from ..obedient import newest
from ..outputs import output_of

TOOLS = ROOT / ".tools" / "evaluators"
QUESTIONS = 200
# Seconds for all of them on a busy machine.
LONGEST = 500.0
QUIET = {
    "PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
    "PROMPTFOO_SELF_HOSTED": "1", "DEEPEVAL_TELEMETRY_OPT_OUT": "YES", "NO_COLOR": "1", "CI": "1",
}  # fmt: skip
DEEPEVAL = """
import os
from deepeval import evaluate
from deepeval.metrics import GEval
from deepeval.models import LocalModel
from deepeval.test_case import LLMTestCase, LLMTestCaseParams

model = LocalModel(model="sonnet", base_url=os.environ["ROOT"] + "/v1", api_key="none")
metric = GEval(
    name="Right", model=model, evaluation_steps=["Look whether it is right."],
    evaluation_params=[LLMTestCaseParams.INPUT, LLMTestCaseParams.ACTUAL_OUTPUT],
)
cases = [LLMTestCase(input=f"What is question-{n}-?", actual_output="That.") for n in range(QUESTIONS)]
assert all(result.success for result in evaluate(cases, [metric]).test_results)
"""

_QUESTION = re.compile(r"question-\d+-")

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]


def behave(seen: Seen) -> Behaviour:
    (question,) = set(_QUESTION.findall(newest(seen)))
    return Reply(json.dumps({"score": 9, "reason": f"It answers {question}."}))


def promptfoo(root: str, folder: Path) -> list[str]:
    provider = {"id": "openai:chat:sonnet", "config": {"apiBaseUrl": f"{root}/v1", "apiKey": "none"}}
    cases = [
        {"vars": {"it": f"question-{n}-"}, "assert": [{"type": "contains", "value": f"question-{n}-"}]}
        for n in range(QUESTIONS)
    ]
    asked = {"prompts": ["What is {{it}}?"], "providers": [provider], "tests": cases}
    (folder / "promptfooconfig.json").write_text(json.dumps(asked))
    return [
        str(required(TOOLS / "node_modules" / ".bin" / "promptfoo", "make agents", what="promptfoo")),
        "eval",
        "--no-cache",
        "--no-table",
    ]


def deepeval(root: str, folder: Path) -> list[str]:
    (folder / "evaluate.py").write_text(DEEPEVAL.replace("QUESTIONS", str(QUESTIONS)))
    return [str(required(TOOLS / "venv" / "bin" / "python", "make agents", what="deepeval")), "evaluate.py"]


@pytest.mark.parametrize("program", [promptfoo, deepeval])
async def test_no_question_sees_another_and_a_list_tells_all_in_one_number(
    program: Callable[[str, Path], list[str]], claude_2: Path, make_settings: MakeSettings, upstream: Upstream,
    tmp_path: Path,
) -> None:  # fmt: skip
    upstream.behave = behave
    async with proxied(make_settings(claude_bin=claude_2)) as (engine, root):
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ROOT": root, **QUIET}
        await output_of(*program(root, tmp_path), within=LONGEST, cwd=tmp_path, env=env)
        asked = [_QUESTION.findall(str(seen.texts())) for seen in upstream.requests]
        assert {len(set(questions)) for questions in asked} == {1}
        assert len({questions[0] for questions in asked}) == QUESTIONS
        assert [row.turns for row in await chains(engine)] == [1] * QUESTIONS
        folded = [row async for row in engine.store.summaries("local", since=1e12)]
        assert folded == []
        number, _ = await engine.store.one_shots("local", since=0.0, until=1e12)
        assert number == QUESTIONS
