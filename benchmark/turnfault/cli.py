"""The commands of turnfault: parse, call, print."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from importlib import metadata, resources
from pathlib import Path

from . import summary, tasks
from .bench import Options, bench, read
from .chaos import LENGTH, chaos
from .errors import TargetError
from .provider import upstream
from .rows import ROWS

say = partial(print, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Ends with 0; with 1 where `chaos` found a broken promise, with 2 where the command cannot be run."""
    try:
        sys.exit(_run(_parser().parse_args(argv)))
    except TargetError as exc:
        print(exc, file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="turnfault", description=metadata.metadata("turnfault")["Summary"])
    parser.add_argument("--version", action="version", version=f"turnfault {metadata.version('turnfault')}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="break one thing at a time, and see what the model is shown")
    _target(run)
    run.add_argument("--only", help="only rows whose name or id holds this")
    run.add_argument("--seed", type=int, default=0, help="of the first run (default: 0)")
    run.add_argument("--runs", type=int, default=1, help="so many, with the seeds that follow (default: 1)")
    random = commands.add_parser("chaos", help="random histories; what breaks a promise is made small")
    _target(random)
    random.add_argument("--minutes", type=float, default=5.0)
    random.add_argument("--seed", type=int, default=0, help="of the first history (default: 0)")
    random.add_argument("--length", type=int, default=LENGTH, help=f"steps of a history (default: {LENGTH})")
    random.add_argument("--replay", type=Path, help="a history that was written before, instead of random ones")
    working = commands.add_parser("tasks", help="small coding tasks that are interrupted")
    _target(working)
    working.add_argument("--seed", type=int, default=0)
    table = commands.add_parser("table", help="all runs of some folders: medians and spread, as markdown")
    table.add_argument("folders", nargs="+", type=Path)
    commands.add_parser("rows", help="what is broken")
    commands.add_parser("schema", help="the JSON Schema of a run's results")
    provider = commands.add_parser("provider", help="the scripted Messages API on loopback, by hand")
    provider.add_argument("--port", type=int, default=0)
    return parser


def _target(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--target", action="append", required=True,
        help="a URL up to where its wire begins, with {agent} for a conversation's name where it has a place for it "
        "(given twice: the one without is for whole histories); `command: PROGRAM {agent}`, run for each turn, words "
        "on stdin, answer on stdout; `python: FILE.py:Class`; or `cli`, the bare Claude CLI. {port} and {folder} in "
        "an option stand for a free port and the run's own folder",
    )  # fmt: skip
    to.add_argument("--wire", default="chat", help="of a URL: chat, responses, messages, generate or ollama")
    to.add_argument("--agent-header", help="the header that names a conversation")
    to.add_argument("--model", default="sonnet", help="what to ask for (default: sonnet)")
    to.add_argument("--start", help="the server's command: run with our ANTHROPIC_BASE_URL and a made-up key")
    to.add_argument("--stop", help="what ends it (default: SIGTERM)")
    to.add_argument("--claude-config-dir", help="where its CLI keeps transcripts")
    to.add_argument("--upstream-port", type=int, default=0, help="of the scripted provider, for a target that runs")
    to.add_argument("--key", default=os.environ.get("TURNFAULT_KEY"), help="what the target asks for")
    to.add_argument("--python", default=sys.executable, help="the interpreter that has what the class needs")
    to.add_argument("--claude", type=Path, help="the CLI of `--target cli` (default: of the PATH)")
    to.add_argument("--name", help="what the target is called (default: the first --target)")
    to.add_argument("--target-version", help="kept with the results")
    to.add_argument("--note", help="kept with the results")
    to.add_argument("-o", "--output", type=Path, help="a folder for results and traces")


def _run(given: argparse.Namespace) -> int:
    match given.command:
        case "run":
            seeds = range(given.seed, given.seed + given.runs)
            asyncio.run(bench(_options(given), say, only=given.only, seeds=seeds, output=given.output))
        case "chaos":
            found = asyncio.run(
                chaos(
                    _options(given), say, minutes=given.minutes, seed=given.seed, length=given.length,
                    replay=given.replay, output=given.output,
                )
            )  # fmt: skip
            return 1 if found else 0
        case "tasks":
            asyncio.run(tasks.run(_options(given), say, seed=given.seed, output=given.output))
        case "table":
            say(summary.table(read(given.folders)))
        case "rows":
            say("\n".join(f"{row.id:20} {row}" for row in ROWS))
        case "schema":
            say(resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))
        case "provider":
            upstream.serve(given.port)
    return 0


def _options(given: argparse.Namespace) -> Options:
    return Options(
        tuple(given.target), given.wire, given.agent_header, given.model, given.start, given.stop,
        given.claude_config_dir, given.upstream_port, given.key, given.python, given.claude, given.name,
        given.target_version, given.note,
    )  # fmt: skip


if __name__ == "__main__":
    main()
