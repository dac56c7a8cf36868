"""Sends a turn's statements to the server together: they are collected until a result is needed.

A turn's statements touch a row or two each. Most of their time is the round trip and the driver's overhead. A
transaction of five, measured after a pause, takes 1.2 ms with psycopg's cursors, 0.52 of them processor time of this
process; with this, libpq's pipeline mode and prepared statements, 0.5 and 0.13 ms. psycopg's own pipelines send each
statement by itself, and take as long as its cursors.
"""

from __future__ import annotations

import re
import select
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.waiting import Ready, Wait

from .running import current, until_ready

T = TypeVar("T")

# A placeholder, as SQLAlchemy writes it for psycopg.
_PLACE = re.compile(r"%\((\w+)\)s|%%")
# The most texts that are cached, and statements that a connection prepares: about twice as many as there are.
_TEXTS = 512
_FAILED = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED)


@lru_cache(_TEXTS)
def _numbered(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """The text with the server's placeholders $1, $2, …, and the name of each."""
    names: dict[str, int] = {}

    def place(found: re.Match[str]) -> str:
        return "%" if found[1] is None else f"${names.setdefault(found[1], len(names) + 1)}"

    return _PLACE.sub(place, sql).encode(), tuple(names)


def _dumped(value: object) -> bytes | None:
    match value:  # the most frequent first
        case str():
            if "\0" in value:  # libpq would cut the text there
                raise psycopg.DataError("PostgreSQL text cannot contain NUL (0x00) bytes")
            return value.encode()
        case None | bytes():
            return value
        case bool():
            return b"t" if value else b"f"
        case int() | float():
            return repr(value).encode()
    raise TypeError(f"{type(value).__name__} has no place in a statement of a turn")


class Sent:
    """A statement and, once asked for, its result: the part of a PEP 249 cursor that is used here."""

    def __init__(self, session: PipelinedConnection, sql: bytes, values: Sequence[object]) -> None:
        self._session = session
        self._row = 0
        self.sql = sql
        self.values = [_dumped(value) for value in values]
        self.formats: list[pq.Format] | None = None  # all of them text
        if bytes in map(type, values):
            self.formats = [pq.Format.BINARY if isinstance(value, bytes) else pq.Format.TEXT for value in values]
        self.result: pq.abc.PGresult | None = None

    def _arrived(self) -> pq.abc.PGresult:
        if self.result is None:
            self._session.flush()
        assert self.result is not None
        return self.result

    @property
    def rowcount(self) -> int:
        return self._arrived().command_tuples or 0

    @property
    def lastrowid(self) -> int | None:
        """The generated key, which the statement returns."""
        row = self._at(0)
        return None if row is None else row[0]

    def fetchone(self) -> tuple[Any, ...] | None:
        self._row += 1
        return self._at(self._row - 1)

    def _at(self, row: int) -> tuple[Any, ...] | None:
        result = self._arrived()
        if row >= result.ntuples:
            return None
        self._session.loader.set_pgresult(result)
        return self._session.loader.load_row(row, tuple)


class SilentError(psycopg.OperationalError):
    """The connection is there, and the server says nothing."""


class PipelinedConnection(psycopg.Connection[Any]):
    """A connection on which `execute` only collects a statement. Any other way to run one sends the collected first.

    `prepares`: statements are prepared; not behind a pooler, where the server session changes. `committing`: this
    transaction's COMMIT, once it is collected or sent. `ended_before_commit`: the server ended the session before it.
    `silence`: seconds without a byte from the server after which the connection counts as lost; None: no limit. TCP
    only notices a peer that has vanished, not a server that is stopped or something in between that forgot it.
    """

    prepares = False
    silence: float | None = None
    ended_before_commit = False
    committing: Sent | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._collected: list[Sent] = []
        self.loader = Transformer(self)
        self._names: dict[bytes, bytes] = {}  # the name of each text

    def execute(self, sql: str, values: Mapping[str, object] | None = None) -> Sent:  # type: ignore[override]
        """Errors are raised when its result or a later one is asked for, or at the commit."""
        text, names = _numbered(sql)
        sent = Sent(self, text, [values[name] for name in names] if values is not None else ())
        self._collected.append(sent)
        return sent

    def executemany(self, sql: str, rows: Sequence[Mapping[str, object]]) -> None:
        for values in rows:
            self.execute(sql, values)

    def cursor(self, *args: Any, **kwargs: Any) -> psycopg.Cursor[Any]:  # type: ignore[override]
        self.flush()
        cursor: psycopg.Cursor[Any] = super().cursor(*args, **kwargs)
        return cursor

    def commit_next(self) -> None:
        self.committing = self.execute("COMMIT")

    def commit(self) -> None:
        if self.committing is None:
            self.commit_next()
        self.flush()
        # After a failed statement the server answers COMMIT with ROLLBACK, without an error.
        done = None if self.committing is None else self.committing.result
        if done is None or done.command_status != b"COMMIT":
            raise psycopg.InternalError("the transaction was rolled back")

    def rollback(self) -> None:
        """Drop the statements that are not sent."""
        self._collected.clear()
        if self.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            raise psycopg.OperationalError("the results of sent statements were not read")
        if self.pgconn.transaction_status != pq.TransactionStatus.IDLE:
            super().rollback()

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """How psycopg itself waits for the server, in its cursors and its rollback."""
        if current() is None and self.silence is None:
            return super().wait(gen, *args, **kwargs)
        try:
            wanted = next(gen)
            while True:
                wanted = gen.send(self._until_ready(wanted))
        except StopIteration as end:
            result: T = end.value
            return result

    def _until_ready(self, wanted: int) -> int:
        ready = until_ready(self.pgconn.socket, wanted, self.silence)
        if not ready:
            raise SilentError(f"it has said nothing for {self.silence:g} s")
        return ready

    def is_fit(self) -> bool:
        """Whether nothing arrived while it was idle: anything would be a shutdown notice or the end of the
        connection."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return not poll.poll(0)

    def flush(self) -> None:
        """Send the collected statements, and wait for all results. Raises the first error."""
        statements, self._collected = self._collected, []
        if not statements:
            return
        server = self.pgconn
        if server.status != pq.ConnStatus.OK:
            raise psycopg.OperationalError("the connection is closed")
        prepared: dict[bytes, bytes] = {}
        server.enter_pipeline_mode()  # if this is interrupted, `rollback` leaves it
        # What each expected result belongs to: a text to prepare, or a statement. (None, None): the sync at the end.
        expected: list[tuple[bytes | None, Sent | None]] = []
        for sent in statements:
            name = self._names.get(sent.sql) or prepared.get(sent.sql)
            if name is None and self.prepares and len(self._names) + len(prepared) < _TEXTS:
                name = prepared[sent.sql] = f"turn_{len(self._names) + len(prepared)}".encode()
                server.send_prepare(name, sent.sql)
                expected.append((sent.sql, None))
            if name is None:
                server.send_query_params(sent.sql, sent.values, param_formats=sent.formats)
            else:
                server.send_query_prepared(name, sent.values, param_formats=sent.formats)
            expected.append((None, sent))
        server.pipeline_sync()
        error: psycopg.Error | None = None
        for text, statement in [*expected, (None, None)]:
            try:
                result = self._next()
            except psycopg.OperationalError as exc:  # an earlier message of the server says more
                raise error or exc from None
            if result.status in _FAILED:
                if error is None:
                    if result.error_field(pq.DiagnosticField.SQLSTATE) is None and server.status != pq.ConnStatus.OK:
                        error = psycopg.OperationalError(result.get_error_message())
                    else:
                        error = error_from_result(result)
                    session_ended = (error.sqlstate or "").startswith("57P")
                    # Behind a pooler (not `prepares`) that may be its session with the server, not ours.
                    self.ended_before_commit = session_ended and self.prepares and statement is not statements[-1]
            elif text is not None:
                self._names[text] = prepared[text]
            elif statement is not None:
                statement.result = result
        if server.status == pq.ConnStatus.OK:
            server.exit_pipeline_mode()
        if error is not None:
            raise error

    def _next(self) -> pq.abc.PGresult:
        """The next result."""
        server = self.pgconn
        while True:
            while server.is_busy():
                unsent = server.flush()
                if self._until_ready(Wait.RW if unsent else Wait.R) & Ready.R:
                    server.consume_input()
            result = server.get_result()
            if result is not None:  # libpq returns None after the result of each statement
                return result
            if server.status != pq.ConnStatus.OK:
                raise psycopg.OperationalError("the connection is closed")
