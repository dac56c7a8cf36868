"""Logs: JSON lines in `<var>/logs/proxy.log`, rotated. Warnings and errors also go to stderr, as readable lines.

A program that embeds the engine does not call `configure`: there each event is one readable line of the standard
`logging`, which that program configures. structlog's global configuration also belongs to that program, and is not
changed. Tracebacks show no local variables, because these hold prompts and keys.

The caller chooses an event's fields, but never a prompt, a key or an environment: `_drop_secrets` removes these, too.
Bind the request's id once (`bind(request_id=…)`), and every line of its task has it.

structlog is imported with an engine, or at the first log line: the import takes 50 ms, which a reading command saves.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import datetime
from functools import cache, lru_cache
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any, Literal, cast

from . import redact
from .domain import times
from .sandbox import make_private

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, MutableMapping
    from pathlib import Path

    import structlog

    from .domain.models import Agent
    from .settings import Settings

ROTATE_BYTES = 10 * 1024 * 1024
ROTATE_KEPT = 5  # at most 60 MB in all
KNOWN_NAMES = 1024  # how many fields' names are remembered with what they hide
NAME_END = 64  # characters at the end of a field's name by which a secret is recognised
TEXT_LIMIT = 2000  # characters of one value: enough for an error's text
NAME = "cli_session_proxy"

# Where `forget` looks in a log line: for ids anywhere, for the agent's name in the field `agent`. A client may call its
# agent "error", or give it the id of another client's request as its name.
_ID = re.compile(rb"turn_[0-9A-Za-z]+|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_AGENT = re.compile(rb'"agent": "((?:[^"\\]++|\\.)*+)"?')  # a torn line may end within a string
_OWNER = re.compile(rb'"owner": "([^"\\]*)"?')
_DIR = re.compile(rb'"dir": "([^"\\]*)"?')  # the name of its directory is no other agent's

# Fields that would hold a conversation or an environment: their values are never written.
_NEVER = frozenset(
    {"prompt", "messages", "content", "body", "input", "output", "system", "answer", "text", "headers"}
    | {"env", "environ", "environment"}
)
# Names of secrets: more of them than `redact` hides in a dump, which people want to read.
_SECRET_NAME = re.compile(r"(^|_)(key|token|secret|password|cookie|credentials?|authorization)$")


@cache
def _console(*, colors: bool) -> structlog.dev.ConsoleRenderer:
    from structlog import dev

    return dev.ConsoleRenderer(colors=colors, exception_formatter=dev.plain_traceback)


def bind(**values: Any) -> None:
    from structlog import contextvars

    contextvars.bind_contextvars(**values)


class _Event(dict[str, Any]):
    """The message of a record. Formatters without structlog show it as one line, with the traceback below."""

    def __str__(self) -> str:
        from structlog.processors import format_exc_info

        event: MutableMapping[str, Any] = format_exc_info(None, "", self.copy())
        for name in ("level", "timestamp"):  # added by the embedding program's formatter
            event.pop(name, None)
        line: str = _console(colors=False)(None, "", _drop_secrets(None, "", event))
        return line


class _LogFile(RotatingFileHandler):
    """Formats each line once. The base class formats it twice: to compare its size with the limit, and to write it.

    A full disk is reported once, not with a traceback for each lost line.
    """

    _is_reported = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            if self.stream is None:  # the last rotation failed
                self.stream = self._open()
            written = os.fstat(self.stream.fileno()).st_size
            if written and written + len(line.encode()) > self.maxBytes:
                self.doRollover()
            self.stream.write(line)
            self.flush()
            self._is_reported = False
        except OSError as exc:
            if not self._is_reported:
                self._is_reported = True
                print(
                    f"the log {self.baseFilename} cannot be written ({exc.strerror}): its lines are lost",
                    file=sys.stderr,
                )
        except Exception:  # noqa: BLE001 - as every handler does: shown on stderr
            self.handleError(record)


def load() -> None:
    """Import structlog now. Later the import may fail (while Python exits after Ctrl-C) or block the event loop."""
    import structlog  # noqa: F401


class _LazyLogger:
    """A logger that is created at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        return getattr(_logger(self._name), method)


def get(name: str = NAME) -> structlog.stdlib.BoundLogger:
    """A logger. Safe at import: it reads the configuration when a line is logged."""
    return cast("structlog.stdlib.BoundLogger", _LazyLogger(name))


@cache
def _logger(name: str) -> structlog.stdlib.BoundLogger:
    import structlog
    from structlog.stdlib import ProcessorFormatter

    def as_record(logger: Any, method: str, event: MutableMapping[str, Any]) -> tuple[tuple[Any], dict[str, Any]]:
        """The arguments for `logging`. The traceback stays in the event, where secrets are removed."""
        wrapped, extra = ProcessorFormatter.wrap_for_formatter(logger, method, _Event(event))
        return wrapped, {**extra, "exc_info": False}

    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, *_shared(), as_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return logger


def file_of(settings: Settings) -> Path:
    return settings.var / "logs" / "proxy.log"


def configure(settings: Settings, quiet: Collection[str] = ()) -> None:
    """Send this program's logs to the file, and warnings to stderr. `quiet` events only go to the file: the person at
    the terminal is told of them in other words, or does not need them.

    A further call replaces the configuration. Raises `SandboxError` or OSError if the folder cannot be written.
    """

    def in_zone(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Show the time in the zone of the settings."""
        return {**event, "timestamp": times.written(datetime.fromisoformat(event["timestamp"]).timestamp())}

    path = file_of(settings)
    make_private(path.parent)
    to_file = _LogFile(path, maxBytes=ROTATE_BYTES, backupCount=ROTATE_KEPT, encoding="utf-8", delay=False)
    to_file.setFormatter(_JsonLines())
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setLevel(logging.WARNING)
    to_stderr.addFilter(lambda record: not (isinstance(record.msg, dict) and record.msg.get("event") in quiet))
    to_stderr.setFormatter(_formatter(in_zone, _console(colors=sys.stderr.isatty())))

    shut_down()
    logger = logging.getLogger(NAME)
    logger.handlers = [to_file, to_stderr]
    logger.setLevel(settings.log_level.upper())
    logger.propagate = False


def forget(settings: Settings, agent: Agent, ids: Iterable[str]) -> None:
    """Remove each line that has one of these ids or the agent's name, from the log file and the rotated ones. Lines of
    another owner's agent of that name stay; those of an earlier version name no owner.

    A line that another process writes to the file meanwhile may be lost.
    """
    names, of_ids = ({_as_written(text) for text in texts} for texts in ((agent.agent_id, agent.dir), ids))
    owner = _as_written(agent.owner)

    def is_about(line: bytes) -> bool:
        named = not names.isdisjoint(_AGENT.findall(line)) and {*_OWNER.findall(line)} <= {owner}
        return named or agent.dir.encode() in _DIR.findall(line) or not of_ids.isdisjoint(_ID.findall(line))

    current = file_of(settings)
    for path in current.parent.glob(f"{current.name}*"):
        _forget(path, is_about)


def _as_written(text: str) -> bytes:
    """A text as a line has it, without the quotes."""
    return json.dumps(_visible(text), ensure_ascii=False)[1:-1].encode("utf-8", "replace")


def _forget(path: Path, is_about: Callable[[bytes], bool]) -> None:
    """Remove the lines for which `is_about` is true. The file is rewritten in place, because other processes have it
    open for appending. This process writes nothing meanwhile."""
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
            remaining = [line for line in lines if not is_about(line)]
            if len(remaining) < len(lines):
                file.seek(0)
                file.writelines(remaining)
                file.truncate()
    except FileNotFoundError:  # rotated meanwhile
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


def _formatter(*renderers: Any) -> structlog.stdlib.ProcessorFormatter:
    """Formats events and plain `logging` records: exceptions as text, secrets removed, then through `renderers`."""
    from structlog.processors import format_exc_info
    from structlog.stdlib import ProcessorFormatter

    plain = ProcessorFormatter.remove_processors_meta
    return ProcessorFormatter(
        foreign_pre_chain=_shared(), processors=[plain, format_exc_info, _drop_secrets, *renderers]
    )


class _JsonLines(logging.Formatter):
    """One JSON object a line. Records of other libraries go through structlog; for our own events, of which each
    request has one, that took half of the time."""

    def __init__(self) -> None:
        from structlog.processors import JSONRenderer, format_exc_info

        super().__init__()
        self._of_others = _formatter(JSONRenderer(ensure_ascii=False))
        self._with_traceback = format_exc_info
        self._encode = json.JSONEncoder(ensure_ascii=False).encode

    def format(self, record: logging.LogRecord) -> str:
        if not isinstance(record.msg, _Event):
            return self._of_others.format(record)
        event: MutableMapping[str, Any] = record.msg
        if "exc_info" in event:
            event = self._with_traceback(None, "", record.msg.copy())
        return self._encode(_drop_secrets(None, "", event))


def _drop_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: _clean(key, value) for key, value in event.items()}


def _visible(text: str) -> str:
    """Escape control characters, bidirectional marks and line separators."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\u{ord(char):04x}" for char in text)


@lru_cache(KNOWN_NAMES)
def _hides(name: str) -> Literal["all", "texts", "nothing"]:
    """Which values of a field with this name are hidden."""
    plain = name.lower().replace("-", "_")
    return "all" if plain in _NEVER else "texts" if _SECRET_NAME.search(plain) else "nothing"


def _clean(name: str, value: Any) -> Any:
    """The value in plain JSON types, with secrets hidden and texts cut."""
    hides = _hides(name[-NAME_END:])
    if hides == "all" or (hides == "texts" and isinstance(value, str | bytes)):
        return redact.HIDDEN
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {_visible(str(key)): _clean(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item) for item in value]
    whole = str(value)
    text = redact.text(whole) if len(whole) <= TEXT_LIMIT else redact.head(whole, TEXT_LIMIT + 1)
    text = text if text.isprintable() else _visible(text)
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}… ({len(whole)} characters)"
