"""Logs: JSON lines in `<var>/logs/proxy.log`, rotated; warnings and errors also on stderr, for a human.

A host that embeds the engine calls no `configure`: there an event is one readable line of the standard `logging`,
which the host shows where and as it likes. structlog's own configuration, which is the host's too, is never touched.
No traceback shows local variables: they hold prompts and keys.

What an event carries is the caller's choice, but never a prompt, a key or an environment: `_drop_secrets` is the
second line behind that rule. Bind the request's id once (`bind(request_id=…)`), and every line of its task has it.

structlog is imported with an engine, else when something is logged: a command that only reads would wait 50 ms for it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import datetime
from functools import cache
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any, cast

from . import redact
from .domain import times
from .sandbox import make_private

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, MutableMapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import structlog

    from .settings import Settings

__all__ = ["bind", "bound", "clear", "configure", "file_of", "get", "load", "shut_down"]

ROTATE_BYTES = 10 * 1024 * 1024
ROTATE_KEPT = 5  # so that logs never need more than 60 MB
TEXT_LIMIT = 2000  # characters of one value: an error's text, not a conversation
NAME = "cli_session_proxy"

# What names a thing in a line: an id, and the whole of a JSON text.
_ID = re.compile(rb"turn_[0-9A-Za-z]+|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_TEXT = re.compile(rb'"((?:[^"\\]++|\\.)*+)"?')  # a torn line ends within one

# Fields that would hold a conversation or an environment: never written, whatever they are.
_NEVER = frozenset(
    {"prompt", "messages", "content", "body", "input", "output", "system", "answer", "text", "headers"}
    | {"env", "environ", "environment"}
)
# Names of secrets: broader than those that `redact` hides in a dump, where content is to be read.
_SECRET_NAME = re.compile(r"(^|_)(key|token|secret|password|cookie|credentials?|authorization)$")


@cache
def _console(*, colors: bool) -> structlog.dev.ConsoleRenderer:
    from structlog import dev

    return dev.ConsoleRenderer(colors=colors, exception_formatter=dev.plain_traceback)


def bind(**values: Any) -> None:
    from structlog import contextvars

    contextvars.bind_contextvars(**values)


def bound(**values: Any) -> AbstractContextManager[None]:
    from structlog import contextvars

    return contextvars.bound_contextvars(**values)


def clear() -> None:
    from structlog import contextvars

    contextvars.clear_contextvars()


class _Event(dict[str, Any]):
    """The message of a record. Formatters that know no structlog show it as one line, with its traceback below."""

    def __str__(self) -> str:
        from structlog.processors import format_exc_info

        event: MutableMapping[str, Any] = format_exc_info(None, "", self.copy())
        for name in ("level", "timestamp"):  # the host's formatter has its own
            event.pop(name, None)
        line: str = _console(colors=False)(None, "", _drop_secrets(None, "", event))
        return line


class _LogFile(RotatingFileHandler):
    """Makes every line once. Its base class makes it twice: to see whether it still fits, and to write it.

    A disk that is full is told once, and not by a traceback for each line that is lost.
    """

    _is_told = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            if self.stream is None:  # it could not be rotated
                self.stream = self._open()
            written = os.fstat(self.stream.fileno()).st_size
            if written and written + len(line.encode()) > self.maxBytes:
                self.doRollover()
            self.stream.write(line)
            self.flush()
            self._is_told = False
        except OSError as exc:
            if not self._is_told:
                self._is_told = True
                print(
                    f"the log {self.baseFilename} cannot be written ({exc.strerror}): its lines are lost",
                    file=sys.stderr,
                )
        except Exception:  # noqa: BLE001 - as every handler does: told on stderr
            self.handleError(record)


def _as_record(logger: Any, method: str, event: MutableMapping[str, Any]) -> tuple[tuple[Any], dict[str, Any]]:
    """What `logging` is called with. The traceback stays in the event, where secrets are hidden."""
    from structlog.stdlib import ProcessorFormatter

    wrapped, extra = ProcessorFormatter.wrap_for_formatter(logger, method, _Event(event))
    return wrapped, {**extra, "exc_info": False}


def load() -> None:
    """Import structlog now. Later it may be too late: while Python ends (Ctrl-C exits with 1), or on a held loop."""
    import structlog  # noqa: F401


class _Named:
    """A logger that is made when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        return getattr(_made(self._name), method)


def get(name: str = NAME) -> structlog.stdlib.BoundLogger:
    """A logger. Safe at import: it looks at what is configured when something is logged."""
    return cast("structlog.stdlib.BoundLogger", _Named(name))


@cache
def _made(name: str) -> structlog.stdlib.BoundLogger:
    import structlog

    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            _as_record,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return logger


def file_of(settings: Settings) -> Path:
    return settings.var / "logs" / "proxy.log"


def configure(settings: Settings, quiet: Collection[str] = ()) -> None:
    """Send this program's logs to the file and warnings to stderr, without `quiet` events: they are told
    there in words, or only matter to who reads logs.

    Called again, it replaces what it set before.

    Raises `SandboxError` or OSError where the folder cannot be written.
    """
    from structlog.processors import JSONRenderer

    path = file_of(settings)
    make_private(path.parent)
    to_file = _LogFile(path, maxBytes=ROTATE_BYTES, backupCount=ROTATE_KEPT, encoding="utf-8", delay=False)
    to_file.setFormatter(_formatter(JSONRenderer(ensure_ascii=False)))
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setLevel(logging.WARNING)
    to_stderr.addFilter(lambda record: not (isinstance(record.msg, dict) and record.msg.get("event") in quiet))
    to_stderr.setFormatter(_formatter(_in_zone, _console(colors=sys.stderr.isatty())))

    shut_down()
    logger = logging.getLogger(NAME)
    logger.handlers = [to_file, to_stderr]
    logger.setLevel(settings.log_level.upper())
    logger.propagate = False


def forget(settings: Settings, named: Iterable[str]) -> None:
    """Remove every line that speaks of one of these, from this program's file and from the rotated ones.

    A line that another program writes to the same file at this very moment may be lost.
    """
    wanted = {json.dumps(_visible(name), ensure_ascii=False)[1:-1].encode("utf-8", "replace") for name in named if name}
    current = file_of(settings)
    for path in current.parent.glob(f"{current.name}*"):
        _forget(path, wanted)


def _forget(path: Path, wanted: set[bytes]) -> None:
    """In place: a program that has the file open goes on appending to it. Ours writes nothing meanwhile."""
    ours = [
        handler
        for handler in logging.getLogger(NAME).handlers
        if isinstance(handler, _LogFile) and handler.baseFilename == os.path.abspath(path)
    ]
    for handler in ours:
        handler.acquire()
    try:
        with path.open("r+b") as file:
            lines = file.readlines()
            # a word of it is one of these (an id), or a whole text in it (an agent's name)
            remaining = [line for line in lines if wanted.isdisjoint(_ID.findall(line) + _TEXT.findall(line))]
            if len(remaining) < len(lines):
                file.seek(0)
                file.writelines(remaining)
                file.truncate()
    except FileNotFoundError:  # rotated away meanwhile
        return
    finally:
        for handler in ours:
            handler.release()


def shut_down() -> None:
    """Close what `configure` opened."""
    logger = logging.getLogger(NAME)
    for handler in logger.handlers:
        handler.close()
    logger.handlers = []
    logger.propagate = True


def _shared() -> list[Any]:
    from structlog import contextvars, processors, stdlib

    return [contextvars.merge_contextvars, stdlib.add_log_level, processors.TimeStamper(fmt="iso", utc=True)]


def _in_zone(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The time in the person's zone, as everywhere else."""
    return {**event, "timestamp": times.written(datetime.fromisoformat(event["timestamp"]).timestamp())}


def _formatter(*renderers: Any) -> structlog.stdlib.ProcessorFormatter:
    """Formats our events and plain `logging` records: exceptions as text, secrets removed, then these."""
    from structlog.processors import format_exc_info
    from structlog.stdlib import ProcessorFormatter

    plain = ProcessorFormatter.remove_processors_meta
    return ProcessorFormatter(
        foreign_pre_chain=_shared(), processors=[plain, format_exc_info, _drop_secrets, *renderers]
    )


def _drop_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: _clean(key, value) for key, value in event.items()}


def _visible(text: str) -> str:
    """Escape control characters, bidirectional marks and line separators."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\u{ord(char):04x}" for char in text)


def _clean(name: str, value: Any) -> Any:
    """A value as it may be written: plain JSON types, secrets hidden, texts cut."""
    plain = name.lower().replace("-", "_")
    if plain in _NEVER or (isinstance(value, str | bytes) and _SECRET_NAME.search(plain)):
        return redact.HIDDEN
    if isinstance(value, dict):
        return {_visible(str(key)): _clean(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    whole = str(value)
    text = _visible(redact.head(whole, TEXT_LIMIT + 1))
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}… ({len(whole)} characters)"
