"""What is logged, what is not, and where."""

from __future__ import annotations

import errno
import json
import logging
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from structlog import contextvars

from cli_session_proxy import logs, redact
from cli_session_proxy.domain import times
from cli_session_proxy.domain.models import Agent
from cli_session_proxy.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    settings = Settings(var=tmp_path / "var")
    logs.configure(settings)
    yield settings
    logs.shut_down()
    contextvars.clear_contextvars()


def lines(settings: Settings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logs.file_of(settings).read_text().splitlines()]


def test_a_line_is_json_with_its_request(settings: Settings) -> None:
    with contextvars.bound_contextvars(request_id="req_1"):
        logs.get().info("turn completed", turn_id="turn_1", seconds=0.5)
    logs.get().info("idle")
    first, second = lines(settings)
    assert first.items() >= {"event": "turn completed", "request_id": "req_1", "turn_id": "turn_1"}.items()
    assert first.items() >= {"level": "info", "seconds": 0.5}.items()
    assert "request_id" not in second


def test_only_warnings_reach_the_terminal(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(settings)  # bound to the stderr that is captured
    logs.get().info("quiet")
    logs.get().warning("loud", agent_id="a")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loud" in captured.err
    assert "quiet" not in captured.err
    assert [line["event"] for line in lines(settings)] == ["quiet", "loud"]


def test_what_is_told_there_in_words_reaches_the_file_alone(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(settings, quiet=("turn_failed",))
    logs.get().warning("turn_failed", code="upstream_error")
    logs.get().warning("loud")
    terminal = capsys.readouterr().err
    assert "turn_failed" not in terminal
    at = datetime.fromisoformat(lines(settings)[1]["timestamp"]).timestamp()
    assert terminal.startswith(f"{times.written(at)} [warning")
    assert [line["event"] for line in lines(settings)] == ["turn_failed", "loud"]


def test_a_full_disk_is_told_once_and_without_a_traceback(
    settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = [one for one in logging.getLogger(logs.NAME).handlers if isinstance(one, logs._LogFile)]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(file, "flush", full)
        for _ in range(3):
            logs.get().info("lost")
    said = capsys.readouterr().err
    assert said == f"the log {logs.file_of(settings)} cannot be written (No space left on device): its lines are lost\n"


def test_debug_needs_to_be_asked_for(settings: Settings) -> None:
    logs.get().debug("detail")
    assert lines(settings) == []
    logs.configure(settings.model_copy(update={"log_level": "debug"}))
    logs.get().debug("detail")
    assert [line["event"] for line in lines(settings)] == ["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "SECRET"},
        {"messages": [{"role": "user", "content": "SECRET"}]},
        {"env": {"ANTHROPIC_API_KEY": "SECRET"}},
        {"api_key": "SECRET"},
        {"detail": {"Authorization": "SECRET", "idempotency_key": "SECRET"}},
        {"error": "401 for sk-ant-SECRET-0123456789"},
        {"detail": [{"why": "header authorization: Bearer SECRET-0123456789"}]},
    ],
)
def test_secrets_and_prompts_are_never_written(
    settings: Settings, capsys: pytest.CaptureFixture[str], fields: dict[str, Any]
) -> None:
    logs.configure(settings)
    logs.get().warning("event", **fields)
    written = logs.file_of(settings).read_text()
    assert "event" in written
    assert "SECRET" not in written + capsys.readouterr().err


def test_a_key_in_the_text_or_the_traceback_is_hidden(settings: Settings) -> None:
    try:
        raise ValueError("bad key sk-ant-api03-SECRETSECRET")
    except ValueError:
        logs.get().exception("failed with sk-ant-api03-SECRETSECRET")
    written = logs.file_of(settings).read_text()
    assert "ValueError" in written
    assert "SECRET" not in written


def test_numbers_named_key_are_no_secret(settings: Settings) -> None:
    logs.get().info("stored", agent_key=7)
    assert lines(settings)[0]["agent_key"] == 7


def test_nothing_in_a_line_steers_a_terminal_or_ends_the_line(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b]0;title\x07b\x9b31mc\u202ed\u2066e\u2028f\u2029g\x85h\u200bi\r"
    logs.configure(settings)
    logs.get().warning("odd", agent=evil, inner={evil: [evil]})
    logs.shut_down()
    file = logs.file_of(settings).read_text("utf-8")
    for said in (file, capsys.readouterr().err):
        assert all(char.isprintable() or char == "\n" for char in said), said
        assert len(said.splitlines()) == 1
    assert "\\\\u202e" in file
    logs.forget(settings, Agent(1, "local", evil, "evil", True, None, 0.0), [])
    assert logs.file_of(settings).read_text() == ""


@pytest.mark.parametrize("name", ["event", "refused", "level", "info", "agent"])
def test_a_deleted_agents_name_takes_no_lines_along_that_are_not_about_it(settings: Settings, name: str) -> None:
    """Whoever has a key may name an agent, and delete it."""
    logs.configure(settings)
    logs.get().info("refused", code="unauthorized", why='"agent": "info"')
    logs.get().info("adopted", agent=name)
    logs.forget(settings, Agent(1, "local", name, "dir", True, None, 0.0), [])
    assert [line["event"] for line in lines(settings)] == ["refused"]


def test_a_deleted_agents_name_takes_no_lines_of_others_along(settings: Settings) -> None:
    """Neither those of another owner's agent of that name, nor requests whose id it was given as its name."""
    request_id = "0b2b5c3e-6f6b-4a4e-9d0e-2f9d3a7c1e55"
    logs.configure(settings)
    for agent in ("a", request_id):
        logs.get().info("kept", owner="alice", agent=agent)
        logs.get().info("gone", owner="bob", agent=agent)
        logs.get().info("gone", agent=agent)  # of an earlier version
        logs.get().info("kept", dir=agent)  # of the agent that has this directory
        logs.get().info("gone", dir="dir")
        logs.get().info("kept", request_id=request_id)
        logs.get().info("gone", session_id="7d1ccf1e-66a7-4c3b-8f83-0f0c54ad3a11")
        logs.forget(settings, Agent(1, "bob", agent, "dir", True, None, 0.0), ["7d1ccf1e-66a7-4c3b-8f83-0f0c54ad3a11"])
    assert [line["event"] for line in lines(settings)] == ["kept"] * 6


def test_a_long_value_is_cut(settings: Settings) -> None:
    logs.get().info("big", error="x" * 100_000)
    assert len(logs.file_of(settings).read_text()) < 5_000


def test_of_a_long_value_its_beginning_is_looked_at(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CLI said in 40 MB why it could not write: to look for secrets in it held everybody up for 27 s."""
    looked: list[int] = []
    text = redact.text

    def look(value: str) -> str:
        looked.append(len(value))
        return text(value)

    monkeypatch.setattr(redact, "text", look)
    logs.get().info("big", error="_token=a" * 1_000_000)
    assert max(looked) < 20_000
    assert "(8000000 characters)" in logs.file_of(settings).read_text()


def test_the_file_rotates_and_is_bounded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "ROTATE_BYTES", 1_000)
    logs.configure(settings)
    for number in range(200):
        logs.get().info("line", number=number)
    files = sorted(logs.file_of(settings).parent.iterdir())
    assert len(files) == 1 + logs.ROTATE_KEPT
    assert all(file.stat().st_size <= 1_000 for file in files)
    assert lines(settings)[-1]["number"] == 199


def test_a_file_that_cannot_be_rotated_does_not_grow(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_names: object) -> None:
        raise OSError("it cannot be renamed")

    monkeypatch.setattr(logs, "ROTATE_BYTES", 1_000)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logs.configure(settings)
    monkeypatch.setattr("logging.handlers.RotatingFileHandler.rotate", refuses)
    for number in range(50):
        logs.get().info("line", number=number)
    assert 0 < logs.file_of(settings).stat().st_size <= 1_000


def test_a_line_for_the_file_is_made_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    to_file = logging.getLogger(logs.NAME).handlers[0]
    made: list[str] = []

    def counted(record: logging.LogRecord) -> str:
        made.append(logging.Handler.format(to_file, record))
        return made[-1]

    monkeypatch.setattr(to_file, "format", counted)
    logs.get().info("line", number=17)
    assert [json.loads(line)["number"] for line in made] == [17]


def test_plain_logging_of_our_modules_is_kept_too(settings: Settings) -> None:
    logging.getLogger("cli_session_proxy.somewhere").warning("plain %s", "sk-ant-SECRET-0123456789")
    (line,) = lines(settings)
    assert line["level"] == "warning"
    assert "SECRET" not in line["event"]


def test_the_folder_is_private(settings: Settings) -> None:
    assert stat.S_IMODE(logs.file_of(settings).parent.stat().st_mode) == 0o700


IN_A_HOST = """
import logging, sys
import structlog
from cli_session_proxy import logs
from cli_session_proxy.domain import times
{host}
try:
    api_key = "kept in a " + "local variable"
    raise ValueError("bad key sk-ant-api03-SECRETSECRET")
except ValueError:
    logs.get().exception("it_failed", prompt="SECRET", turn_id="turn_1")
structlog.get_logger().info("the host's own")
"""


@pytest.mark.parametrize("host", ["", "logging.basicConfig(format='%(levelname)s %(name)s %(message)s')"])
def test_a_host_gets_one_line_through_its_own_logging(host: str) -> None:
    """A library prints nothing on stdout, shows no local variable, and leaves the host's structlog alone."""
    code = IN_A_HOST.format(host=host)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "it_failed" in done.stderr
    assert "turn_1" in done.stderr
    assert "ValueError: bad key" in done.stderr
    assert ("ERROR cli_session_proxy" in done.stderr) == bool(host)
    for hidden in ("SECRET", "local variable"):
        assert hidden not in done.stderr
    assert "it_failed" not in done.stdout
    assert "the host's own" in done.stdout  # structlog's default for whoever configures nothing


def test_only_the_logs_know_structlog() -> None:
    """Its own `get_logger` would print on stdout, in a form of its host's."""
    package = Path(logs.__file__).parent
    assert [file.name for file in package.rglob("*.py") if "structlog." in file.read_text()] == ["logs.py"]
