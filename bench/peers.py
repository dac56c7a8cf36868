"""The continuity benchmark on this proxy, the bare CLI and whoever else keeps conversations: `make peers`.

    python -m bench.peers [--only NAME] [--runs 5] [--portion MINUTES] [--docs docs]

Each contender is in an environment of its own (see the Makefile). A run that is in benchmark/results already is not run
again, so that a long measurement can be done in portions. --docs writes docs/peers.md of all that is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from tests.postgres import server
from turnfault import summary, tasks
from turnfault.bench import Options, bench, read
from turnfault.errors import TargetError

from .contenders import FLAGS, bundled
from .servers import CCPROXY_CLAUDE, CCPROXY_TOML

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / ".tools"
ADAPTERS = ROOT / "benchmark" / "contenders"
RESULTS = ROOT / "benchmark" / "results"
OURS = "cli-session-proxy"
RUNS = 5
# A contender's own programs come first; nothing else of this environment is on its PATH.
PATH = "/usr/local/bin:/usr/bin:/bin"

HEAD = """# turnfault: who keeps a conversation, as measured

[turnfault](../benchmark/README.md) tells a conversation some facts, breaks one thing, says one more, and reads what
the model is shown then. "kept" = each acknowledged turn once, in order, with its answer, in its role, and nothing of
anybody else. "lost" = not there; "flattened" = told, but squeezed into one text of the user's; "foreign" = words that
nobody acknowledged in this conversation, such as a prompt that failed. "no answer" = the client's last request
failed. "–" = the contender does not offer what the row breaks. "cache" = of what the request before the fault wrote
into a prompt cache with breakpoints, the share that the next request reads.

All ran on one machine over the same scripted provider, each in an environment of its own. Numbers are medians of so
many runs, with the least and the greatest where they differ; each run has a seed, which decides the order of the
rows, how many turns are told, and where in an answer the fault happens. [What it measures and what not](benchmark.md)
· [every run and its trace](../benchmark/results). Made by `make peers`.
"""
TASKS = """
## Tasks

Of five small coding tasks, how many are done where an agent is interrupted in the middle, after its first attempt has
failed ([how](benchmark.md#tasks)).
"""
NOTES = """
## What to keep in mind

- It is our benchmark, and we chose the rows: they break what this proxy was built to survive. See [threats to
  validity](benchmark.md#threats-to-validity).
- A library that is asked again after an error is given the same words again, as a script would. Some have a way of
  their own to go on after an error; rows "sent again" do not use it.
- Six at once are six calls on one conversation, which only some contenders promise to put in order.
"""
REPEAT = """
## Corrections

A contender that is asked in the wrong way is a mistake of ours. Each is a few lines: `bench/peers.py` says how it is
started, [benchmark/contenders](../benchmark/contenders) has the adapters. Open an issue or a pull request with the
lines that are better, and we run it again; [benchmark/README.md](../benchmark/README.md) says how to measure a server
of your own.

<!-- not run: takes hours and installs the contenders -->
```sh
make peers
```
"""


@dataclass(frozen=True)
class Peer:
    """`made`: what its options are, once what it needs beside is there."""

    name: str
    made: Callable[[], contextlib.AbstractContextManager[Options]]


def venv(name: str) -> Path:
    return TOOLS / "contenders" / name / "bin" / "python"


def version(python: Path, *packages: str) -> str:
    """Of what a contender is made of, in its own environment. Raises `TargetError` where it is not installed."""
    asked = f"from importlib.metadata import version as v; print(*(f'{{n}} {{v(n)}}' for n in {packages!r}), sep=', ')"
    try:
        done = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise TargetError(f"{packages[0]} is not installed: make .tools/contenders/.installed") from exc
    return done.stdout.strip()


def cli_version() -> str:
    said = subprocess.run(
        [bundled(), "--version"], capture_output=True, text=True, check=True, env={"HOME": "/nowhere"}
    )
    return f"CLI {said.stdout.split()[0]}"


def own_version() -> str:
    said = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return f"{metadata.version(OURS)} ({said.stdout.strip() or 'no checkout'}), {cli_version()}"


@contextmanager
def on_sqlite() -> Iterator[Options]:
    serve = [sys.executable, "-m", "cli_session_proxy", "serve", "--port", "{port}", "--var", "{folder}/var",
             "--claude-config-dir", "{folder}/config", "--claude-bin", str(bundled())]  # fmt: skip
    yield Options(
        ("http://127.0.0.1:{port}/v1",), agent_header="X-Agent-Id", start=shlex.join(serve), config="{folder}/config",
        version=own_version(),
    )  # fmt: skip


@contextmanager
def on_three_hosts() -> Iterator[Options]:
    # synchronous_commit: as PostgreSQL comes. The tests' small server has it off.
    with server(memory=False) as database:
        serve = [sys.executable, str(ADAPTERS / "three_hosts.py"), "{port}", "{folder}", "{folder}/config",
                 str(bundled()), database.new_url()]  # fmt: skip
        yield Options(
            ("http://127.0.0.1:{port}/v1",), agent_header="X-Agent-Id", start=shlex.join(serve),
            config="{folder}/config", version=own_version(),
            note="Three proxies, each with files of its own, on one PostgreSQL: every turn is at another of them than "
            "the one before. `restarted` and `killed` are all three at once.",
        )  # fmt: skip


@contextmanager
def bare() -> Iterator[Options]:
    yield Options(
        ("cli",), claude=bundled(), version=cli_version(),
        note="Driven as a script would: `claude -p`, `--resume` of the last id that came back, the same words again "
        "after an error. Six at once are six programs on one session.",
    )  # fmt: skip


@contextmanager
def ccproxy() -> Iterator[Options]:
    python = TOOLS / "ccproxy" / "bin" / "python"
    about = f"{version(python, 'ccproxy-api', 'claude-agent-sdk')}, {cli_version()}"
    wrapper = CCPROXY_CLAUDE.format(command=shlex.quote(str(bundled())), flags=shlex.join(FLAGS))
    start = _script(
        'mkdir -p "$1/bin"', f"cat > \"$1/bin/claude\" <<'E'\n{wrapper}\nE", 'chmod +x "$1/bin/claude"',
        f'cat > "$1/ccproxy.toml" <<E\n{CCPROXY_TOML.format(port="$2")}\nE',
        f'exec env CONFIG_FILE="$1/ccproxy.toml" PATH="$1/bin:{PATH}" npm_config_offline=true '
        f'{shlex.quote(str(python.parent / "ccproxy"))} serve --config "$1/ccproxy.toml"',
    )  # fmt: skip
    at = "http://127.0.0.1:{port}/claude/sdk"
    yield Options(
        (f"{at}/{{agent}}/v1", f"{at}/v1"), start=start, config="{folder}/config", version=about,
        note="Asked by its own way to name a conversation: a session in the path of its `claude_sdk` plugin. Its plain "
        "proxy mode passes requests on without a CLI and keeps nothing. A newer claude-agent-sdk breaks it.",
    )  # fmt: skip


@contextmanager
def claude_max() -> Iterator[Options]:
    package = TOOLS / "claude-max" / "node_modules" / "claude-max-api-proxy"
    try:
        about = json.loads((package / "package.json").read_text())["version"]
    except OSError as exc:
        raise TargetError("claude-max-api-proxy is not installed: make .tools/claude-max/.installed") from exc
    start = _script(
        'mkdir -p "$1/bin"', f'ln -sf {shlex.quote(str(bundled()))} "$1/bin/claude"',
        f'exec env PATH="$1/bin:{PATH}" node {shlex.quote(str(package / "dist" / "server" / "standalone.js"))} "$2"',
    )  # fmt: skip
    yield Options(
        ("http://127.0.0.1:{port}/v1",), model="claude-sonnet-4", start=start, version=f"{about}, {cli_version()}",
        note="It keeps no conversations (its CLI runs with `--no-session-persistence`): its clients send the whole "
        "history each time, so all of its rows are asked that way.",
    )  # fmt: skip


@contextmanager
def agent_sdk() -> Iterator[Options]:
    yield Options(
        (f"python: {ADAPTERS / 'agent_sdk_store.py'}:Resumed",), python=str(venv("agent-sdk")),
        config="{folder}/config", version=version(venv("agent-sdk"), "claude-agent-sdk"),
        note="A `query` for each turn, resumed from a SessionStore that keeps entries in files. The application keeps "
        "which session is whose.",
    )  # fmt: skip


@contextmanager
def langgraph_sqlite() -> Iterator[Options]:
    packages = ("langgraph", "langgraph-checkpoint-sqlite", "langchain-anthropic")
    yield Options(
        (f"python: {ADAPTERS / 'langgraph_checkpoints.py'}:Sqlite",), python=str(venv("langgraph")),
        version=version(venv("langgraph"), *packages),
        note="A graph of one node over ChatAnthropic; `thread_id` is the conversation. No CLI, so no transcripts.",
    )  # fmt: skip


@contextmanager
def langgraph_postgres() -> Iterator[Options]:
    packages = ("langgraph", "langgraph-checkpoint-postgres", "langchain-anthropic")
    about = version(venv("langgraph"), *packages)
    with server(memory=False) as database:
        # A program for the interpreter: what runs the class gets no environment of ours.
        program = database.folder / "python"
        told = f"DATABASE_URL={shlex.quote(database.new_url())}"
        program.write_text(f'#!/bin/sh\n{told} exec {shlex.quote(str(venv("langgraph")))} "$@"\n')
        program.chmod(0o755)
        yield Options(
            (f"python: {ADAPTERS / 'langgraph_checkpoints.py'}:Postgres",), python=str(program), version=about,
            note="The same graph, its checkpoints in PostgreSQL. The database is not what is broken.",
        )  # fmt: skip


@contextmanager
def openai_agents() -> Iterator[Options]:
    yield Options(
        (f"python: {ADAPTERS / 'openai_agents_session.py'}:Session",), python=str(venv("openai-agents")),
        version=version(venv("openai-agents"), "openai-agents", "litellm"),
        note="`Runner.run` with a SQLiteSession, over its model class for LiteLLM.",
    )  # fmt: skip


@contextmanager
def google_adk() -> Iterator[Options]:
    yield Options(
        (f"python: {ADAPTERS / 'google_adk_sessions.py'}:Sessions",), python=str(venv("google-adk")),
        version=version(venv("google-adk"), "google-adk", "litellm"),
        note="A Runner with a DatabaseSessionService on SQLite, over its model class for LiteLLM.",
    )  # fmt: skip


@contextmanager
def llm() -> Iterator[Options]:
    about = version(venv("llm"), "llm", "llm-anthropic")
    program = shlex.join([str(ADAPTERS / "llm.sh"), str(venv("llm").parent / "llm")])
    yield Options(
        (f"command: {program} {{model}}",), version=about,
        note="A command for each turn: `llm -c`, with a log for each conversation.",
    )  # fmt: skip


PEERS = (
    Peer(f"{OURS}, SQLite", on_sqlite), Peer(f"{OURS}, PostgreSQL, 3 hosts", on_three_hosts), Peer("bare CLI", bare),
    Peer("LangGraph, SQLite", langgraph_sqlite), Peer("LangGraph, PostgreSQL", langgraph_postgres),
    Peer("openai-agents, SQLiteSession", openai_agents), Peer("Google ADK, DatabaseSessionService", google_adk),
    Peer("llm, its log", llm), Peer("Claude Agent SDK, SessionStore", agent_sdk),
    Peer("ccproxy-api", ccproxy), Peer("claude-max-api-proxy", claude_max),
)  # fmt: skip


def _script(*lines: str) -> str:
    """A shell's, which is given the run's folder and port."""
    return shlex.join(["sh", "-ec", "\n".join(lines), "start", "{folder}", "{port}"])


def slug(name: str) -> str:
    return "-".join("".join(char if char.isalnum() else " " for char in name.casefold()).split())


def page() -> str:
    """docs/peers.md."""
    runs = read([RESULTS])
    lines = [HEAD, summary.table(runs), "## How each was asked, and what is not its own", ""]
    for one in summary.contenders(runs):
        runs_of = f"[its runs](../benchmark/results/{slug(one.name)})"
        lines.append(f"- **{one.name}** ({one.version}; {runs_of}). {one.note or ''}".rstrip())
    lines += ["", *(f"- {line}." for line in summary.left_out(runs))]
    fewer = [f"{one.name} ({len(one.runs)})" for one in summary.contenders(runs) if len(one.runs) < RUNS]
    if fewer:
        lines += ["", f"Fewer than {RUNS} runs: {', '.join(fewer)}."]
    worked = tasks.read(RESULTS)
    if worked:
        lines += [TASKS, tasks.table(worked)]
    differing = summary.differing(runs)
    lines += ["", "## What differed between runs", "", *(f"- {line}" for line in differing or ("Nothing.",))]
    return "\n".join(lines) + NOTES + REPEAT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, help="where peers.md is written")
    parser.add_argument("--only", default="", help="peers whose name holds this")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each, with the seeds 1, 2, …")
    parser.add_argument("--portion", type=float, default=float("inf"), help="minutes after which no run begins")
    options = parser.parse_args()
    until = time.monotonic() + options.portion * 60
    os.environ.pop("PYTHONPATH", None)
    for seed in range(1, options.runs + 1):
        for peer in PEERS:
            output = RESULTS / slug(peer.name)
            missing = [name for name in ("seed", "tasks") if not (output / f"{name}-{seed}.json").exists()]
            if seed > 1:
                missing = [name for name in missing if name == "seed"]  # tasks are done once
            if options.only not in peer.name or not missing or time.monotonic() > until:
                continue
            print(f"\n== {peer.name}, {' and '.join(missing)} {seed}", flush=True)
            try:
                with peer.made() as wanted:
                    named = replace(wanted, name=peer.name)
                    if "seed" in missing:
                        asyncio.run(bench(named, _say, seeds=range(seed, seed + 1), output=output))
                    if "tasks" in missing:
                        asyncio.run(tasks.run(named, _say, seed=seed, output=output))
            except TargetError as exc:
                print(f"left out: {exc}", flush=True)
    if options.docs is not None:
        (options.docs / "peers.md").write_text(page(), encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
