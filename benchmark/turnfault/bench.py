"""`turnfault run`: the rows on one target, once for each seed; printed, and written as files."""

from __future__ import annotations

import asyncio
import difflib
import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from turnfault.ports import free_port

from . import report, summary
from .errors import TargetError
from .provider.upstream import Upstream
from .rows import ROWS
from .running import RowResult, provider, run
from .targets.base import Target
from .targets.command import Cli, CommandTarget
from .targets.library import LibraryTarget
from .targets.server import ServerTarget, WireName

Say = Callable[[str], None]
BARE, COMMAND, PYTHON = "cli", "command:", "python:"


@dataclass(frozen=True, slots=True)
class Options:
    """Which target, and how it is run. `targets`: `cli`, `command:…`, `python:…` or one or two URLs. `config`: where
    its CLI keeps transcripts. `claude`: the CLI of `cli`; None: of the PATH. In what names a place, `{port}` is a free
    port and `{folder}` the run's own folder."""

    targets: tuple[str, ...]
    wire: str = "chat"
    agent_header: str | None = None
    model: str = "sonnet"
    start: str | None = None
    stop: str | None = None
    config: str | None = None
    upstream_port: int = 0
    key: str | None = None
    python: str = sys.executable
    claude: Path | None = None
    name: str | None = None
    version: str | None = None
    note: str | None = None

    @property
    def called(self) -> str:
        return self.name or self.targets[0]

    def placed(self, folder: Path) -> Options:
        port = str(free_port())

        def filled(text: str | None) -> str | None:
            return None if text is None else text.replace("{port}", port).replace("{folder}", str(folder))

        return replace(
            self, targets=tuple(filled(one) or "" for one in self.targets), start=filled(self.start),
            stop=filled(self.stop), config=filled(self.config), name=self.called,
        )  # fmt: skip


async def bench(
    wanted: Options, say: Say, *, only: str | None = None, seeds: range = range(1), output: Path | None = None
) -> list[list[RowResult]]:
    """The results of each seed. A seed whose JSON is in `output` already is not run again. Raises `TargetError`."""

    def tell(result: RowResult) -> None:
        say(f"{result.row!s:60} {f'– ({result.why})' if result.score is None else result.score}")

    rows = [row for row in ROWS if only is None or only.casefold() in f"{row} {row.id}".casefold()]
    if not rows:
        raise TargetError(f"--only {only!r} fits no row")
    found = []
    for seed in seeds:
        if output is not None and (output / f"seed-{seed}.json").exists():
            say(f"seed {seed} is in {output} already")
            continue
        with tempfile.TemporaryDirectory(prefix="turnfault-", ignore_cleanup_errors=True) as folder:
            async with provider(wanted.upstream_port) as upstream:
                target = target_of(wanted.placed(Path(folder)), upstream, Path(folder))
                say(f"seed {seed}; the provider is {upstream.url}; what is acknowledged must reach it once, in order")
                await target.up()
                try:
                    results = await run(target, upstream, tell, rows, seed)
                finally:
                    await target.down()
        say("")
        say(report.table(wanted.called, results))
        found.append(results)
        if output is not None:
            about = report.About(wanted.called, seed, wanted.version, wanted.note)
            await asyncio.to_thread(_write, output, about, results)
            say(f"wrote seed-{seed}.json, its trace, and a table, a picture and a badge of it to {output}")
    return found


def target_of(wanted: Options, upstream: Upstream, folder: Path) -> Target:
    """Raises `TargetError`."""
    first = wanted.targets[0]
    config = None if wanted.config is None else Path(wanted.config).expanduser().absolute()
    if first == BARE:
        claude = wanted.claude or Path(shutil.which("claude") or "claude")
        if not shutil.which(claude):
            raise TargetError("there is no `claude` on the PATH: say --claude")
        return Cli(upstream, folder, wanted.model, claude=claude)
    if first.startswith(COMMAND):
        return CommandTarget(upstream, folder, wanted.model, command=first.removeprefix(COMMAND).strip(), config=config)
    if first.startswith(PYTHON):
        place, _, name = first.removeprefix(PYTHON).strip().rpartition(":")
        if not name.isidentifier() or not place:
            raise TargetError(f"--target must name a class: `{PYTHON} FILE.py:Class`, not {first!r}")
        spec = f"{Path(place).absolute()}:{name}" if place.endswith(".py") else f"{place}:{name}"
        return LibraryTarget(spec, upstream, folder, python=wanted.python, model=wanted.model, config=config)
    wires = get_args(WireName)
    if wanted.wire not in wires:
        near = "".join(f"; did you mean `{one}`?" for one in difflib.get_close_matches(wanted.wire, wires, 1))
        raise TargetError(f"--wire must be one of {', '.join(wires)}{near}")
    for url in wanted.targets:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise TargetError(
                f"--target must be `{BARE}`, `{COMMAND}…`, `{PYTHON}FILE.py:Class` or a URL such as "
                f"http://127.0.0.1:8787/v1, not {url!r}"
            )
    if len(wanted.targets) > 2:
        raise TargetError("--target may be given twice: with {agent}, and without for whole histories")
    if wanted.start is None and wanted.upstream_port == 0:
        raise TargetError(
            "without --start, say --upstream-port, and start the target with ANTHROPIC_BASE_URL at that port"
        )
    by_id, *others = sorted(wanted.targets, key=lambda url: "{agent}" not in url)
    return ServerTarget(
        url=by_id,
        wire=wanted.wire,  # type: ignore[arg-type] # looked at above
        upstream=upstream,
        folder=folder,
        history_url=others[0] if others else None,
        agent_header=wanted.agent_header,
        key=wanted.key,
        model=wanted.model,
        start=wanted.start,
        stop=wanted.stop,
        config=config,
    )


def _write(output: Path, about: report.About, results: list[RowResult]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    seed = f"seed-{about.seed}"
    with gzip.GzipFile(output / f"{seed}.trace.jsonl.gz", "wb", mtime=0) as file:
        file.write(report.traces(results).encode("utf-8", "replace"))
    for name, text in (
        ("table.md", report.table(about.target, results)), ("picture.svg", report.picture(about.target, results)),
        ("badge.svg", report.badge(results)),
        # the last one: it says that the run is there
        (f"{seed}.json", report.as_text(about, results)),
    ):  # fmt: skip
        (output / name).write_text(text, encoding="utf-8")


def read(folders: list[Path]) -> list[summary.Run]:
    """Every run in these folders, and in those inside them."""
    files = sorted(file for folder in folders for file in folder.rglob("seed-*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]
