"""The suites: how each is run against an address, and what its report says."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from ..conftest import ROOT
from ..media import paper, picture

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
    """`name` is the suite's, with the wire or model it is pointed at; `command` and `env` have the address as ROOT and
    the path of the report as REPORT. `folder`: where it runs, else in one that is empty. `thinks`: the model thinks."""

    name: str
    version: str
    command: tuple[str, ...]
    thinks: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


LLMPROBE = "llmprobe"
COMPLY = "llm-comply"
CANARY = "compatcanary"
LANGCHAIN = "langchain-tests"
OPENAI = "openai-python"
ANTHROPIC = "anthropic-python"

# The tests of the SDKs' own repositories for what the proxy serves: the address, and the files. Their other files ask
# for what it does not have (files, images, batches, organisations), or talk to a mock inside the test.
SDK_TESTS = {
    (OPENAI, "2.54.0"): (
        "ROOT/v1",
        "chat/test_completions test_responses responses/test_input_items responses/test_input_tokens"
        " test_conversations conversations/test_items test_models",
    ),
    (ANTHROPIC, "2.12.0"): ("ROOT", "test_messages test_models beta/test_messages beta/test_models"),
}

_VARIANT = re.compile(r"^Test(?:Async)?|\[.*\]$|test_(?:method|raw_response|streaming_response)_")

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
    canary = ("node", str(SUITES / "node_modules" / ".bin" / CANARY), "scan", "--fail-on", "never", "--format", "json")
    target = ("--base-url", "ROOT/v1", "--model", "sonnet", "--api-key", "none", "--output", "REPORT")
    found.append(Suite(CANARY, "0.2.2", (*canary, *target)))
    # One loop for all: LangChain's models share their clients.
    pytest = (
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "-o", "asyncio_mode=auto",
        "-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session",
    )  # fmt: skip
    file = str(Path(__file__).with_name("langchain_suite.py"))
    media = {"PICTURE": picture(8, 8), "PAPER": base64.b64encode(paper()).decode()}
    found.append(Suite(LANGCHAIN, "1.1.9", (str(PYTHON), *pytest, "--junitxml", "REPORT", file), env=media))
    for (name, version), (address, files) in SDK_TESTS.items():
        plugin = ("-p", "tests._alias_httpx") if name == ANTHROPIC else ()
        options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *plugin, "--junitxml", "REPORT")
        paths = [f"tests/api_resources/{file}.py" for file in files.split()]
        command = (str(SUITES / "sdks" / "bin" / "python"), *options, *paths)
        folder = SUITES / f"{name.removesuffix('-python')}-{version}"
        found.append(Suite(name, version, command, env={"TEST_API_BASE_URL": address}, folder=folder))
    return found


def cases(suite: Suite, report: str) -> list[Case]:
    """What the report of this suite says."""
    outcomes: Mapping[str, Outcome]
    if suite.name == LLMPROBE:
        return _llmprobe(json.loads(report)["conformance"]["results"])
    if suite.name == LANGCHAIN:
        return _junit(report)
    if suite.name == CANARY:
        outcomes = {"pass": "passed", "warn": "failed", "fail": "failed"}
        results = json.loads(report)["results"]
        return [Case(one["id"], outcomes.get(one["status"], "not run"), one["summary"]) for one in results]
    if suite.name in (OPENAI, ANTHROPIC):  # each as a method, raw and streamed, sync and async, loose and strict
        return [replace(case, id=_VARIANT.sub("", case.id)) for case in _junit(report)]
    outcomes = {"passed": "passed", "failed": "failed", "skipped": "not run"}
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
