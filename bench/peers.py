"""The continuity benchmark on this proxy, the bare CLI and the peers that a registry has: `make peers`.

    python -m bench.peers --docs docs [--only NAME]

Each is installed in an environment of its own (see the Makefile), runs the same CLI, and is asked by the same rows
(`turnfault`). Writes docs/peers.md.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cli_session_proxy.commands.benching import BenchOptions, bench
from turnfault import report
from turnfault.rows import ROWS
from turnfault.running import RowResult

from .contenders import FLAGS, bundled
from .servers import CCPROXY, CCPROXY_CLAUDE, CCPROXY_TOML, free_port

ROOT = Path(__file__).parent.parent
CLAUDE_MAX = "claude-max-api-proxy 1.0.0"

HEAD = """# The continuity benchmark: peers, as measured

`cli-session-proxy bench-continuity` tells a server three facts, breaks one thing, tells it one more, and reads what its
model is shown: "3/3" = each acknowledged turn once, in order, with its answer, as messages. `flattened` = told, but
squeezed into one text of the user's: the roles are gone, and with them the prompt cache. `foreign` = words of nobody's
conversation here. "no answer" = the client's last request failed. "–" = the target does not offer what the row breaks.

All ran {claude} on one machine over the same scripted provider, each in an environment of its own. Made by
`make peers`.
"""
FAIR = """
## What to keep in mind

- It is our benchmark, and we chose the rows: they break what this proxy was built to survive.
- `claude-max-api-proxy` keeps no conversations (its CLI runs with `--no-session-persistence`): its clients send the
  whole history each time, so all of its rows are asked that way, and rows about files are none of its own.
- `ccproxy-api` has its own way to name a conversation (a session in the path of its `claude_sdk` plugin), which is what
  was asked. Its plain proxy mode passes requests to the provider without a CLI and keeps nothing: there is nothing to
  measure. It is an old release because newer ones of the SDK break it.
- The bare CLI is driven as a script would: `claude -p`, `--resume` of the last id, the same words again after an error.
  Six at once are six programs on one session, which it never promised.
- A text that must arrive as a whole message counts as lost where it is squeezed into another.
- "sent again" rows send the same words after an error. A server that took them the first time cannot know that without
  an idempotency key; this proxy knows it by the request.
- One run each: what depends on timing (killed, cut, six at once) may come out otherwise on another day.

## Repeat it

<!-- not run: takes half an hour and installs the peers -->
```sh
make peers
```

or point the command at anything that takes `ANTHROPIC_BASE_URL`:

<!-- not run: needs a server of yours -->
```sh
cli-session-proxy bench-continuity --target http://127.0.0.1:9000/v1 --agent-header X-Session-Id \\
  --start "my-server --port 9000" --claude-config-dir /tmp/config -o out
cli-session-proxy bench-continuity --target cli                    # the bare CLI
cli-session-proxy bench-continuity --target http://127.0.0.1:9000/v1 --wire messages --upstream-port 9100
```

The target is started with an environment of its own: a made-up key, the scripted provider as `ANTHROPIC_BASE_URL`, and
`CLAUDE_CONFIG_DIR`. Without `--start` it has to run already, with `ANTHROPIC_BASE_URL=http://127.0.0.1:PORT` of
`--upstream-port`; rows about its process are left out then, and without `--claude-config-dir` those about files. With
`-o` the folder gets `continuity.json`, `.md`, `.svg` and `badge.svg`. `--wire` is chat, responses, messages or
generate.
"""


@dataclass(frozen=True)
class Peer:
    name: str
    wanted: BenchOptions


def peers(folder: Path) -> Iterator[Peer]:
    claude = bundled()
    for name in ("proxy", "ccproxy", "claude-max"):
        (folder / name / "bin").mkdir(parents=True)
    own = folder / "proxy"
    port = free_port()
    serve = [sys.executable, "-m", "cli_session_proxy", "serve", "--port", str(port), "--var", str(own / "var"),
             "--claude-config-dir", str(own / "config"), "--claude-bin", str(claude)]  # fmt: skip
    yield Peer(
        "cli-session-proxy",
        BenchOptions(
            (f"http://127.0.0.1:{port}/v1",), agent_header="X-Agent-Id", start=shlex.join(serve), config=own / "config"
        ),
    )
    yield Peer("bare CLI", BenchOptions(("cli",)))
    port, place = free_port(), folder / "ccproxy"
    (place / "ccproxy.toml").write_text(CCPROXY_TOML.format(port=port))
    wrapper = CCPROXY_CLAUDE.format(command=shlex.quote(str(claude)), flags=shlex.join(FLAGS))
    _program(place / "bin" / "claude", wrapper)
    serve = ["env", f"CONFIG_FILE={place / 'ccproxy.toml'}", f"PATH={place / 'bin'}:/usr/local/bin:/usr/bin:/bin",
             "npm_config_offline=true", str(ROOT / ".tools" / "ccproxy" / "bin" / "ccproxy"), "serve", "--config",
             str(place / "ccproxy.toml")]  # fmt: skip
    at = f"http://127.0.0.1:{port}/claude/sdk"
    yield Peer(
        CCPROXY, BenchOptions((f"{at}/{{agent}}/v1", f"{at}/v1"), start=shlex.join(serve), config=place / "config")
    )
    port, place = free_port(), folder / "claude-max"
    _program(place / "bin" / "claude", f'#!/bin/sh\nexec {shlex.quote(str(claude))} "$@"\n')
    server = (
        ROOT / ".tools" / "claude-max" / "node_modules" / "claude-max-api-proxy" / "dist" / "server" / "standalone.js"
    )
    serve = ["env", f"PATH={place / 'bin'}:/usr/local/bin:/usr/bin:/bin", "node", str(server), str(port)]
    yield Peer(
        CLAUDE_MAX, BenchOptions((f"http://127.0.0.1:{port}/v1",), model="claude-sonnet-4", start=shlex.join(serve))
    )


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def page(claude: str, found: Sequence[tuple[str, list[RowResult]]]) -> str:
    """docs/peers.md."""
    lines = [HEAD.format(claude=claude), "| | rows kept | kept but flattened | foreign texts |", "|---|---|---|---|"]
    for name, results in found:
        whole, ran = report.kept(results)
        scores = [result.score for result in results if result.score is not None]
        flat = sum(score.complete and not score.whole for score in scores)
        lines.append(f"| {name} | {whole} of {ran} | {flat} | {sum(score.foreign for score in scores)} |")
    lines += ["", f"| | broken | {' | '.join(name for name, _ in found)} |", f"|---|---|{'---|' * len(found)}"]
    by_row = [{str(result.row): result for result in results} for _, results in found]
    last = ""
    for row in ROWS:
        results_of = [results.get(str(row)) for results in by_row]
        cells = ["–" if one is None or one.score is None else str(one.score) for one in results_of]
        lines.append(f"| {row.group if row.group != last else ''} | {row.name} | {' | '.join(cells)} |")
        last = row.group
    return "\n".join([*lines, FAIR])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, help="where peers.md is written")
    parser.add_argument("--only", help="peers whose name holds this")
    options = parser.parse_args()
    found: list[tuple[str, list[RowResult]]] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        for peer in peers(Path(folder)):
            if options.only is None or options.only in peer.name:
                print(f"\n== {peer.name}", flush=True)
                found.append((peer.name, asyncio.run(bench(peer.wanted, bundled(), partial(print, flush=True)))))
    version = subprocess.run([bundled(), "--version"], capture_output=True, text=True, check=True).stdout.split()[0]
    text = page(f"the CLI {version}", found)
    if options.docs is None:
        print(text)
    else:
        (options.docs / "peers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
