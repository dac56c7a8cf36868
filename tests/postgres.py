"""PostgreSQL servers of the tests' own: on a unix socket or a free port, never the machine's."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from .owned import owned_folder

CI = bool(os.environ.get("CI"))
# Seconds in which a server starts or stops, on a machine with more to do.
PATIENCE = 60.0
# Linux's file system in memory, and how much of it has to be free (bytes).
MEMORY, ROOM = Path("/dev/shm"), 4 * 1024**3
# The database user that owns everything.
USER = "proxy"


def programs() -> Path | None:
    """Where `initdb` and `postgres` are: Debian keeps them out of PATH."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    return versions[-1].parent if versions else None


def needed(what: object, name: str) -> None:
    """Skip without it; in CI that is a failure."""
    if what is None:
        (pytest.fail if CI else pytest.skip)(f"needs {name}: make tools")


def unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root: who it runs as then."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid}


class Postgres:
    """A server with a folder of its own. `port`: on 127.0.0.1 too, else on its socket alone."""

    def __init__(self, folder: Path, binaries: Path, options: tuple[str, ...] = (), port: int | None = None) -> None:
        self.folder = folder
        self._binaries = binaries
        self.options = options
        self.port = port or 5432
        self._listens = port is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    @property
    def pid(self) -> int:
        """Of the first of its processes; the others are its children."""
        assert self._process is not None
        return self._process.pid

    def init(self) -> None:
        command = [self._binaries / "initdb", "-D", self.folder / "data", "-A", "trust", "-U", USER, "-E", "UTF8"]
        self._run([*command, "--locale", "C", "--no-sync"])

    def start(self) -> None:
        """Returns when it answers."""
        address = "127.0.0.1" if self._listens else ""
        told = {"listen_addresses": address, "unix_socket_directories": self.folder, "port": self.port}
        settings = [part for name, value in told.items() for part in ("-c", f"{name}={value}")]
        # synchronous_commit off: the store asks for it itself. A small server: this machine has more to do. Its shared
        # memory is files of its folder: what it makes in /dev/shm stays there when it is killed.
        small = ("-c", "shared_buffers=16MB", "-c", "synchronous_commit=off", "-c", "dynamic_shared_memory_type=mmap")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self.folder / "data", *settings, *small, *self.options],
                stdout=log, stderr=log, cwd=self.folder, env={"TMPDIR": str(self.folder)}, **unprivileged(),
            )  # fmt: skip
        self.answers()

    def answers(self) -> None:
        """Wait until it takes connections."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                assert self._process is not None
                assert self._process.poll() is None, (self.folder / "log").read_text()[-3000:]
                assert time.monotonic() < until, (self.folder / "log").read_text()[-3000:]
                time.sleep(0.02)  # another program's start: nothing to wait on but its socket

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: its fast shutdown, SIGQUIT: without a checkpoint, SIGKILL: as it comes. Idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is not None:
            return
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(number)
        process.wait(PATIENCE)
        until = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in children):  # after SIGKILL they notice by themselves
            assert time.monotonic() < until
            time.sleep(0.02)

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.folder}&port={self.port}"

    def new_url(self) -> str:
        """Of a database that is new and empty."""
        self._count += 1
        name = f"test_{self._count}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as conn:
            # Since 15 it is written to the log as well, unless it is copied as files: the log keeps it in memory.
            strategy = "STRATEGY file_copy" if conn.info.server_version >= 150000 else ""
            conn.execute(f"CREATE DATABASE {name} TEMPLATE template0 {strategy}")
        return self.url(name)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a database that is new, and gone afterwards: each takes 8 MB."""
        url, name = self.new_url(), f"test_{self._count}"
        yield url
        with psycopg.connect(self.url("postgres"), autocommit=True) as conn:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _run(self, command: list[Any]) -> None:
        done = subprocess.run(command, capture_output=True, cwd=self.folder, env={}, **unprivileged(), check=False)
        assert done.returncode == 0, done.stderr.decode()


@contextmanager
def folder(*, memory: bool = True) -> Iterator[Path]:
    """A folder with a short path (a unix socket's has 107 bytes) that belongs to who the server runs as.

    In memory where there is room: no test cuts the power, and hundreds of databases are thousands of files. `memory`
    False: on the disk, as what is measured has to be, and in /tmp, which everybody may enter.
    """
    memory = memory and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
    with owned_folder("csp-postgres-", MEMORY if memory else Path("/tmp")) as made:
        who = unprivileged()
        if who:
            os.chown(made, who["user"], who["group"])
        yield made


@contextmanager
def server(
    *options: str, port: int | None = None, start: bool = True, hba: str = "", memory: bool = True
) -> Iterator[Postgres]:
    """`options`: more of `postgres`, such as `-c fsync=off`. `start` False: for tests that change its files first.
    `hba`: who else may come in, as a line of pg_hba.conf. `memory`: where its files are (`folder`)."""
    binaries = programs()
    needed(binaries, "PostgreSQL")
    assert binaries is not None
    with folder(memory=memory) as place:
        made = Postgres(place, binaries, options, port)
        made.init()
        with (place / "data" / "pg_hba.conf").open("a") as file:
            file.write(f"{hba}\n")
        try:
            if start:
                made.start()
            yield made
        finally:
            made.stop(signal.SIGQUIT)  # at once: its other ends write all databases of all tests to the disk first


class HandClock:
    """The clock of a database, which stands still until it is told."""

    def __init__(self, url: str) -> None:
        self._url = url
        with psycopg.connect(url) as conn:
            conn.execute("CREATE SCHEMA hand")
            conn.execute("CREATE TABLE hand.clock AS SELECT 1000000.0::double precision AS now")
            conn.execute(
                "CREATE FUNCTION store_clock() RETURNS double precision LANGUAGE sql VOLATILE "
                "AS 'SELECT now FROM hand.clock'"
            )

    async def advance(self, seconds: float) -> None:
        with psycopg.connect(self._url) as conn:
            conn.execute("UPDATE hand.clock SET now = now + %s", (seconds,))
