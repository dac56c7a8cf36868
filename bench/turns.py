"""One warm turn: the proxy beside the bare CLI, interleaved in one run over one scripted upstream.

    python -m bench.turns [--turns 60] [--json FILE]

Every round asks each contender one turn in a rotating order, so that the machine's moods hit all alike; the first
rounds warm up. Read the ratios, not the milliseconds: they belong to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .contenders import BareCLI, HTTPServer, Place, Timing, cpu_seconds, memory_mb, start_proxy, upstream_process

WARM_UP = 5


def bundled() -> Path:
    spec = find_spec("claude_agent_sdk")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "_bundled" / "claude"


async def measure(turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        async with upstream_process() as upstream:
            folder = Path(name)
            warm = BareCLI(Place(bundled(), upstream, folder / "warm"), warm=True)
            spawned = BareCLI(Place(bundled(), upstream, folder / "spawned"), warm=False)
            proxy = await start_proxy(Place(bundled(), upstream, folder / "proxy"))
            idle = memory_mb(proxy.pids())
            try:
                timings = await _rounds(turns, warm, spawned, proxy)
                before = cpu_seconds(proxy.pids())
                for n in range(turns):
                    await proxy.turn("cpu", f"turn {n}")
                cpu = (cpu_seconds(proxy.pids()) - before) / turns
            finally:
                await asyncio.gather(warm.close(), spawned.close(), proxy.close())
    return _report(timings, turns, {"ready_s": proxy.started, "idle_mb": idle, "cpu_ms_per_turn": cpu * 1000})


async def _rounds(turns: int, warm: BareCLI, spawned: BareCLI, proxy: HTTPServer) -> dict[str, list[Timing]]:
    asked: dict[str, Callable[[str], Awaitable[Timing]]] = {
        "bare warm CLI": lambda text: warm.turn("a", text),
        "proxy, whole answer": lambda text: proxy.turn("a", text, stream=False),
        "proxy, streamed": lambda text: proxy.turn("b", text),
    }
    timings: dict[str, list[Timing]] = {name: [] for name in (*asked, "bare CLI, a spawn a turn")}
    names = list(asked)
    for n in range(turns + WARM_UP):
        names = names[1:] + names[:1]
        for name in names:
            timing = await asked[name](f"turn {n}")
            if n >= WARM_UP:
                timings[name].append(timing)
    for n in range(max(5, turns // 10)):
        timings["bare CLI, a spawn a turn"].append(await spawned.turn("a", f"turn {n}"))
    return timings


def _report(timings: dict[str, list[Timing]], turns: int, more: dict[str, float]) -> dict[str, Any]:
    rows = {}
    for name, some in timings.items():
        whole, first = sorted(one.whole for one in some), sorted(one.first for one in some)
        rows[name] = {
            "turn_ms": statistics.median(whole) * 1000,
            "p90_ms": whole[int(len(whole) * 0.9)] * 1000,
            "first_ms": statistics.median(first) * 1000,
            "runs": len(some),
        }
    bare = rows["bare warm CLI"]
    ratios = {
        "whole answer: proxy / bare warm CLI": rows["proxy, whole answer"]["turn_ms"] / bare["turn_ms"],
        "first token: ms added by the proxy": rows["proxy, streamed"]["first_ms"] - bare["first_ms"],
        "a spawn a turn / proxy": rows["bare CLI, a spawn a turn"]["turn_ms"] / rows["proxy, whole answer"]["turn_ms"],
    }
    return {"turns": turns, "rows": rows, "ratios": ratios, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report = asyncio.run(measure(given.turns))
    for name, row in report["rows"].items():
        print(
            f"{name:26} {row['turn_ms']:7.1f} ms   p90 {row['p90_ms']:7.1f}   first {row['first_ms']:7.1f}"
            f"   n={row['runs']}"
        )
    for name, ratio in report["ratios"].items():
        print(f"{name:40} {ratio:.2f}")
    print(f"serve ready {report['ready_s']:.2f} s, {report['idle_mb']:.0f} MB without children", end=", ")
    print(f"{report['cpu_ms_per_turn']:.1f} ms CPU of its own a turn")
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
