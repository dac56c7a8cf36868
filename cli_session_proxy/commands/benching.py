"""`bench-continuity`: the rows of `continuity` on any target, printed and written."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from turnfault import report
from turnfault.errors import TargetError
from turnfault.provider.upstream import Upstream
from turnfault.rows import ROWS
from turnfault.running import RowResult, provider, run
from turnfault.targets import Cli, ServerTarget, Target, WireName

from ..backends.claude.process import capability
from ..errors import ConfigError, did_you_mean
from ..settings import Settings

Say = Callable[[str], None]
BARE = "cli"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of the command."""

    targets: tuple[str, ...]
    wire: str = "chat"
    agent_header: str | None = None
    model: str = "sonnet"
    start: str | None = None
    stop: str | None = None
    config: Path | None = None
    upstream_port: int = 0
    key: str | None = None
    only: str | None = None
    output: Path | None = None
    name: str | None = None


async def bench(wanted: BenchOptions, claude_bin: Path | None, say: Say) -> list[RowResult]:
    """Run the rows, print the table, write the files. Raises `ConfigError`."""

    def tell(result: RowResult) -> None:
        said = f"– ({result.why})" if result.score is None else str(result.score)
        say(f"{result.row!s:60} {said}")

    rows = [row for row in ROWS if wanted.only is None or wanted.only.casefold() in str(row).casefold()]
    if not rows:
        raise ConfigError(f"--only {wanted.only!r} fits no row")
    with tempfile.TemporaryDirectory(prefix="continuity-") as folder:
        async with provider(wanted.upstream_port) as upstream:
            target = await asyncio.to_thread(_target, wanted, claude_bin, upstream, Path(folder))
            say(f"the provider is {upstream.url}; what is acknowledged must reach it once, in order")
            try:
                await target.up()
            except TargetError as exc:
                raise ConfigError(str(exc)) from exc
            try:
                results = await run(target, upstream, tell, rows)
            finally:
                await target.down()
    name = wanted.name or wanted.targets[0]
    say("")
    say(report.table(name, results))
    if wanted.output is not None:
        await asyncio.to_thread(_write, wanted.output, name, results)
        say(f"wrote continuity.json, .md, .svg and badge.svg to {wanted.output}")
    return results


def _target(wanted: BenchOptions, claude_bin: Path | None, upstream: Upstream, folder: Path) -> Target:
    if BARE in wanted.targets:
        claude = capability.find(Settings(claude_bin=claude_bin))
        return Cli(claude, upstream, folder, wanted.model)
    wires = get_args(WireName)
    if wanted.wire not in wires:
        raise ConfigError(f"--wire must be one of {', '.join(wires)}{did_you_mean(wanted.wire, wires)}")
    for url in wanted.targets:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"--target must be `{BARE}` or a URL such as http://127.0.0.1:8787/v1, not {url!r}")
    if len(wanted.targets) > 2:
        raise ConfigError("--target may be given twice: with {agent}, and without for whole histories")
    if wanted.start is None and wanted.upstream_port == 0:
        raise ConfigError(
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
        config=None if wanted.config is None else wanted.config.expanduser().absolute(),
    )


def _write(output: Path, name: str, results: list[RowResult]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    data = json.dumps(report.as_json(name, results), indent=1, ensure_ascii=False)
    for file, text in (
        ("continuity.json", f"{data}\n"), ("continuity.md", report.table(name, results)),
        ("continuity.svg", report.picture(name, results)), ("badge.svg", report.badge(results)),
    ):  # fmt: skip
        (output / file).write_text(text, encoding="utf-8")
