"""A dump in a terminal: not a letter of what was said is lost, and what nobody pages to is not made."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli_session_proxy.commands import rendering
from cli_session_proxy.commands.dumping import Shown
from cli_session_proxy.commands.rendering import DumpPages, dump_by_the_page
from cli_session_proxy.domain.models import Message
from cli_session_proxy.errors import NotFound
from cli_session_proxy.sandbox import make_private
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy_store_conformance.samples import a_finished_turn

from ..test_cli import fill

TURNS = 300


@given(st.lists(st.text("abcdefgh漢字.-", min_size=1, max_size=90), min_size=1, max_size=40), st.integers(20, 100))
def test_every_letter_is_shown_however_wide_the_terminal_is(words: list[str], width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(DumpPages("    " + " ".join(words)))
    assert isinstance(console.file, io.StringIO)
    assert "".join(console.file.getvalue().split()) == "".join(words)


async def filled(settings: Settings) -> None:
    make_private(settings.var)
    store = store_for(settings)
    await store.open()
    try:
        agent = await store.ensure_agent("local", "long", "long", named=True, now=1.0)
        said = ({"type": "text", "text": "an answer"},)
        turns = [
            a_finished_turn(
                f"t{n}", agent.key, None, "sonnet", (Message.user(f"question {n}"),), said, (), 1.0, None, n
            )
            for n in range(TURNS)
        ]
        await store.import_turns(turns)
    finally:
        await store.close()


def test_of_a_long_chain_only_what_is_read_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(var=tmp_path / "var")
    asyncio.run(filled(settings))
    drawn: list[str] = []
    read: list[str] = []

    class Counted(DumpPages):
        def __init__(self, text: str, **options: Any) -> None:
            drawn.append(text)
            super().__init__(text, **options)

    def pager(pages: Iterator[str], *, color: bool) -> None:
        assert color
        read.extend(islice(pages, 3))

    monkeypatch.setattr(rendering, "DumpPages", Counted)
    monkeypatch.setattr(click, "echo_via_pager", pager)
    dump_by_the_page(settings, "local", "long", Shown("markdown"))
    assert len(drawn) == 3
    assert ["question 0" in page for page in read] == [False, True, False]
    assert "question 1" in read[2]


def test_all_of_it_is_there_for_who_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(var=tmp_path / "var")
    asyncio.run(filled(settings))
    pages: list[str] = []

    def pager(given: Iterable[str], *, color: bool) -> None:
        assert color
        pages.extend(given)

    monkeypatch.setattr(click, "echo_via_pager", pager)
    dump_by_the_page(settings, "local", "long", Shown("markdown"))
    assert sum("question" in page for page in pages) == TURNS


def test_who_is_not_there_opens_no_pager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click, "echo_via_pager", lambda *_, **__: pytest.fail("a pager was opened"))
    fill(tmp_path / "var", "ada")
    with pytest.raises(NotFound, match="there is no agent"):
        dump_by_the_page(Settings(var=tmp_path / "var"), "local", "nobody", Shown("markdown"))
