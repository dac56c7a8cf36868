"""The proxy beside the bare CLI and its best warm peer, in one run over one scripted upstream.

    python -m bench [--quick | --tiny] [--json FILE] [--docs DIR] [--only turns,agents,…] [--without-ccproxy]

Read the ratios, not the milliseconds: those belong to the machine. docs/bench.md tells how it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from . import again, agents, chains, freeze, hosts, machine, page, report, turns
from .agents import Crowd
from .contenders import Place, bundled
from .plan import FULL, QUICK, TINY, Bench, Plan, Row
from .upstream import upstream_process

CCPROXY = Path(__file__).parent.parent / ".tools" / "ccproxy" / "bin" / "ccproxy"

SCENARIOS: Mapping[str, Callable[[Bench], Awaitable[list[Row] | Crowd]]] = {
    "starts": turns.starts,
    "turns": turns.warm_turns,
    "parameters": turns.parameters,
    "first": turns.first_turns,
    "edits": again.edits,
    "one-shots": again.one_shots,
    "answers": turns.long_answers,
    "chains": chains.long_chains,
    "dumps": chains.dumps,
    "agents": agents.throughput,
    "crowd": agents.crowd,
    "hosts": hosts.hosts,
    "page": page.page,
    "freeze": freeze.freeze,
}


async def measure(plan: Plan, names: list[str], ccproxy: Path | None) -> report.Run:
    cores = machine.cores()
    about = machine.about()
    cores.settle()
    rows: list[Row] = []
    crowd: Crowd | None = None
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with upstream_process() as upstream:
            bench = Bench(plan, Place(bundled(), upstream, Path(folder), cores), ccproxy)
            place = bench.place.beside("version")
            asked = await place.start(str(place.claude), "--version", env=place.environment(), cwd=place.folder)
            said, _ = await asked.communicate()
            about |= {"cli": said.decode().split()[0]}
            for name in names:
                print(f"{name} …", file=sys.stderr, flush=True)
                began = time.perf_counter()
                found = await SCENARIOS[name](bench)
                seconds[name] = time.perf_counter() - began
                if isinstance(found, Crowd):
                    crowd = found
                else:
                    rows += found
    return report.Run(about, rows, crowd, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="six minutes instead of 25")
    parser.add_argument("--tiny", action="store_true", help="so little that it only shows that everything works")
    parser.add_argument("--only", default=",".join(SCENARIOS), help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--docs", type=Path, help="write the tables and the picture into this folder")
    parser.add_argument("--without-ccproxy", action="store_true")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"there is no {', '.join(unknown)}")
    ccproxy = None if given.without_ccproxy else CCPROXY
    if ccproxy is not None and not ccproxy.exists():
        parser.error(f"{ccproxy} is missing: `make bench` installs it, --without-ccproxy leaves it out")
    run = asyncio.run(measure(TINY if given.tiny else QUICK if given.quick else FULL, names, ccproxy))
    print("\n".join(report.tables(run)))
    report.write(run, given.json, given.docs)
    if given.docs is not None:
        from .picture import draw  # noqa: PLC0415 - matplotlib takes a second to import

        draw(run.rows, given.docs / report.PICTURE)


if __name__ == "__main__":
    main()
