"""Checks what could keep the proxy from working: one line each, with the command that fixes it. Changes nothing.

A check never raises: an error in it is its result. No credential is read or shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx

from ..backends.claude.process import capability, confine, environment, logged_in
from ..backends.claude.process.capability import Capability
from ..backends.claude.process.guardian import start_time
from ..backends.claude.process.memory import FIRST_WEIGHT
from ..backends.claude.process.observed import ESSENTIAL, EXPECTED, SAYS
from ..domain import times
from ..engine.ownership import Instances, differences
from ..errors import ClaudeUnavailable, ProxyError, printable
from ..export import explain
from ..export.words import count
from ..http.binding import answers, is_served
from ..http.served import OVER_SOCKET, Served, served_at
from ..machine import command_to
from ..sandbox import Sandboxes
from ..selfcheck.keeping import KeptBinaries
from ..selfcheck.running import Report, check
from ..selfcheck.service import NOT_RUN, RUN, by_subject, findings_of
from ..settings import Settings
from ..stores.base import Facts, Finding
from ..stores.sql.migrations import newest
from ..stores.sql.tables import COMING_IN, MOVED_TO
from ..stores.sqlite.store import FILE
from . import prerequisites
from .asking import client_of
from .stored import opened
from .terminal import fitted

if TYPE_CHECKING:
    from ..stores.postgresql.store import DatabaseLook

Level = Literal["ok", "warning", "error"]
Say = Callable[[str], None]

MB = 1024 * 1024
# Free disk space: below the first number turns will soon fail, below the second this is a warning.
DISK_ERROR = 100 * MB
DISK_WARNING = 1024 * MB
# Seconds that the clocks of machines with a shared disk may differ.
CLOCK_SLACK = 60.0
# Seconds for which the machine's two clocks are compared: a jump would show.
CLOCK_WATCH = 0.05
# The first release's date. An earlier time means that the clock is not set.
CLOCK_FLOOR = 1_767_225_600.0
LOCAL_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class Checkup:
    """The result of a check. `mend`: how to fix it, a command if there is one; empty if nothing is wrong."""

    check: str
    level: Level
    says: str
    mend: str = ""


async def doctor(settings: Settings, say: Say, *, check_cli: bool, as_json: bool) -> bool:
    """Print each result as soon as its check is done, or all as JSON. False if one is an error."""
    found: list[Checkup] = []
    async for one in examine(settings, check_cli=check_cli):
        found.append(one)
        if not as_json:
            say(fitted(f"{one.level:8}{one.check:20}{printable(one.says)}", 28))
            if one.mend:
                say(fitted(f"{'':28}fix: {printable(one.mend)}", 33))
    if as_json:
        say(json.dumps([asdict(one) for one in found], indent=1))
    return all(one.level != "error" for one in found)


async def examine(settings: Settings, *, check_cli: bool = False) -> AsyncIterator[Checkup]:
    """All checks, those of the CLI first: nothing works without it. `check_cli`: run its self-check."""
    with tempfile.TemporaryDirectory(prefix="cli-session-proxy-") as tmpdir:
        config_dir = environment.config_dir(settings)
        env = environment.build(settings, tmpdir=Path(tmpdir), config_dir=config_dir)
        cli = None
        try:
            cli = await capability.probe(capability.find(settings), env)
        except ClaudeUnavailable as exc:
            says, _, mend = exc.message.partition(": ")
            yield Checkup("claude", "error", says, mend or capability.INSTALL)
        if cli is not None:
            yield Checkup("claude", "ok", f"{cli.version} at {cli.path}")
            yield _abilities(cli)
            if check_cli:
                for one in await _checked(cli, settings):
                    yield one
            login = await logged_in.find_login(settings, cli.path, env)
            says, _, fix = (login.advice or "").partition(": ")
            if not says:
                yield Checkup("login", "ok", explain.login(login.kind) or "logged in")
            else:
                yield Checkup("login", "error" if says == "no Claude login" else "warning", says, fix)
    yield await _checkup("config dir", lambda: _writable("config dir", config_dir, "--claude-config-dir"))
    yield await _checkup("var", lambda: _writable("var", settings.var, "--var"))
    yield await _checkup("sandbox", lambda: _sandbox(settings))
    yield await _checkup("place", lambda: _unsafe_place(settings))
    for says, mend in prerequisites.tools_off(settings):
        yield Checkup("tools", "warning", says, mend)
    async for one in _confinement(settings, cli):
        yield one
    yield await _checkup("disk", lambda: _disk(settings.var))
    yield _memory(settings)
    if settings.store is None:
        health, last_at, known = await asyncio.to_thread(_sqlite, settings.var / FILE)
        yield health
    else:
        health, database = await asyncio.to_thread(_postgresql, settings.store.get_secret_value())
        yield health
        last_at, known = (None, []) if database is None else (database.last_at, database.findings)
        for one in _hosts([] if database is None else database.hosts):
            yield one
    if cli is not None and not check_cli:
        checked = cli
        yield await _checkup("self-check", lambda: _was_checked(checked, settings, known))
    yield await _clock(last_at)
    yield await _strays(settings.var)
    yield await _port(settings)


async def _confinement(settings: Settings, cli: Capability | None) -> AsyncIterator[Checkup]:
    """Start the CLI of each confined profile in its sandbox, as for its agents."""
    for name, profile in sorted(settings.profiles.items()):
        if not profile.confined:
            continue
        with tempfile.TemporaryDirectory(prefix="cli-session-proxy-") as folder:
            cwd, tmpdir, project, private = (Path(folder, part) for part in ("agent", "tmp", "project", "private"))
            cwd.mkdir()
            tmpdir.mkdir()
            place = confine.ConfinedPlace(cwd, tmpdir, environment.config_dir(settings), project, private)
            env = environment.build(settings, tmpdir=tmpdir, config_dir=place.config_dir)
            why = await confine.why_unavailable()
            if why is None and cli is not None:
                seen = confine.as_read_by(cli, settings)
                why = await confine.why_cli_fails(seen, profile, cli.path, place, env)
        says, _, fix = (why or "").partition(": ")
        works = "bubblewrap works" if cli is None else f"profile {name}: the CLI runs confined"
        yield Checkup("boundary", "error" if says else "ok", says or works, fix)


# --- the CLI


def _abilities(cli: Capability) -> Checkup:
    available = {
        "keep a session's id": cli.keeps_session_id,
        "serve many turns in one process": cli.warm,
        "offer the client's own tools to the model": cli.takes_tools,
        "be started in advance for a new agent": cli.takes_claim,
        "take another system prompt while it runs": cli.takes_system_prompt,
        "take every prompt as plain text": cli.client_composed,
        "turn its own tools off as a whole": cli.chooses_tools,
    }
    missing = [what for what, can in available.items() if not can]
    if not missing:
        return Checkup("capabilities", "ok", "all that the proxy uses")
    able = ".".join(map(str, max(EXPECTED.values())))
    says = f"Claude CLI {cli.version} works, but cannot {', '.join(missing)}; version {able} and newer can"
    return Checkup("capabilities", "warning", says, capability.UPGRADE)


def _was_checked(cli: Capability, settings: Settings, findings: Sequence[Finding]) -> Checkup:
    """What the stored self-check of this binary found. Its hash is read from a cache, by the file's identity."""
    identity = capability.identity_of(cli.path)
    sha256 = KeptBinaries(settings.var / "cli").identities().get(identity)
    observed = None if sha256 is None else by_subject(findings).get((sha256, cli.version))
    subject = f"{sha256} {cli.version}"
    not_run = next((one.found.get("why") for one in findings if (one.subject, one.name) == (subject, NOT_RUN)), None)
    in_use = {
        one.name: one.found.get("detail") for one in findings if one.subject == subject and one.found.get("in_use")
    }
    if observed is None and in_use:
        failed = "; ".join(f"{name}: {detail}" for name, detail in in_use.items())
        says = f"{cli.version} at {cli.path} failed in use ({failed}), and no check of it has ended"
        level: Level = "error" if in_use.keys() & set(ESSENTIAL) else "warning"
        return Checkup("self-check", level, says, "doctor --check-cli does it now")
    if observed is None and not_run is not None:
        return Checkup("self-check", "warning", f"it could not be run: {not_run}", "doctor --check-cli does it now")
    if observed is None:
        how = "`serve` does it once, beside turns" if settings.self_check else "self_check is off"
        return Checkup("self-check", "ok", f"{cli.version} was not checked yet ({how}); doctor --check-cli does it now")
    (run,) = (one.found for one in findings if (one.subject, one.name) == (subject, RUN))
    report = Report(cli.path, cli.version, str(run["day"]), float(run["seconds"]), observed)
    return list(_checkups_of(report))[-1]


async def _checked(cli: Capability, settings: Settings) -> list[Checkup]:
    """Run the self-check now. The result is stored if there is a store, for the next proxy."""
    report = await check(cli.path, settings)
    if report.why is None:
        with suppress(OSError, ProxyError):  # the store's own check reports it
            sha256 = await asyncio.to_thread(
                KeptBinaries(settings.var / "cli").sha256, capability.identity_of(cli.path)
            )
            async with opened(settings, may_be_new=True) as store:
                if store is not None and sha256 is not None:
                    await store.keep_findings(f"{sha256} {report.version}", findings_of(report))
    return list(_checkups_of(report))


DOES_WITHOUT = "the proxy does without these; another version may do better (--claude-bin)"


def _checkups_of(report: Report) -> Iterator[Checkup]:
    """A checkup for each observation of a self-check; the last one is about all of it."""
    if report.why is not None:
        yield Checkup("self-check", "warning", f"it could not be run: {report.why}", "run it again on a quiet machine")
        return
    surprises = report.surprises()
    for one in report.observed.values():
        says = SAYS[one.name] if one.outcome == "ok" else f"{one.outcome}: {SAYS[one.name]}"
        if one.outcome == "failed" and one not in surprises:
            says = f"{says}; not expected of {report.version}"
        elif one.detail:
            says = f"{says}; {one.detail}"
        bad = one in surprises or one.outcome == "not tried"
        level: Level = "ok" if not bad else "error" if one.name in ESSENTIAL else "warning"
        yield Checkup(one.name, level, says, DOES_WITHOUT if bad else "")
    good = sum(one.outcome == "ok" for one in report.observed.values())
    says = f"{report.version} at {report.path}: {good} of {len(report.observed)} seen to work ({report.seconds:.0f} s)"
    if not surprises:
        yield Checkup("self-check", "ok", says)
        return
    level, mend = ("warning", DOES_WITHOUT) if report.passed else ("error", capability.pin(None))
    yield Checkup("self-check", level, f"{says}; unexpected: {', '.join(one.name for one in surprises)}", mend)


# --- directories and disk


async def _checkup(check: str, look: Callable[[], Checkup]) -> Checkup:
    """The result of `look`, which blocks. An unreadable path is an error."""
    try:
        return await asyncio.to_thread(look)
    except OSError as exc:
        where = exc.filename or "a directory"
        return Checkup(check, "error", f"{where}: {exc.strerror}", f"give this user the right to: ls -ld {where}")


def _writable(check: str, path: Path, option: str) -> Checkup:
    """Checks that a directory is writable, or can be created."""
    other = f"choose another with {option}"
    if not path.exists():
        above = next(parent for parent in path.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            return Checkup(
                check, "error", f"{path} cannot be made: {above} takes no files", f"chmod u+wx {above}, or {other}"
            )
        return Checkup(check, "ok", f"{path} (made at the first turn)")
    if not path.is_dir():
        return Checkup(check, "error", f"{path} is not a directory", f"mv {path} {path}.old, or {other}")
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor-"):
            pass
    except OSError as exc:
        return Checkup(check, "error", f"{path} takes no files ({exc.strerror})", f"chmod u+rwx {path}, or {other}")
    return Checkup(check, "ok", str(path))


def _sandbox(settings: Settings) -> Checkup:
    root = Sandboxes(settings).path("a").parent
    for path in (root.parent, root):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            says = f"{path} is a symbolic link or a file where a directory belongs"
            return Checkup("sandbox", "error", says, f"mv {path} {path}.old")
        if path.exists() and path.stat().st_uid != os.getuid():
            return Checkup("sandbox", "error", f"{path} belongs to another user", f"sudo chown -R $(id -u) {path}")
    for name, target in settings.sandbox.links.items():
        if not target.expanduser().exists():
            says = f"[sandbox.links] {name}: {target} does not exist"
            return Checkup("sandbox", "error", says, f"mkdir -p {target}, or correct [sandbox.links]")
    return Checkup("sandbox", "ok", str(root) if root.exists() else f"{root} (made at the first turn)")


def _unsafe_place(settings: Settings) -> Checkup:
    for says, mend in prerequisites.unsafe_places(settings):
        return Checkup("place", "warning", says, mend)
    return Checkup("place", "ok", "not in a synced folder, not on a network disk")


def _disk(var: Path) -> Checkup:
    place = next(path for path in (var, *var.parents) if path.exists())
    free = shutil.disk_usage(place).free
    level: Level = "error" if free < DISK_ERROR else "warning" if free < DISK_WARNING else "ok"
    advice = f"free space there (df -h {place}; cli-session-proxy chains shows sizes), or move --var"
    mend = "" if level == "ok" else advice
    return Checkup("disk", level, f"{free // MB:,} MB free at {place}", mend)


def _memory(settings: Settings) -> Checkup:
    if settings.max_memory is None:
        return Checkup("memory", "ok", f"not measured here: at most {settings.max_processes} CLI processes")
    fit = min(settings.max_processes, settings.max_memory // FIRST_WEIGHT)
    says = f"{settings.max_memory // MB} MB for CLI processes: about {fit} of at most {settings.max_processes}"
    if fit:
        return Checkup("memory", "ok", says)
    return Checkup("memory", "warning", f"{says}, so that one runs at a time", f"max_memory = {4 * FIRST_WEIGHT}")


# --- the store


def _sqlite(path: Path) -> tuple[Checkup, float | None, list[Finding]]:
    """The checkup of a store in SQLite, the time of its last turn, and its stored self-checks. Only reads: a proxy may
    be running."""
    if not path.exists():
        return Checkup("store", "ok", f"{path} (made at the first turn)"), None, []
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=LOCAL_TIMEOUT)) as conn:
            return _health(path, conn)
    except sqlite3.Error as exc:
        return _broken(path, str(exc)), None, []


def _health(path: Path, conn: sqlite3.Connection) -> tuple[Checkup, float | None, list[Finding]]:
    faults = [str(row[0]) for row in conn.execute("PRAGMA quick_check(3)")]
    if faults != ["ok"]:
        return _broken(path, faults[0].splitlines()[0]), None, []
    tables = {name for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "meta" not in tables or "agents" not in tables:
        return Checkup("store", "error", f"{path} is a database of another program", f"mv {path} elsewhere"), None, []
    (version,) = conn.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    if int(version) > newest():
        says = f"{path} has schema {version}, this program knows up to {newest()}"
        return Checkup("store", "error", says, "pip install --upgrade cli-session-proxy"), None, []
    marks = dict(conn.execute("SELECT name, value FROM meta WHERE name IN (?, ?)", (MOVED_TO, COMING_IN)))
    if marks:
        return _moved(str(path), marks.get(MOVED_TO)), None, []
    agents, last_at = conn.execute("SELECT count(*), max(last_at) FROM agents").fetchone()
    old = "" if int(version) == newest() else f" (migrated from {version} at the next start)"
    says = f"{path}: {count(agents, 'agent')}, {path.stat().st_size // MB} MB, schema {newest()}{old}"
    query = "SELECT subject, name, found, at FROM findings WHERE until IS NULL"
    rows = conn.execute(query) if "findings" in tables else ()  # a self-check that still runs has an `until`
    findings = [Finding(subject, name, json.loads(data), at) for subject, name, data, at in rows]
    return Checkup("store", "ok", says), last_at, findings


def _postgresql(url: str) -> tuple[Checkup, DatabaseLook | None]:
    """The checkup of a store in PostgreSQL, which is only read; and what was read there, if it can be used."""
    try:
        from ..stores.postgresql.store import look  # noqa: PLC0415 - its driver is an extra

        found = look(url)
    except ImportError as exc:
        return Checkup("store", "error", str(exc), "pip install 'cli-session-proxy[postgresql]'"), None
    except ProxyError as exc:
        says, _, mend = exc.message.rpartition(": ")
        return Checkup("store", "error", says, mend), None
    if found.schema is not None and found.schema > newest():
        says = f"{found.name} has schema {found.schema}, this program knows up to {newest()}"
        return Checkup("store", "error", says, "pip install --upgrade cli-session-proxy"), None
    if found.is_marked:
        return _moved(found.name, found.moved_to), None
    schema = "an empty database" if found.schema is None else f"{count(found.agents, 'agent')}, schema {found.schema}"
    return Checkup("store", "ok", f"{found.name}: PostgreSQL {found.server}, {schema}"), found


def _hosts(hosts: list[tuple[str, Facts]]) -> Iterator[Checkup]:
    """Facts that differ between hosts: the same turn would send a different prompt head at each."""
    found = differences(hosts)
    for what, values in found.items():
        listed = "; ".join(f"{value or 'none'} on {', '.join(names)}" for value, names in values.items())
        says = f"{what} is not the same on all hosts ({listed}): turns that move between hosts lose the prompt cache"
        yield Checkup("hosts", "warning", says, f"give {what} the same value on every host, and start it again")
    if hosts and not found:
        names = ", ".join(dict.fromkeys(host for host, _ in hosts))
        yield Checkup("hosts", "ok", f"all running proxies are alike: {names}")


def _moved(name: str, place: str | None) -> Checkup:
    """The checkup of a store that was moved to `place`; None: a move into it has begun."""
    if place is None:
        return Checkup("store", "error", f"a move into {name} has not ended", "run the same `migrate` again")
    return Checkup("store", "error", f"{name} was moved to {place}", "start with that store (`store`, or --var)")


def _broken(path: Path, why: str) -> Checkup:
    copies = sorted(path.parent.glob(f"{path.name}.v*.bak"))
    copy = f"cp {copies[-1]} {path}" if copies else "put your own backup in its place"
    rescue = f"sqlite3 {path}.broken .recover | sqlite3 {path}"
    mend = f"stop the proxy, mv {path} {path}.broken (with its -wal and -shm), then {rescue}, or {copy}"
    return Checkup("store", "error", f"{path} cannot be used ({why})", mend)


async def _clock(last_at: float | None) -> Checkup:
    wall, steady = time.time(), time.monotonic()
    await asyncio.sleep(CLOCK_WATCH)
    drift = abs((time.time() - wall) - (time.monotonic() - steady))
    mend = f"set the clock ({command_to('set the clock')}, or your system's own way)"
    if wall < CLOCK_FLOOR:
        return Checkup("clock", "error", f"it says {times.written(wall)}, which is long ago", mend)
    if last_at is not None and last_at > wall + CLOCK_SLACK:
        says = f"the last turn ({times.written(last_at)}) is in the future of {times.written(wall)}: was it set back?"
        return Checkup("clock", "error", says, mend)
    if drift > CLOCK_WATCH:
        return Checkup("clock", "warning", f"it jumped by {drift:.1f} s just now", mend)
    return Checkup("clock", "ok", times.written(wall))


# --- processes and port


async def _strays(var: Path) -> Checkup:
    """Running CLIs that a dead proxy left, identified by pid and start time."""
    if not (var / "run").is_dir():
        return Checkup("processes", "ok", "no proxy has left anything")
    instances = Instances(var)
    dead = [one for one in instances.others() if not instances.alive(one)]
    children = [child for one in dead for child in instances.children(one)]
    pids = [str(pid) for pid, started in children if start_time(pid) == started]
    if pids:
        says = f"{len(pids)} CLI processes of a dead proxy: {', '.join(pids)}"
        return Checkup("processes", "warning", says, f"kill {' '.join(pids)} (the next `serve` ends them as well)")
    return Checkup("processes", "ok", "no CLI of a dead proxy is running")


async def _port(settings: Settings) -> Checkup:
    if settings.uds is not None:
        name = f"unix:{settings.uds}"
        if not await asyncio.to_thread(answers, settings.uds):
            return Checkup("port", "ok", f"{name} is free")
        if await _answers(Served(OVER_SOCKET, str(settings.uds))):
            return Checkup("port", "ok", f"{name} is served")
        return Checkup("port", "error", f"{name} is taken by another program", "choose another with --uds")
    host, port = settings.host, settings.port

    def is_free() -> bool:
        if is_served(host, port):
            return False
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.create_server((str(address[0]), port), family=family):
                return True
        except OSError:
            return False

    if port == 0 or await asyncio.to_thread(is_free):
        return Checkup("port", "ok", f"{host}:{port} is free" if port else "a free one is taken at start")
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if not await _answers(Served(url)):
        mend = f"stop it ({command_to('see who listens', port=port)} names it), or choose another with --port"
        return Checkup("port", "error", f"{host}:{port} is taken by another program", mend)
    if served_at(settings.var) == Served(url):
        return Checkup("port", "ok", f"{url} is served on this var")
    says = f"{url} is served by a proxy on another var"
    return Checkup("port", "warning", says, "choose another with --port, or the same --var")


async def _answers(place: Served) -> bool:
    """Whether a proxy of ours listens there."""
    try:
        async with client_of(place, LOCAL_TIMEOUT) as client:
            answer = await client.get("/healthz")
            return answer.status_code == 200 and answer.json() == {"status": "ok"}
    except (httpx.HTTPError, ValueError):
        return False
