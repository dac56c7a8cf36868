"""`python -m tests.conformance --docs docs/conformance.md`: runs the suites, judges what did not pass, writes the page.

Exit code 1 where something failed that `verdicts` does not know.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import astuple
from pathlib import Path

from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..conftest import FAKE_KEY
from ..obedient import Obedient
from ..serving import serve
from .suites import SUITES, Case, Suite, all_suites, cases
from .verdicts import Verdict, verdict

# Seconds for one suite on a busy machine, and how many run at once: they mostly wait.
LONGEST = 1800.0
AT_ONCE = 3


async def run(suite: Suite, root: str, folder: Path) -> list[Case]:
    report = folder / "report"
    report.unlink(missing_ok=True)
    command = [part.replace("ROOT", root).replace("REPORT", str(report)) for part in suite.command]
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "ROOT": root, "NO_COLOR": "1"}
    env |= {name: value.replace("ROOT", root) for name, value in suite.env.items()}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=suite.folder or folder, env=env, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LONGEST):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return cases(suite, report.read_text() if "REPORT" in suite.command else out.decode())
    except (OSError, ValueError) as exc:
        raise SystemExit(f"{suite.name} gave no report: {out.decode()[-2000:]}\n{err.decode()[-2000:]}") from exc


async def served(suite: Suite, claude: Path, slots: asyncio.Semaphore) -> tuple[Suite, list[Case]]:
    """A suite against a proxy and a model of its own."""
    async with slots, Upstream(behave=Obedient(suite.thinks)) as upstream:
        with tempfile.TemporaryDirectory(prefix="csp-conformance-") as name:
            folder = Path(name)
            env = {
                "ANTHROPIC_API_KEY": FAKE_KEY, "ANTHROPIC_BASE_URL": upstream.url, "HOME": name,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",
            }  # fmt: skip
            settings = Settings(
                port=0, var=folder / "var", claude_config_dir=folder / "claude", claude_env=env, claude_bin=claude
            )
            async with serve(settings, folder) as (address, _):
                found = await run(suite, address.removesuffix("/").removesuffix("/v1"), folder)
    print(f"{title(suite)}: {dict(Counter(case.outcome for case in found))}", file=sys.stderr)
    return suite, found


async def run_all(claude: Path, only: str) -> list[tuple[Suite, list[Case]]]:
    slots = asyncio.Semaphore(AT_ONCE)
    chosen = [suite for suite in all_suites() if only in suite.name]
    return await asyncio.gather(*(served(suite, claude, slots) for suite in chosen))


def title(suite: Suite) -> str:
    return f"{suite.name}{', a model that thinks' if suite.thinks else ''}"


def page(results: list[tuple[Suite, list[Case]]]) -> tuple[str, list[Verdict]]:
    """The page, and the verdicts in it."""
    lines = [
        "# Conformance",
        "",
        "Other people's suites against the proxy over the real CLI, with a small scripted model that does what it is",
        "told (`tests/obedient.py`). `make conformance` runs them and writes this page. What they say of the model",
        "itself is left out: it is a script. Of openai-python's and anthropic-python's own tests (in their sdists)",
        "those are run that ask a server for what the proxy serves: chat completions, Responses, Conversations,",
        "Messages and models. What LangChain's tests would fetch from the network is a picture and a PDF of our own.",
        "",
        "| suite | version | passed | failed | not run |",
        "|---|---|---|---|---|",
    ]
    for suite, found in results:
        counts = Counter(case.outcome for case in found)
        numbers = " | ".join(str(counts[outcome]) for outcome in ("passed", "failed", "not run"))
        lines.append(f"| {title(suite)} | {suite.version} | {numbers} |")
    lines += ["", "## What did not pass", "", "| suite | case | verdict | reason |", "|---|---|---|---|"]
    verdicts = []
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for suite, found in results:
        for case in found:
            if case.outcome == "failed":
                judged = verdict(suite.name, case)
                verdicts.append(judged)
                grouped.setdefault((suite.name, judged.kind, judged.reason), []).append(f"`{case.id}`")
    for (name, kind, reason), ids in grouped.items():
        lines.append(f"| {name} | {', '.join(dict.fromkeys(ids))} | {kind} | {reason} |")
    lines += ["", "## What was not run", "", "| suite | case | why, in the suite's words |", "|---|---|---|"]
    left: dict[tuple[str, str], list[str]] = {}
    for suite, found in results:
        for case in found:
            if case.outcome == "not run":
                left.setdefault((suite.name, " ".join(case.why.replace("|", "/").split())), []).append(f"`{case.id}`")
    lines += [f"| {name} | {', '.join(dict.fromkeys(ids))} | {why} |" for (name, why), ids in left.items()]
    return "\n".join(lines) + "\n", verdicts


def run_here(only: str) -> list[tuple[Suite, list[Case]]]:
    """With an environment that is built up: no login and no settings of whoever runs this."""
    import claude_agent_sdk  # noqa: PLC0415 - the binary that it carries is all that is wanted of it

    if not (SUITES / ".installed").exists():
        raise SystemExit("the suites are missing: make conformance")
    for name in [name for name in os.environ if name.startswith(("ANTHROPIC_", "CLAUDE", "CLI_SESSION_PROXY_"))]:
        del os.environ[name]
    claude = Path(claude_agent_sdk.__file__).parent / "_bundled" / "claude"
    with tempfile.TemporaryDirectory(prefix="csp-home-") as home:
        os.environ["HOME"] = home
        return asyncio.run(run_all(claude, only))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("--docs", type=Path, help="write the page to this file")
    parser.add_argument("--only", default="", help="the suites with this in their name")
    parser.add_argument("--json", type=Path, help="keep what the suites said in this file")
    parser.add_argument("--judge", type=Path, help="judge what such a file says, and run nothing")
    given = parser.parse_args()
    if given.judge is None:
        results = run_here(given.only)
    else:
        known = {title(suite): suite for suite in all_suites()}
        kept = json.loads(given.judge.read_text())
        results = [(known[name], [Case(*case) for case in found]) for name, found in kept.items()]
    if given.json is not None:
        kept = {title(suite): [astuple(case) for case in found] for suite, found in results}
        given.json.write_text(json.dumps(kept, indent=1))
    text, verdicts = page(results)
    if given.docs is None:
        print(text)
    else:
        given.docs.write_text(text)
    if any(judged.kind == "not judged" for judged in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
