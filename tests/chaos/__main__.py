"""Chaos by hand.

    python -m tests.chaos --minutes 30 --proxies 3 --tools     histories of new seeds until the time is over
    python -m tests.chaos --seed 7 --proxies 3 --tools         one history
    python -m tests.chaos --seed 7 --proxies 3 --steps 0-4,9   a part of it
    python -m tests.chaos --seed 7 --proxies 3 --shrink        the fewest steps that still show its first fault
    python -m tests.chaos --replay REPORT                      the history that a report has printed
    python -m tests.chaos --minutes 20 --proxies 3 --hosts     each proxy on a host of its own, on PostgreSQL

Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from ..conftest import ROOT
from . import cluster
from .checker import Kind
from .history import History, Shape, made, read
from .runner import Report, run
from .shrinking import shrunk

LENGTH = 40


def binary(cli: str) -> Path:
    """The CLI that the project's set-up installed; never one from PATH."""
    if cli == "1":
        return ROOT / ".tools" / "claude-1.0.120" / "node_modules" / ".bin" / "claude"
    spec = find_spec("claude_agent_sdk")
    if spec is None or spec.origin is None:
        sys.exit("needs the real CLI: pip install '.[claude]'")
    return Path(spec.origin).parent / "_bundled" / "claude"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="the first history's (default: a random one)")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with the next seeds for so long")
    parser.add_argument("--proxies", type=int, default=1)
    parser.add_argument("--hosts", action="store_true", help="each proxy on a host of its own (root)")
    parser.add_argument("--tools", action="store_true", help="agents with tools of their clients")
    parser.add_argument("--cli", choices=("2", "1"), default="2", help="2: 2.1.x, 1: 1.0.120")
    parser.add_argument("--wrapper", action="store_true", help="a CLI behind a script that does not exec it")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"steps of a history (default {LENGTH})")
    parser.add_argument("--no-pauses", action="store_true")
    parser.add_argument("--wide", action="store_true", help="every wire, pictures, edits, rewinding, deleting, moving")
    parser.add_argument("--agents", type=int, default=0, help="so many agents (default: two or three)")
    parser.add_argument("--release", action="store_true", help="the chains were begun by the release before")
    parser.add_argument("--long", action="store_true", help="plain turns, with a proxy that dies at each hundredth")
    parser.add_argument("--steps", help="only these, such as 0-4,9")
    parser.add_argument("--replay", type=Path, help="a printed report: its history, and not the seed's")
    parser.add_argument("--shrink", action="store_true", help="the fewest steps that still show a fault")
    parser.add_argument("--kind", choices=get_args(Kind), action="append", default=[], help="shrink for this kind only")
    parser.add_argument(
        "--logs",
        type=Path,
        help="write the proxies' logs of failing histories into this folder, and the transcripts where a prefix fell",
    )
    return parser.parse_args()


def chosen(text: str) -> list[int]:
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


async def once(history: History, logs: Path | None = None) -> Report:
    keep = None if logs is None else logs / f"{history.seed}-files"
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        report = await run(history, binary(history.shape.cli), Path(folder) / "run", keep=keep)
    if logs is not None and (report.faults or report.unexplained):
        await asyncio.to_thread(written, report, logs)
    return report


def written(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    seed = report.history.seed
    for name, lines in report.logs.items():
        (folder / f"{seed}-{name}.log").write_text("\n".join(lines))
    for number, messages in report.shown.items():
        (folder / f"{seed}-request-{number}.json").write_text(json.dumps(messages, indent=1))
    (folder / f"{seed}.txt").write_text("\n".join(report.lines()))


async def main() -> int:
    args = parsed()
    this = asyncio.current_task()
    assert this is not None
    # As Ctrl-C does: the proxies of the history are ended on the way out.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    shape = Shape(
        args.proxies, args.tools, args.cli, args.wrapper, args.length, not args.no_pauses, args.hosts, args.wide,
        args.agents, args.release, args.long,
    )  # fmt: skip
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    history = made(seed, shape) if args.replay is None else read(args.replay.read_text(), seed)
    if args.steps is not None:
        history = history.only(chosen(args.steps))
    if args.shrink:
        report = await shrunk(history, once, print, frozenset(args.kind))
        print("\n".join(report.lines()))
        return 1
    return await many(history, args.minutes * 60, args.logs)


async def many(history: History, seconds: float, logs: Path | None) -> int:
    until = time.monotonic() + seconds
    total: Counter[str] = Counter()
    shares: list[float] = []
    reasons: Counter[str] = Counter()
    failing: dict[int, list[str]] = {}
    while True:
        print(f"seed {history.seed}", file=sys.stderr, flush=True)
        report = await once(history, logs)
        total += report.counts
        total["histories"] += 1
        shares += [one.share for one in report.kept]
        total["kept below 0.99"] += len(report.low)
        for low in report.low:
            reasons[low.why] += 1
            print(f"seed {history.seed}: turn {low.turn} kept {low.share:.3f}: {low.why}", flush=True)
        wrong = [str(fault) for fault in report.faults]
        wrong += [f"unexplained: turn {one.turn} kept {one.share:.3f}" for one in report.unexplained]
        if wrong:
            failing[history.seed] = wrong
        if wrong or not seconds:
            print("\n".join(report.lines()), flush=True)
        if time.monotonic() >= until:
            break
        history = made(history.seed + 1, history.shape)
    print(f"{history.shape}: {dict(total)}")
    shares = shares or [1.0]
    print(f"prefix kept: median {statistics.median(shares):.4f}, minimum {min(shares):.4f} of {len(shares)}")
    for why, count in reasons.most_common():
        print(f"  {count} below 0.99: {why}")
    for seed, faults in failing.items():
        print(f"seed {seed}: {len(faults)} faults, the first: {faults[0]}")
    return 1 if failing else 0


if __name__ == "__main__":
    if parsed().hosts:
        cluster.enter()
    sys.exit(asyncio.run(main()))
