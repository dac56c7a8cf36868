"""The commands: parse, call, print. Exit code 0 done, 1 failed, 2 wrong settings or usage.

Each command starts fast: it imports what it needs when it runs, and only its own options are built.
"""

import asyncio
import atexit
import copy
import dataclasses
import gc
import getpass
import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from .domain import times
from .errors import ConfigError, ProxyError, printable
from .machine import check_system

if TYPE_CHECKING:
    from .settings import Settings

app = typer.Typer(
    name="cli-session-proxy",
    help="A local proxy that gives the Claude CLI a memory you can rely on.",
    epilog="Every option can also be set as CLI_SESSION_PROXY_<NAME> or in cli_session_proxy.toml.",
    no_args_is_help=True,
    # Rich would take `[keys]` in a help text for markup and drop it.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Options that are settings, by the settings' names.
CONFIG: dict[str, Any] = {
    "config": Annotated[
        Path | None, typer.Option("--config", help="Your file of settings.", show_default="cli_session_proxy.toml here")
    ]
}
STORE = CONFIG | {
    "var": Annotated[Path | None, typer.Option(help="Where chains, sandboxes and logs are kept.", show_default="var")],
    "store": Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Keep chains in PostgreSQL (postgresql://user@host/database) instead of a file in --var. The password "
            "belongs in PGPASSWORD: other users of this machine can see the command line.",
        ),
    ],
}
ClaudeBin = Annotated[
    Path | None, typer.Option(help="The Claude CLI to run.", show_default="PATH, then the [claude] extra")
]
CLAUDE_BIN: dict[str, Any] = {"claude_bin": ClaudeBin}
CLAUDE_FILES: dict[str, Any] = {
    "claude_config_dir": Annotated[
        Path | None, typer.Option(help="The CLI's own directory (login, transcripts).", show_default="the user's own")
    ]
}
ARCHIVE_KEY: dict[str, Any] = {
    "archive_key_file": Annotated[Path | None, typer.Option(help="Your age identities, which encrypt and decrypt it.")]
}
STORE_AND_FILES = STORE | CLAUDE_FILES
STORE_AND_CLI = STORE | CLAUDE_BIN | CLAUDE_FILES
AgentId = Annotated[str, typer.Argument(metavar="AGENT_ID")]
Owner = Annotated[str, typer.Option(help="Whose agent it is: the name of its client's key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _examples(*lines: str) -> str:
    """The last part of a command's help. For Typer, "\\b" begins lines that are not wrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  cli-session-proxy {line}" for line in lines)


def _print_version(given: bool) -> None:
    if given:
        from importlib.metadata import version

        _say(f"cli-session-proxy {version('cli-session-proxy')}")
        raise typer.Exit


def _command(
    *examples: str, name: str | None = None, options: Mapping[str, Any] = STORE
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command. `options`: those of its options that are settings. The command gets them as its argument
    `settings`, resolved; `--help` lists them before `--owner` and `--json`."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(command).parameters)
        del parameters["settings"]
        listed_last = {key: parameters.pop(key) for key in ("owner", "as_json") if key in parameters}
        for key, kind in options.items():
            parameters[key] = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)

        @wraps(command)
        def run(**given: Any) -> None:
            from .settings import load

            settings = load(**{key: given.pop(key) for key in options})
            times.show_in(settings.timezone)
            if settings.is_audited:
                from .http.audit import audit_of, of_command

                if (audit := audit_of(settings)) is not None:
                    of_command(audit, name or command.__name__, given, getpass.getuser)
                    audit.close()
            command(settings, **given)

        every = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (parameters | listed_last).values()]
        vars(run)["__signature__"] = inspect.Signature(every)
        run.__annotations__ = {one.name: one.annotation for one in every}
        return app.command(name, epilog=_examples(*examples))(run)

    return declare


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; the commands follow."""


@_command(
    "serve",
    "serve --port 9000 --make-key",
    options={
        "host": Annotated[
            str | None, typer.Option(help="Where to listen; beyond loopback it needs keys.", show_default="127.0.0.1")
        ],
        "port": Annotated[int | None, typer.Option(help="0: any free port.", show_default="8787")],
        "uds": Annotated[
            Path | None, typer.Option(help="A unix socket (0600) instead of host and port: for this user only.")
        ],
        "make_key": Annotated[
            bool | None, typer.Option("--make-key", help="Require a key, made at the first start: <var>/key (0600).")
        ],
        "allowed_origins": Annotated[
            list[str] | None,
            typer.Option("--allowed-origin", help="Origin of a page that may send requests: scheme://host[:port]."),
        ],
        "advertise": Annotated[
            str | None,
            typer.Option(
                metavar="URL",
                help="The address at which proxies on other hosts reach this one: http://10.0.0.2:8787.",
            ),
        ],
        "cluster_key_file": Annotated[
            Path | None, typer.Option(help="A file with the secret that the proxies of one cluster share.")
        ],
        "registry": Annotated[
            str | None,
            typer.Option(
                metavar="URL", help="The Redis that tells which host has an agent.", show_default="the store tells"
            ),
        ],
        **STORE_AND_CLI,
        "default_model": Annotated[
            str | None, typer.Option(help="The model that `default` means.", show_default="the CLI's own")
        ],
        "profile": Annotated[str | None, typer.Option(help="The one of [profiles] that all turns use.")],
        "turn_timeout": Annotated[float | None, typer.Option(help="Seconds for a whole turn.", show_default="1800")],
        "idle_timeout": Annotated[float | None, typer.Option(help="Seconds without CLI output.", show_default="300")],
        "retention_days": Annotated[float | None, typer.Option(help="Delete agents that were idle for so many days.")],
        "forget_unnamed": Annotated[
            str | None, typer.Option(help="Hours after which one-shots are deleted, or never.", show_default="720")
        ],
        "log_level": Annotated[str | None, typer.Option(help="debug, info, warning, error.", show_default="info")],
    },
)
def serve(settings: "Settings") -> None:
    """Start the proxy. It serves OpenAI's, Anthropic's, Google's and Ollama's APIs, and the page at /ui."""
    import uvloop

    from .http.bounds import raise_open_files
    from .machine import return_freed_memory

    raise_open_files()  # before the imports below, which read the limit
    return_freed_memory()
    from .backends.auto import CLAUDE
    from .commands.terminal import migration_progress
    from .http.server import serve as run
    from .http.watchdog import Watchdog

    if settings.backend == CLAUDE:
        from .commands.prerequisites import login_of, refuse_others, report

        asyncio.run(refuse_others(settings))
    watchdog = Watchdog()
    watchdog.start()  # never stopped: the interpreter's exit waits for threads, which may hang as well
    if settings.backend != CLAUDE:
        uvloop.run(run(settings, _say_at_once, watchdog, migration_progress))
        return
    from .selfcheck.service import beside

    uvloop.run(run(settings, _say_at_once, watchdog, migration_progress, report, beside, partial(login_of, settings)))


@_command("status", "status --json", options=STORE_AND_CLI)
def status(settings: "Settings", owner: Owner = "local", as_json: AsJson = False) -> None:
    """Tell whether the proxy works, and what it costs. Exit code 1 if it does not work."""
    from .commands import status as commands
    from .commands.terminal import fitted
    from .export.status import lines

    seen, served = asyncio.run(commands.look(settings, owner))
    place = None if served is None else str(served)
    _say(
        json.dumps({**seen.as_json(), "server": place}, indent=1)
        if as_json
        else "\n".join(fitted(line, 12) for line in lines(seen, place))
    )
    if seen.problem is not None:
        raise typer.Exit(1)


@_command("chains", "chains --since 24h --status failed", "chains --by day", "chains --watch --limit 20")
def chains(
    settings: "Settings",
    search: Annotated[str | None, typer.Option(help="Only names that contain this text; case is ignored.")] = None,
    since: Annotated[str | None, typer.Option(help="Only agents active since: 30m, 12h, 7d, or a date.")] = None,
    status: Annotated[str | None, typer.Option(help="Only agents whose last turn is completed, failed, …")] = None,
    side: Annotated[bool, typer.Option("--side", help="Also agents with side calls only: titles, pings, …")] = False,
    one_shots: Annotated[
        bool, typer.Option("--one-shots", help="Also unnamed agents of one turn that nobody continued.")
    ] = False,
    by: Annotated[
        str | None, typer.Option(metavar="day|model|key", help="Show the cost of the last 14 days by one of these.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many: those last active.")] = 1000,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update the list every two seconds, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the agents. With turns, repairs, cost, size, and the totals."""
    from .commands import listing

    only = listing.ChainFilter.parse(search, since, status, side=side, one_shots=one_shots)
    if by is not None:
        if by not in get_args(listing.By):
            raise ConfigError(f"--by must be one of {', '.join(get_args(listing.By))}")
        sums = asyncio.run(listing.spent(settings, cast(listing.By, by)))
        _say(json.dumps(sums, indent=1)) if as_json else listing.print_spent(sums, cast(listing.By, by))
        return
    if watch:
        import click

        while True:
            listed = asyncio.run(listing.chains(settings, only))
            click.clear()
            listing.print_chains(listed, limit)
            time.sleep(2.0)
    listed = asyncio.run(listing.chains(settings, only))
    if as_json:
        _say(json.dumps(listed.rows[:limit], indent=1))
    else:
        listing.print_chains(listed, limit)


@_command("show ada", "show turn_0a1b", "show 5e551011 --json", options=STORE_AND_CLI)
def show(
    settings: "Settings",
    name: Annotated[str, typer.Argument(metavar="AGENT|SESSION|TURN", help="Its name or id, or a part of it.")],
    owner: Annotated[str | None, typer.Option(help="Only agents of this owner.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one agent, session or turn. Last words, repairs, failures, cost, and the command to continue by hand."""
    from .commands import finding

    details = asyncio.run(finding.show(settings, owner, name))
    if as_json:
        _say(json.dumps(details, indent=1))
    else:
        finding.print_shown(details)


@_command("find teal", 'find "in Lisbon" --since 7d', "find --repaired --json")
def find(
    settings: "Settings",
    words: Annotated[list[str] | None, typer.Argument(help="Words of a turn, or a part of a name or an id.")] = None,
    since: Annotated[str | None, typer.Option(help="Only turns since: 30m, 12h, 7d, or a date.")] = None,
    until: Annotated[str | None, typer.Option(help="Only turns before: the same forms.")] = None,
    model: Annotated[str | None, typer.Option(help="Only turns of this model.")] = None,
    status: Annotated[str | None, typer.Option(help="Only turns with this status: completed, failed, …")] = None,
    repaired: Annotated[bool, typer.Option("--repaired", help="Only turns whose session was repaired.")] = False,
    min_cost: Annotated[float | None, typer.Option(min=0, help="Only turns that cost so many dollars or more.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many results are shown.")] = 20,
    owner: Annotated[str | None, typer.Option(help="Only agents of this owner.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search all that was said and done. Also agents, sessions and turns by a part of their id."""
    from .commands import finding

    more = {"model": model, "repaired": repaired, "min_cost": min_cost, "limit": limit}
    query = finding.parse(words or (), owner, since, until, status, **more)
    found, indexed, extras = asyncio.run(finding.find(settings, query))
    if as_json:
        from .export.lists import found_json as rendered

        _say(json.dumps(rendered(query, found, indexed), indent=1))
    else:
        finding.print_found(query, found, extras)


@_command("dump ada", "dump ada --last 3", "dump ada --format json > ada.json", "dump ada --follow")
def dump(
    settings: "Settings",
    agent_id: AgentId,
    format: Annotated[
        str | None,
        typer.Option(help="json, markdown, mermaid or html.", show_default="markdown in a terminal, json elsewhere"),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, max=1000, help="Only so many of the newest turns.")] = None,
    turn: Annotated[str | None, typer.Option(help="Only the turn of this id.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what happens from now on, until Ctrl-C.")
    ] = False,
    redact: Annotated[bool, typer.Option(help="Hide keys and tokens in messages, too.")] = True,
    owner: Owner = "local",
) -> None:
    """Print an agent's conversation. With every turn, session and link."""
    from .commands import dumping

    in_terminal = sys.stdout.isatty()
    chosen = dumping.Shown(format or ("markdown" if in_terminal else "json"), not redact, last, turn)
    if follow:
        from .commands import following

        asyncio.run(following.follow(settings, owner, agent_id, chosen, _write))
    elif in_terminal and chosen.format == "markdown":
        from .commands import rendering

        rendering.dump_by_the_page(settings, owner, agent_id, chosen)
    else:
        asyncio.run(dumping.dump(settings, owner, agent_id, chosen, _write))


@_command("delete ada", "delete ada --yes", options=STORE_AND_FILES)
def delete(
    settings: "Settings",
    agent_id: AgentId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    owner: Owner = "local",
) -> None:
    """Remove an agent for good. With its chain, transcripts, sandbox and keys."""
    if not yes:
        typer.confirm(f"Remove agent {agent_id!r} with all its turns and files?", abort=True)
    from .commands import changing

    asyncio.run(changing.delete(settings, agent_id, owner))
    _say(f"deleted {agent_id}")


@_command("rewind ada --to -1", "rewind ada --to turn_0a1b2c", options=STORE_AND_FILES)
def rewind(
    settings: "Settings",
    agent_id: AgentId,
    to: Annotated[str, typer.Option("--to", metavar="TURN|-N", help="A turn of the path, or how many turns back.")],
    owner: Owner = "local",
    as_json: AsJson = False,
) -> None:
    """Take an agent's last turns back. They stay in the chain; the next turn branches before them."""
    from .commands import changing

    done = asyncio.run(changing.rewind(settings, owner, agent_id, to))
    if as_json:
        _say(json.dumps(done, indent=1))
        return
    from .export.words import count

    where = f"continues {done['head']}" if done["head"] else "begins a new conversation"
    _say(f"took back {count(done['turns'], 'turn')}: the next one {where}")


@_command("audit --since 7d", "audit --type delete --json", options=CONFIG | {"var": STORE["var"]})
def audit(
    settings: "Settings",
    type: Annotated[str | None, typer.Option(help="Only this type: read, export, delete, rewind, keys, …")] = None,
    since: Annotated[str | None, typer.Option(help="Only lines since: 30m, 12h, 7d, or a date (UTC).")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Only so many of the newest lines.")] = 100,
    owner: Annotated[str | None, typer.Option(help="Only lines of this owner.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell who read, deleted or changed what. It needs keys, or the setting `audit`."""
    from .commands import auditing

    lines = auditing.newest_lines(settings, type, since, owner, limit)
    if as_json:
        _say("\n".join(json.dumps(line.as_json(), separators=(",", ":")) for line in lines))
    else:
        _say("\n".join(auditing.as_text(lines)))


@_command("verify", "verify ada --json", options=STORE_AND_FILES)
def verify(
    settings: "Settings",
    agent_id: Annotated[str | None, typer.Argument(metavar="[AGENT_ID]")] = None,
    owner: Annotated[str | None, typer.Option(help="Only agents of this owner.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare chains with the CLI's files. Exit code 1 if one differs."""
    from .commands import verifying

    found = asyncio.run(verifying.verify(settings, owner, agent_id))
    if as_json:
        _say(json.dumps([one.as_json() for one in found], indent=1))
    else:
        _say("\n".join(verifying.report_lines(found)))
    if any(one.differences for one in found):
        raise typer.Exit(1)


@_command("adopt 5e551011-0000-4000-8000-000000000001 --agent-id ada", options=STORE_AND_FILES)
def adopt(
    settings: "Settings",
    session: Annotated[str, typer.Argument(metavar="SESSION_ID|FILE")],
    agent_id: Annotated[str | None, typer.Option(help="The new agent's name.", show_default="the session's id")] = None,
    owner: Owner = "local",
    as_json: AsJson = False,
) -> None:
    """Adopt an existing Claude session. Its whole history becomes a new agent's chain."""
    from .commands import moving

    done = asyncio.run(moving.adopt(settings, owner, session, agent_id))
    _say(_json_of(done) if as_json else "\n".join(moving.print_adopted(done)))


@_command("export ada --output ada.jsonl")
def export(
    settings: "Settings",
    agent_id: AgentId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new file (0600).", show_default="<dir>.export.jsonl")
    ] = None,
    owner: Owner = "local",
    as_json: AsJson = False,
) -> None:
    """Write an agent into one file. It holds the conversation with all its records, in clear text."""
    from .commands import moving

    done = asyncio.run(moving.export(settings, owner, agent_id, output))
    _say(_json_of(done) if as_json else f"wrote {_size_of(done)} to {done.path}")


@_command(
    "archive ada --to /mnt/archive",
    "archive --older-than 90d --to s3://bucket/chains --dry-run",
    options=STORE_AND_CLI
    | ARCHIVE_KEY
    | {
        "archive_to": Annotated[
            str | None,
            typer.Option("--to", metavar="DIR|URL", help="A folder, or s3://bucket/prefix.", show_default="archive_to"),
        ]
    },
)
def archive(
    settings: "Settings",
    agent_ids: Annotated[list[str] | None, typer.Argument(metavar="[AGENT_ID]…")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Agents that were last active before: 90d, 12h, or a date (UTC).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the agents that would be archived.")] = False,
    owner: Annotated[
        str | None, typer.Option(help="Only agents of this owner.", show_default="local; all with --older-than")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Archive agents, encrypted, and delete them here. Each is read back and compared first."""
    from .commands import moving

    place, names, outcomes = str(settings.archive_to), agent_ids or [], []

    async def run() -> None:
        async for done in moving.archive(settings, owner, names, older_than, dry_run=dry_run):
            outcomes.append(done)
            if not as_json:
                _say(moving.line_of(done, place, dry_run=dry_run))

    asyncio.run(run())
    if as_json:
        _say(json.dumps([one.as_json() for one in outcomes], indent=1))
    elif not outcomes:
        _say("no agent was idle for that long")
    if names and any(one.stays is not None for one in outcomes):
        raise typer.Exit(1)


@_command(
    "import ada.jsonl --agent-id ada-again",
    "import s3://bucket/chains/ada.0a1b.jsonl.age",
    name="import",
    options=STORE_AND_FILES | ARCHIVE_KEY,
)
def import_(
    settings: "Settings",
    file: Annotated[str, typer.Argument(metavar="FILE|URL")],
    agent_id: Annotated[str | None, typer.Option(help="Another name for it.", show_default="as exported")] = None,
    owner: Owner = "local",
    as_json: AsJson = False,
) -> None:
    """Import what `export` or `archive` wrote. Here or on another machine."""
    from .commands import moving

    done = asyncio.run(moving.import_(settings, owner, file, agent_id))
    _say(_json_of(done) if as_json else f"imported agent {done.agent_id}: {_size_of(done)}")


@_command("migrate --to postgresql://proxy@db/chains", "migrate --store URL --to var")
def migrate(
    settings: "Settings",
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="URL|VAR", help="postgresql://… (its password in PGPASSWORD), or a --var without a store."
        ),
    ],
    give_up: Annotated[bool, typer.Option("--give-up", help="Give up an unfinished move.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move the store into another database. Proxies may run meanwhile. Run an interrupted move again."""
    from .commands import moving

    if give_up:
        asyncio.run(moving.give_up(settings, to))
        _say("the move was given up; its copy is useless and may be removed")
        return
    done = asyncio.run(moving.migrate(settings, to))
    from .export.words import count

    rows, turns, agents = (sum(done.rows.values()), done.rows["turns"], done.rows["agents"])
    moved = f"moved {count(rows, 'row')} ({count(turns, 'turn')} of {count(agents, 'agent')})"
    _say(_json_of(done) if as_json else f"{moved} to {done.place}, each compared: start the proxies with that store")


@_command(
    "doctor",
    "doctor --json",
    "doctor --check-cli",
    options={
        "host": Annotated[str | None, typer.Option(help="The host of `serve`.", show_default="127.0.0.1")],
        "port": Annotated[int | None, typer.Option(help="The port of `serve`.", show_default="8787")],
        **STORE_AND_CLI,
    },
)
def doctor(
    settings: "Settings",
    check_cli: Annotated[
        bool, typer.Option("--check-cli", help="Run the CLI offline, and list what works (5 to 60 s).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong, and say how to fix it. Exit code 1 on an error."""
    from .commands.doctor import doctor as run

    if not asyncio.run(run(settings, _say, check_cli=check_cli, as_json=as_json)):
        raise typer.Exit(1)


@_command("login", "login -- --console", options=CLAUDE_BIN | CLAUDE_FILES)
def login(
    settings: "Settings",
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="For the CLI's own login, such as -- --console or -- --sso."),
    ] = None,
) -> None:
    """Log the Claude CLI in, by its own login, for `serve`. This program sees no credential."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "the CLI's login asks questions, and this is no terminal: run it in one, or set ANTHROPIC_API_KEY or "
            "CLAUDE_CODE_OAUTH_TOKEN (what `claude setup-token` prints) where `serve` is started"
        )
    from .commands.prerequisites import login as run

    if not asyncio.run(run(settings, options or (), _say)):
        raise typer.Exit(1)


@_command(
    "commit ada --outcome passed", 'commit ada --outcome failed --why "it locks twice" -- --all', options=STORE_AND_CLI
)
def commit(
    settings: "Settings",
    agent_id: AgentId,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="For git commit, such as -- --all --signoff.")
    ] = None,
    fix_id: Annotated[
        str | None, typer.Option(help="The id of the fix that was tried.", show_default="profile's")
    ] = None,
    outcome: Annotated[str | None, typer.Option(help="passed or failed.")] = None,
    why: Annotated[str | None, typer.Option(help="Why it failed.", show_default="as the model says")] = None,
    note: Annotated[str | None, typer.Option(metavar="COMMIT", help="Write a git note on this commit instead.")] = None,
    repo: Annotated[Path | None, typer.Option(help="The repository.", show_default="profile's")] = None,
    model: Annotated[
        bool, typer.Option("--model/--no-model", help="Have the agent summarise it, off its chain.")
    ] = True,
    owner: Owner = "local",
    as_json: AsJson = False,
) -> None:
    """Commit, with what the agent tried. The next attempt is shown that (see docs/git-memory.md)."""
    from .commands import changing

    given = {"fix_id": fix_id, "outcome": outcome, "why": why, "note": note, "model": model}
    place = None if repo is None else repo.expanduser().absolute()
    done = asyncio.run(changing.commit(settings, owner, agent_id, given, place, tuple(options or ())))
    what = "noted on" if done["note"] else "committed as"
    line = f"attempt {done['attempt']} at {done['fix_id']} {what} {done['commit']}"
    _say(json.dumps(done, indent=1) if as_json else line)


@_command(
    "memory",
    "memory --repo ../service --fix-id login-race",
    options=CONFIG | {"profile": Annotated[str | None, typer.Option(help="The profile whose git_memory is used.")]},
)
def memory(
    settings: "Settings",
    repo: Annotated[Path | None, typer.Option(help="The repository.", show_default="profile's, else here")] = None,
    fix_id: Annotated[
        str | None, typer.Option(help="The id of a fix.", show_default="profile's; none: all are listed")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what is known of earlier attempts. As an agent is shown it."""
    from .commands import changing

    place = None if repo is None else repo.expanduser().absolute()
    found = asyncio.run(changing.memory(settings, place, fix_id))
    _say(json.dumps(found, indent=1) if as_json else changing.print_memory(found))


@app.command(
    "bench-continuity",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=_examples(
        "bench-continuity --target http://127.0.0.1:8787/agents/{agent}/v1 --upstream-port 9100",
        "bench-continuity --target cli",
    ),
)
def bench_continuity(context: typer.Context, claude_bin: ClaudeBin = None) -> None:
    """Measure what a server forgets. Takes the options of `turnfault run` (see docs/peers.md)."""
    from .commands.demo import bench_continuity as run
    from .settings import load

    run(load(claude_bin=claude_bin), context.args)


@_command(
    "chat",
    "chat --agent-id ada --model opus",
    options=STORE_AND_CLI | {"profile": Annotated[str | None, typer.Option(help="The profile: what the CLI may do.")]},
)
def chat(
    settings: "Settings",
    agent_id: Annotated[str, typer.Option(help="The agent to talk to.")] = "chat",
    model: Annotated[str | None, typer.Option(help="sonnet, opus, haiku, …", show_default="default_model")] = None,
    owner: Owner = "local",
) -> None:
    """Talk to an agent in the terminal. The next run continues. Ctrl-C cancels a turn, Ctrl-D leaves."""
    from .commands import chatting

    asyncio.run(chatting.chat(settings, owner, agent_id, model, _write))


@_command("demo", options=CONFIG | CLAUDE_BIN)
def demo(settings: "Settings") -> None:
    """Show a repair, offline. A scripted model, the real CLI, and a session file that is deleted half-way."""
    from .commands.demo import demo as run

    if not asyncio.run(run(settings.claude_bin, _say)):
        raise typer.Exit(1)


def _size_of(done: Any) -> str:
    from .export.words import count

    return f"{count(done.turns, 'turn')} ({count(done.records, 'record')})"


def _json_of(done: Any) -> str:
    return json.dumps(dataclasses.asdict(done), default=str, indent=1)


def _say(line: str) -> None:
    print(line, flush=True)


def _say_at_once(line: str) -> None:
    """Write past Python's buffers: a write that blocks on a full pipe must not hold their lock at exit."""
    from .commands.terminal import fitted

    whole = line if line.startswith("try: ") else fitted(line, 2)  # a command to copy stays on one line
    data = f"{whole}\n".encode("utf-8", "replace")
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(args: list[str] | None = None) -> None:
    """The entry point. Each error and each wrong setting is one line that says what to do."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # the search takes 20 ms, and there are none
    # Imported objects live until the end: collecting them took a sixth of a command's time, and a quarter at exit.
    gc.set_threshold(20_000, 50, 100)
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A dump is UTF-8 whatever the locale; half a surrogate pair is shown as "?".
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        check_system()
        # Only register the named command, if it exists: Typer builds all registered ones, which takes 0.1 s.
        named = (sys.argv[1:] if args is None else args)[:1]
        every, alone = app.registered_commands, copy.copy(app)
        alone.registered_commands = [
            one for one in every if [one.name or getattr(one.callback, "__name__", "")] == named
        ] or every
        alone(args)
    except ProxyError as exc:
        from .settings import WrongSettings

        for message in (isinstance(exc, WrongSettings) and exc.mistakes) or [exc.message]:
            print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
        sys.exit(2 if isinstance(exc, ConfigError) else 1)
    except BrokenPipeError:
        # The reader has closed the pipe (`dump | head`): nothing may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
