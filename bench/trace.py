"""The way of one warm chat turn through the package, from the socket to the acknowledgement, read top to bottom.

    python -m bench.trace [--root FOLDER] [--stream]

A real `serve` over the real CLI and the scripted upstream notes every call of its own functions that the turn makes,
in its tasks, callbacks and threads (`traced` says how they are told from what runs beside it), up to and including
`Answer.acknowledge`: metrics, log lines and whether the answer arrived are noted behind it, and no client waits for
them. FOLDER holds another `cli_session_proxy` to be traced instead of this one.

Counted are distinct functions, methods, properties and lambdas, their files, and moves: how often the next call is of a
function in another file. A comprehension or generator expression is part of the function in which it is read, though
Python 3.11 runs each as a frame of its own (3.12 runs comprehensions in place): how many there are is said beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .client import Connections
from .contenders import Place, body, bundled
from .machine import cores
from .servers import proxy_environment
from .traced import MARK
from .upstream import upstream_process

HERE = Path(__file__).parent.parent
WARM_UP = 3
# Seconds after a turn in which what it leaves to be done is done: it must not be counted as the next one's.
SETTLE = 0.5
BOUND = 120.0  # seconds for all of it
LINE = 64 * 1024 * 1024  # bytes of calls that come back in one line
PATH = "/agents/a/v1/chat/completions"
Function = tuple[str, str]  # file, qualified name
EXPRESSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass(frozen=True)
class Trace:
    """Calls in order."""

    calls: list[Function]

    @property
    def functions(self) -> list[Function]:
        """In the order in which they are first called."""
        return [one for one in dict.fromkeys(self.calls) if not one[1].endswith(EXPRESSIONS)]

    @property
    def expressions(self) -> int:
        """Comprehensions and generator expressions that ran as frames of their own."""
        return len(dict.fromkeys(self.calls)) - len(self.functions)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def moves(self) -> int:
        return sum(one != other for (one, _), (other, _) in pairwise(self.calls))

    def lines(self) -> Iterator[str]:
        times = Counter(self.calls)
        file = ""
        for function in self.functions:
            if function[0] != file:
                file = function[0]
                yield file
            yield f"    {function[1]}" + (f"  ×{times[function]}" if times[function] > 1 else "")
        yield ""
        for folder, number in Counter(os.path.dirname(file) or file for file, _ in self.functions).most_common():
            yield f"{number:5} functions in {folder}"
        yield f"{len(self.functions)} functions in {len(self.files)} files, {self.moves} moves between files"
        yield f"{len(self.functions) + self.expressions} frames with comprehensions and generator expressions"


async def trace(root: Path, *, stream: bool) -> Trace:
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        async with upstream_process() as upstream:
            place = Place(bundled(), upstream, Path(folder), cores())
            env = proxy_environment(place, port=0) | {"PYTHONPATH": str(root)}
            with (place.folder / "log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, str(HERE / "bench" / "traced.py"), cwd=place.folder, env=env, limit=LINE,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                )  # fmt: skip
            assert process.stdin is not None
            try:
                async with asyncio.timeout(BOUND):
                    address = await _said(process, "listening on")
                    connections = Connections(int(address.split()[0].rpartition(":")[2]))
                    with contextlib.closing(connections):
                        for n in range(WARM_UP):
                            await connections.post("a", PATH, body(f"turn {n}", stream=stream))
                            await asyncio.sleep(SETTLE)
                        process.stdin.write(b"begin\n")
                        await _said(process, MARK)
                        await connections.post("a", PATH, body("the traced turn", stream=stream))
                        process.stdin.write(b"end\n")
                        calls = json.loads(await _said(process, MARK))
                        return Trace([(file, name) for file, name in calls])
            except EOFError as exc:
                raise RuntimeError(f"{exc}: {(place.folder / 'log').read_text()[-2000:]}") from exc
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.communicate()


async def _said(process: asyncio.subprocess.Process, begins: str) -> str:
    """The rest of its next line on stdout that begins so."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if line.startswith(begins):
            return line.removeprefix(begins)
    raise EOFError(f"the traced proxy ended before it said {begins!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE, help="the folder of another cli_session_proxy")
    parser.add_argument("--stream", action="store_true", help="a streamed turn")
    given = parser.parse_args()
    print("\n".join(asyncio.run(trace(given.root.absolute(), stream=given.stream)).lines()))


if __name__ == "__main__":
    main()
