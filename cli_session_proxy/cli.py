"""The commands: parse, call, print. Exit code 0 done, 1 failed, 2 wrong settings or usage."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import ConfigError, ProxyError
from .settings import load

app = typer.Typer(
    name="cli-session-proxy",
    help="A local proxy that gives the Claude CLI a memory you can rely on.",
    epilog="Every option can also be set as CLI_SESSION_PROXY_<NAME> or in cli_session_proxy.toml.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Var = Annotated[Path | None, typer.Option(help="Where chains, sandboxes and logs are kept.", show_default="var")]
ClaudeBin = Annotated[
    Path | None, typer.Option(help="The Claude CLI to run.", show_default="PATH, then the [claude] extra")
]
ConfigDir = Annotated[
    Path | None, typer.Option(help="The CLI's own directory (login, transcripts).", show_default="the user's own")
]
AgentId = Annotated[str, typer.Argument(metavar="AGENT_ID")]
Owner = Annotated[str, typer.Option(help="The name of the key that the agent's client came with.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Loopback only.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.", show_default="8787")] = None,
    var: Var = None,
    claude_bin: ClaudeBin = None,
    claude_config_dir: ConfigDir = None,
    default_model: Annotated[str | None, typer.Option(help="What `default` means.", show_default="sonnet")] = None,
    profile: Annotated[str | None, typer.Option(help="The profile of agents that name none.")] = None,
    turn_timeout: Annotated[float | None, typer.Option(help="Seconds for a whole turn.", show_default="1800")] = None,
    idle_timeout: Annotated[float | None, typer.Option(help="Seconds without a sign.", show_default="300")] = None,
    retention_days: Annotated[float | None, typer.Option(help="Forget agents idle for longer.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.", show_default="info")] = None,
) -> None:
    """Serve OpenAI's Chat Completions on this machine."""
    flags = dict(locals())
    settings = load(**flags)
    from .server import serve as run

    asyncio.run(run(settings, _say))


@app.command()
def chains(var: Var = None, as_json: AsJson = False) -> None:
    """List the agents: turns, sessions, repairs, cost, size."""
    from . import commands

    rows = asyncio.run(commands.chains(load(var=var)))
    if as_json:
        _say(json.dumps(rows, indent=1))
    else:
        commands.print_chains(rows)


@app.command()
def dump(
    agent_id: AgentId,
    format: Annotated[str, typer.Option(help="json or markdown.")] = "json",
    var: Var = None,
    owner: Owner = "local",
) -> None:
    """Print an agent's chain: every turn, session and link."""
    from . import commands

    asyncio.run(commands.dump(load(var=var), owner, agent_id, format, _write))


@app.command()
def delete(
    agent_id: AgentId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    var: Var = None,
    claude_config_dir: ConfigDir = None,
) -> None:
    """Remove an agent for good: chain, transcripts, sandbox and keys."""
    settings = load(var=var, claude_config_dir=claude_config_dir)
    if not yes:
        typer.confirm(f"Remove agent {agent_id!r} with all its turns and files?", abort=True)
    from . import commands

    asyncio.run(commands.delete(settings, agent_id))
    _say(f"deleted {agent_id}")


@app.command()
def demo(claude_bin: ClaudeBin = None) -> None:
    """Show a repair, offline: a scripted model, the real CLI, and a session file that is deleted half-way."""
    from .demo import demo as run

    if not asyncio.run(run(load(claude_bin=claude_bin).claude_bin, _say)):
        raise typer.Exit(1)


def _say(line: str) -> None:
    print(line, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)


def main(args: list[str] | None = None) -> None:
    """The entry point: an error is one line that says what to do."""
    _utf8(sys.stdout)
    try:
        app(args)
    except ProxyError as exc:
        print(f"error: {' '.join(exc.message.split())}", file=sys.stderr)
        sys.exit(2 if isinstance(exc, ConfigError) else 1)
    except BrokenPipeError:
        # The reader of our output has enough (`dump | head`); nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _utf8(stream: Any) -> None:
    # A dump is UTF-8 whatever the locale; half a surrogate pair is shown as "?".
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="replace")
