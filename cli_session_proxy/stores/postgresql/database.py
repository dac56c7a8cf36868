"""Transactions on a PostgreSQL server, over a pool of connections.

A transaction is a plain function of a SQLAlchemy `Connection`, run on a thread or on the event loop (see `running`).
Writes are READ COMMITTED with locks on the rows that decide (see `stores.sql`), reads have one snapshot. The statements
of a turn go out together where none of them needs what another one finds (see `pipeline`), those that begin and end
their transaction with them.

Nothing outlives a transaction on the server, so a pooler may give each transaction another session (PgBouncer in
transaction mode): no session's lock or setting, no LISTEN. Statements are prepared only if the connection's
backend process id is that of its start, which excludes poolers.

A connection that is lost before the commit was sent, or that the server reports as ended before the commit, has changed
nothing: the work is repeated on a new one, for as long as a write may wait. If it is lost while the commit is on its
way, the result is unknown: that is `StoreUnavailable` with `in_doubt`, and the caller finds out by reading. The same
holds for a connection that is silent for `SILENCE` seconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...errors import ConfigError, InvalidRequest, ProxyError, StoreUnavailable
from ..sql.database import Database, Lifecycle, Urgency, Work
from ..sql.migrations import moved
from . import notify
from .pipeline import PipelinedConnection
from .running import Slots, on_thread

T = TypeVar("T")

# Concurrent transactions, each on its own connection. Reads and writes have separate ones and do not delay each other.
WRITERS = 4
READERS = 4
# PostgreSQL 13: version 12 is no longer maintained.
OLDEST_SERVER = 130000
# The first libpq with `require_auth`, which restricts how a server may ask for a password.
REQUIRE_AUTH_SINCE = 160000
# Seconds without a word from the server after which a connection counts as lost. A write waits less long for a lock. A
# write that is done `alone` may concern all turns of an agent.
SILENCE, SILENCE_ALONE = 60.0, 600.0
# Seconds between two tries of a write while the server is unreachable.
RETRY_INTERVAL = 0.1
# Milliseconds after which the server ends an idle transaction (of a paused proxy). Others wait longer than this for a
# lock.
IDLE_IN_TRANSACTION = 5000
# Advisory lock: only one program at a time creates the schema. Any unused number.
SCHEMA_LOCK = 0x636C695F73657373
# Options that the URL may override. A peer that has vanished is noticed within seconds.
DEFAULTS: dict[str, Any] = {
    "connect_timeout": 5, "keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3,
    "tcp_user_timeout": 10_000, "application_name": "cli-session-proxy",
}  # fmt: skip

# No JIT: it takes 0.1 s for a statement that the server expects to be long, and none of these is.
READ = ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SET LOCAL jit = off")
_CLOCK = """
    CREATE FUNCTION store_clock() RETURNS double precision LANGUAGE sql VOLATILE
    AS 'SELECT extract(epoch FROM clock_timestamp())::double precision'
"""
_SERVER = """
    SELECT current_setting('server_version_num')::int, current_setting('fsync'), pg_is_in_recovery(),
        current_setting('server_encoding'), pg_backend_pid()
"""
ERRORS = (SQLAlchemyError, psycopg.Error, UnicodeEncodeError)


class PostgresqlDatabase(Lifecycle, Database):
    """Runs transactions on the database that `url` names. `busy_timeout` (seconds) bounds every wait of a write.

    Use it on the event loop that opened it. What the URL leaves out comes from libpq's own environment (PGPASSWORD,
    PGSSLROOTCERT, …).
    """

    def __init__(self, url: str, *, busy_timeout: float) -> None:
        try:
            options = conninfo_to_dict(url)
            self._options = {**DEFAULTS, **_authentication_options(options), **options}
        except psycopg.Error:
            # Without libpq's message: it quotes parts of the URL, maybe a password.
            raise ConfigError(
                "store: this is no URL of PostgreSQL: write postgresql://user@host:5432/database, with %40 for an @ "
                "in a password"
            ) from None
        self.busy_timeout = busy_timeout
        self._stopping = threading.Event()
        self._engine: Engine | None = None
        # Idle connections. The last used one is taken first: it has prepared the statements of a turn.
        self._idle: deque[Connection] = deque()
        self._slots: tuple[Slots, Slots] | None = None
        self._deferred: set[asyncio.Future[Any]] = set()  # writes of `Urgency.LATER` that are not done

    @property
    def name(self) -> str:
        parts = {key: str(self._options[key]) for key in ("user", "host", "port", "dbname") if self._options.get(key)}
        place = f"{parts.get('host', '')}{':' + parts['port'] if 'port' in parts else ''}"
        user = f"{parts['user']}@" if "user" in parts else ""
        return f"postgresql://{user}{place}/{parts.get('dbname', '')}"

    async def open(self, prepare: Work[None]) -> None:
        await self._finished_closing()
        if self._slots is not None:
            return
        self._stopping.clear()
        self._engine = self._new_engine()
        self._slots = Slots(WRITERS, "store-write"), Slots(READERS, "store-read")
        self._open = True

        try:
            await self.write(lambda conn: self.prepare(conn, prepare), alone=True)
        except BaseException:
            await self.close()
            raise

    def prepare(self, conn: Connection, prepare: Work[None]) -> None:
        """Create the schema, one program at a time. The lock ends with the caller's transaction."""
        driver = conn.connection.dbapi_connection
        assert isinstance(driver, PipelinedConnection)
        driver.silence = None  # a step from an older schema takes as long as it takes
        conn.exec_driver_sql(f"SELECT pg_advisory_xact_lock({SCHEMA_LOCK})")
        if conn.exec_driver_sql("SELECT to_regprocedure('store_clock()') IS NULL").scalar():
            conn.exec_driver_sql(_CLOCK)
        prepare(conn)

    async def _end(self) -> None:
        both, self._slots = self._slots, None
        self._stopping.set()
        for slots in both or ():
            await slots.drain()
            await asyncio.to_thread(slots.stop)
        while self._idle:
            await asyncio.to_thread(self._idle.pop().close)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.dispose)
            self._engine = None

    async def read(self, work: Work[T], *, quick: bool = False) -> T:
        """A `quick` read is one statement without a transaction."""
        if not self._open or self._slots is None:
            raise self._closed()
        if self._moved_to is not None:
            raise moved(self.name, self._moved_to)
        begin = () if quick else READ
        return await self._slots[1].run(partial(self._read, work, begin), quick=quick)

    async def write(
        self,
        work: Work[T],
        urgency: Urgency = Urgency.DURABLE,
        *,
        quick: bool = False,
        alone: bool = False,
    ) -> T:
        """One transaction each: the server itself groups concurrent commits. `DURABLE` and `JOURNAL` wait for its disk:
        proxies outlive a crash of the server, and must then find every lease that they hold and the beginning of every
        turn that they run."""
        deadline = time.monotonic() + self.busy_timeout
        if urgency is not Urgency.LATER and self._deferred:
            await asyncio.wait(set(self._deferred))  # earlier writes first
        if not self._open or self._slots is None:  # checked after the waits: it may have been closed meanwhile
            raise self._closed()
        patient = urgency is Urgency.DURABLE and not alone
        full = urgency in (Urgency.DURABLE, Urgency.JOURNAL)
        again = not alone
        run = partial(self._write, work, deadline, full=full, patient=patient, again=again)
        done = self._slots[0].run(run, quick=quick)
        if urgency is Urgency.LATER:
            self._deferred.add(done)
            done.add_done_callback(self._deferred.discard)
        return await done

    def claim(self, name: str) -> Callable[[], None] | None:
        """An advisory lock in a transaction that stays open; the server releases it when this process ends. The
        transaction has no snapshot and no id, so it delays nothing else."""
        try:
            conn = self._connect()
        except ERRORS as exc:
            raise self._unavailable(exc) from exc
        conn.silence = SILENCE
        try:
            conn.execute("BEGIN")
            conn.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            named = {"name": name}
            sent = conn.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%(name)s, 0))", named)
            row = sent.fetchone()
        except ERRORS as exc:
            conn.close()
            raise self._unavailable(exc) from exc
        if row is not None and row[0]:
            return conn.close  # says goodbye, and waits for nothing
        conn.close()
        return None

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A new connection in autocommit mode for work beside the turns, also while this is not open. Blocks."""
        try:
            with self._new_engine().connect() as conn:
                yield conn
        except ERRORS as exc:
            raise self._unavailable(exc) from exc

    def ring(self, conn: Connection, proxy_id: str) -> None:
        notify.send(conn, proxy_id)

    def listener(self) -> notify.Listener:
        """A listener for one proxy, on a connection of its own."""
        return notify.Listener({**self._options, "client_encoding": "utf8"})

    # --- where a transaction runs

    def _new_engine(self) -> Engine:
        # hide_parameters: a traceback in a log must not show a prompt. hstore would cost a query per connection.
        # NullPool: this class keeps the connections itself.
        return create_engine(
            "postgresql+psycopg://", creator=self._connect, hide_parameters=True, use_native_hstore=False,
            pool_reset_on_return=None, poolclass=NullPool,
        )  # fmt: skip

    def _connect(self) -> PipelinedConnection:
        """A new connection. Raises `StoreUnavailable` if the server's settings are not durable."""
        options = {**self._options, "client_encoding": "utf8"}
        conn = PipelinedConnection.connect(**options, autocommit=True, prepare_threshold=None)  # `_transaction` begins
        conn.silence = SILENCE
        try:
            found = conn.execute(_SERVER).fetchone()
            assert found is not None
            conn.silence = None
            version, fsync, standby, encoding, backend_pid = found
            # Behind a pooler another process answers, which may not know what was prepared.
            conn.prepares = backend_pid == conn.info.backend_pid
            if version < OLDEST_SERVER:
                why = f"it is PostgreSQL {version // 10000}: use 13 or newer"
            elif fsync != "on":
                why = "its `fsync` is off, so that a power cut loses acknowledged turns: turn it on"
            elif standby:
                why = "it is a standby, which takes no writes: name the primary"
            elif encoding != "UTF8":
                why = f"its encoding is {encoding}: create the database with ENCODING 'UTF8'"
            else:
                return conn
        except BaseException:
            conn.close()
            raise
        conn.close()
        raise StoreUnavailable(f"the store {self.name} cannot be used: {why}")

    def _read(self, work: Work[T], begin: tuple[str, ...]) -> T:
        lost, deadline = 0, time.monotonic() + self.busy_timeout
        while True:
            driver: PipelinedConnection | None = None
            try:
                with self._transaction(begin, SILENCE) as (conn, driver):
                    result = work(conn)
                    driver.rollback()
                    return result
            except ERRORS as exc:
                lost += 1
                # A server that restarts ends every idle connection, one after another: each may fail once.
                once_more = driver is not None and is_lost(exc) and lost <= WRITERS + READERS
                if not once_more or time.monotonic() > deadline:
                    raise self._unavailable(exc) from exc

    def _write(self, work: Work[T], deadline: float, *, full: bool, patient: bool, again: bool) -> T:
        """`patient`: wait for a server that is unreachable. `again`: work that was rolled back may run again."""
        settings = {
            "lock_timeout": int(self.busy_timeout * 1000),
            "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION,
            "synchronous_commit": "on" if full else "off",
        }
        set_all = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items())
        begin = ("BEGIN", f"SELECT {set_all}")
        while True:
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"the store {self.name} was busy for more than {self.busy_timeout:g} s: try again", retry_after=1.0
                )
            driver: PipelinedConnection | None = None
            try:
                with self._transaction(begin, SILENCE if again else SILENCE_ALONE) as (conn, driver):
                    result = work(conn)
                    driver.commit()
                    return result
            except ERRORS as exc:
                committing = driver is not None and driver.committing is not None and not driver.ended_before_commit
                in_doubt = is_lost(exc) and committing
                rolled_back = (is_lost(exc) and not in_doubt) or code_of(exc) in ROLLED_BACK
                once_more = patient if driver is None else again and rolled_back
                if not once_more or time.monotonic() > deadline:
                    raise self._unavailable(exc, in_doubt=in_doubt) from exc
                # Only the closing of this store ends the wait early.
                if on_thread(partial(self._stopping.wait, RETRY_INTERVAL)):
                    raise self._unavailable(exc) from exc

    @contextmanager
    def _transaction(self, begin: tuple[str, ...], silence: float) -> Iterator[tuple[Connection, PipelinedConnection]]:
        """Commits all or nothing, if `begin` begins a transaction. Discards connections that the server has closed."""
        assert self._engine is not None
        while True:
            try:
                conn = self._idle.pop()
            except IndexError:
                conn = on_thread(self._engine.connect)
            driver = conn.connection.dbapi_connection
            assert isinstance(driver, PipelinedConnection)
            if driver.is_fit():
                break
            conn.invalidate()  # so that it is closed without a word to the server
            conn.close()
        driver.committing, driver.silence = None, silence
        try:
            for statement in begin:
                driver.execute(statement)
            yield conn, driver
        except BaseException:
            try:
                driver.rollback()
            except psycopg.Error:
                driver.close()
            raise
        finally:
            if driver.closed:
                conn.invalidate()
                conn.close()
            else:
                self._idle.append(conn)

    # --- what an error means

    def _unavailable(self, exc: Exception, *, in_doubt: bool = False) -> ProxyError:
        """One line that says what to do. Only the server's own words: the statement's values are prompts."""
        cause = exc.orig if isinstance(exc, DBAPIError) else exc
        if isinstance(cause, UnicodeEncodeError) or (isinstance(cause, psycopg.DataError) and cause.sqlstate is None):
            return InvalidRequest("a name holds a NUL or half a surrogate pair: send it as well-formed text")
        code = code_of(exc)
        message = cause.diag.message_primary if isinstance(cause, psycopg.Error) else None
        if code == MOVED:
            self._moved_to = message or ""
            return moved(self.name, self._moved_to)
        lines = (message or str(cause) or type(cause).__name__).splitlines()
        if code == LOCKED:
            return StoreUnavailable(
                f"the store {self.name} was locked by another program for more than {self.busy_timeout:g} s: end what "
                "holds it, then try again",
                retry_after=1.0,
            )
        unsafe = NOT_SAFE if "authentication method requirement" in lines[0] else None
        advice = unsafe or ADVICE.get(code) or ADVICE.get(code[:2]) or "see its log, and run `cli-session-proxy doctor`"
        lost = "the connection was lost while it was written, so it may be there or not; " if in_doubt else ""
        return StoreUnavailable(
            f"the store {self.name} cannot be used ({lines[0].strip()}): {lost}{advice}",
            retry_after=1.0 if is_lost(exc) else None,
            detail={"sqlstate": code, **({"in_doubt": True} if in_doubt else {})},
        )


def _authentication_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Options against a program that imitates the server: a password is sent by SCRAM only, which does not reveal the
    password, and proves that the server knows it. With a verified certificate any method is allowed.

    `options`: those of the URL. If they have a password, it must be used.
    """
    if psycopg.pq.version() < REQUIRE_AUTH_SINCE:
        return {}  # this libpq refuses options that it does not know
    of_libpq = {option.keyword.decode(): option.val for option in psycopg.pq.Conninfo.get_defaults() if option.val}
    sslmode = str(options.get("sslmode") or of_libpq["sslmode"].decode())
    if "require_auth" in of_libpq or sslmode.startswith("verify-"):
        return {}  # the operator has decided, or the certificate proves who the server is
    has_password = options.get("password") or "password" in of_libpq
    return {"require_auth": "scram-sha-256" if has_password else "!password,!md5"}


# SQLSTATEs of a conflict with another transaction: run it once more.
ROLLED_BACK = ("40001", "40P01")
LOCKED = "55P03"
# The SQLSTATE of a write to a store that was moved; the message is its new place.
MOVED = "MOVED"
# The advice after a server asked for the password in a way that `require_auth` forbids.
NOT_SAFE = (
    "it, or whoever has its place, asked otherwise than by SCRAM and was sent nothing: set password_encryption to "
    "scram-sha-256 and the user's password anew, use TLS with sslmode=verify-full, or say require_auth=… in the URL"
)
# By SQLSTATE, or by its first two characters; "": no server answered.
ADVICE = {
    "": "start PostgreSQL, or correct `store`",
    "08": "start PostgreSQL, or correct `store`",
    "25006": "it is a standby now: name the primary, or add target_session_attrs=read-write",
    "28": "correct the user and the password (in the URL, in PGPASSWORD, or in a password file)",
    "3D000": "create that database, or correct `store`",
    "40": "try again",
    "42501": "give this user the right to create tables in it, and to read and write them",
    "53100": "free space on its disk",
    "53": "it has no room for more: raise its limits (max_connections), or put PgBouncer in front",
    "57": "it is being stopped or started: try again in a moment",
    "23": "nothing was changed; a row is missing or already exists",
}


def code_of(exc: Exception) -> str:
    """The SQLSTATE; "" where there is none."""
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    return (cause.sqlstate if isinstance(cause, psycopg.Error) else None) or ""


def is_lost(exc: Exception) -> bool:
    """Whether the connection is lost, or never existed."""
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    if code := code_of(exc):
        # Connection exceptions; the server stops, or ended the session; it ended an idle transaction with its session.
        return code.startswith(("08", "57P", "25P03"))
    # Without a SQLSTATE the error is not the server's answer, but one of the connection.
    return isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
