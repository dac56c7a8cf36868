"""The suites: how each is run against an address, and what its report says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from ..conftest import ROOT

SUITES = ROOT / ".tools" / "suites"
PYTHON = SUITES / "venv" / "bin" / "python"

Outcome = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a suite. `why`: what the suite says of one that did not pass."""

    id: str
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """`name` is the suite's, with the wire or model it is pointed at; `command` has the address as ROOT and the path of
    its report as REPORT. `thinks`: the model thinks."""

    name: str
    version: str
    command: tuple[str, ...]
    thinks: bool = False
    env: tuple[tuple[str, str], ...] = ()


LLMPROBE = "llmprobe"
COMPLY = "llm-comply"
LANGCHAIN = "langchain-tests"

# Its formats, each with the end of the address and a model for which it asks for thoughts.
FORMATS = {
    "open-responses": ("/v1", "gpt-5"),
    "openai-chat": ("/v1", "gpt-5"),
    "anthropic": ("/v1", "claude-opus-4-5"),
    "google-genai": ("", "gemini-2.5-flash"),
    "google-interactions": ("", "gemini-2.5-flash"),
}


def all_suites() -> list[Suite]:
    probe = ("node", str(SUITES / "node_modules" / "llmprobe" / "bin" / "dist" / "llmprobe.mjs"))
    comply = str(SUITES / "venv" / "bin" / "llm-comply")
    found = []
    for thinks in (False, True):
        options = ("ROOT", "-m", "sonnet", "--full", "--no-bench", "--no-save", "--no-color", "--save", "REPORT")
        found.append(Suite(LLMPROBE, "0.6.12", (*probe, *options), thinks))
        for wire, (end, model) in FORMATS.items():
            options = ("--format", wire, "-u", f"ROOT{end}", "-k", "none", "-m", model, "--json")
            found.append(Suite(f"{COMPLY}, {wire}", "0.5.0", (comply, *options), thinks))
    # One loop for all: LangChain's models share their clients.
    pytest = (
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "-o", "asyncio_mode=auto",
        "-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session",
    )  # fmt: skip
    file = str(Path(__file__).with_name("langchain_suite.py"))
    found.append(Suite(LANGCHAIN, "1.1.9", (str(PYTHON), *pytest, "--junitxml", "REPORT", file)))
    return found


def cases(suite: Suite, report: str) -> list[Case]:
    """What the report of this suite says."""
    if suite.name == LLMPROBE:
        return _llmprobe(json.loads(report)["conformance"]["results"])
    if suite.name == LANGCHAIN:
        return _junit(report)
    outcomes: Mapping[str, Outcome] = {"passed": "passed", "failed": "failed", "skipped": "not run"}
    return [
        Case(case["id"], outcomes[case["status"]], "; ".join(case.get("errors", ())))
        for case in json.loads(report)["results"]
    ]


def _llmprobe(results: list[dict[str, object]]) -> list[Case]:
    """Its engine checks. What it says of the model is the model's: that is a script here."""
    found = []
    for result in results:
        failures = [failure for failure in result["failures"] if failure["severity"] == "MUST"]  # type: ignore[attr-defined]
        why = "; ".join(str(failure["message"]) for failure in failures) or str(result.get("reason", ""))
        outcomes: Mapping[object, Outcome] = {"pass": "passed", "fail": "failed"}
        found.append(Case(str(result["id"]), outcomes.get(result["outcome"], "not run"), why))
    return found


def _junit(report: str) -> list[Case]:
    found = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        told = {kind: case.find(kind) for kind in ("failure", "error", "skipped")}
        failed = told["failure"] if told["failure"] is not None else told["error"]
        if failed is not None:
            found.append(Case(name, "failed", failed.get("message", "")))
        elif told["skipped"] is not None:
            found.append(Case(name, "not run", told["skipped"].get("message", "")))
        else:
            found.append(Case(name, "passed"))
    return found
