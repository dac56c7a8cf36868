"""Who waits for the migration of a large store is told how far it is: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from cli_session_proxy.commands import terminal as module
from cli_session_proxy.commands.terminal import migration_progress

from ..until import until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_terminal_shows_a_bar_and_then_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")  # one that can move its cursor
    monkeypatch.setattr(module, "SOON", -1.0)
    with migration_progress() as tell:
        tell("a copy of the store", 5, 10)
        tell("totals of agents", 3, 4)
        await until(lambda: "bringing the store up to date: totals of agents" in screen.getvalue())
        await until(lambda: "75%" in screen.getvalue())
    assert screen.getvalue().endswith("\x1b[2K")  # its line is erased


def test_elsewhere_it_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with migration_progress() as tell:
        tell("typed turns", 1, 4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "EVERY", -1.0)
    with migration_progress() as tell:
        tell("typed turns", 1, 4)
        tell("typed turns", 0, 0)
    said = "bringing the store up to date: typed turns, 25 %\nbringing the store up to date: typed turns, 0 %\n"
    assert capsys.readouterr().err == said


def test_a_migration_that_is_done_at_once_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with migration_progress() as tell:
        tell("leases", 1, 1)
    assert screen.getvalue() == ""
