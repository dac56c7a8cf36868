"""The contract names what the code has, and nothing else where it lists."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
import typer.main

from cli_session_proxy import errors
from cli_session_proxy.aside import pool
from cli_session_proxy.backends.claude.transcript import entries
from cli_session_proxy.cli import app as commands
from cli_session_proxy.domain import limits, structured
from cli_session_proxy.engine import attempt
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export import shown
from cli_session_proxy.http import connection, keys, large_turns
from cli_session_proxy.http.server import create_app
from cli_session_proxy.http.ui import routes as ui
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores import held
from cli_session_proxy.stores.sql import reading, side_data
from cli_session_proxy.wires import asgi
from cli_session_proxy.wires.asgi import Address

from ..conftest import ROOT, MakeSettings

INDEX = (ROOT / "docs" / "contract.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "contract").glob("*.md"))}
TEXT = "\n".join(PAGES.values())
# Shown under Google's own version of the path; the page's own views are not part of the contract.
NOT_NAMED = re.compile(
    r"/v1/interactions.*|/v1(beta)?/models/\{target.*|/v1/(assistants|threads).*|/ui/.*|/v1/chains/.+/.+"
)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found, title
    return found[1]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def subclasses(kind: type[errors.ProxyError]) -> Iterable[type[errors.ProxyError]]:
    for sub in kind.__subclasses__():
        yield from (sub, *subclasses(sub))


def test_the_index_leads_to_every_section_and_keeps_the_addresses_of_its_own() -> None:
    for name, text in PAGES.items():
        for title in re.findall(r"^## (.+)$", text, re.M):
            anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            assert f'<a id="{anchor}"></a>[{title}](contract/{name}#{anchor})' in INDEX


def test_every_command_is_named() -> None:
    there = set(typer.main.get_command(commands).commands)  # type: ignore[attr-defined]  # a group
    first = section("Commands").partition("Each takes")[0]
    assert {name.split()[0] for name in named(first)} == there


def test_every_setting_is_named() -> None:
    names = re.findall(r"^\| `(\w+)` \|", section("Settings"), re.M)
    assert sorted(names) == sorted(Settings.model_fields)


def test_every_error_is_named_with_its_status() -> None:
    listed = {
        (int(status), code)
        for line in section("Errors").splitlines()
        if line.startswith("| ")
        for status, code in re.findall(r"(\d{3}) `(\w+)`", line.split("|")[1])
    }
    assert listed == {(kind.status, kind.code) for kind in subclasses(errors.ProxyError)}


def test_every_limit_is_stated_as_it_is_enforced() -> None:
    mib = 1024 * 1024
    enforced: list[list[float]] = [
        [limits.DEPTH, limits.VALUES], [limits.LINE_VALUES, limits.TURN_VALUES],
        [limits.INPUT_VALUES, limits.INPUT_BYTES], [limits.MESSAGES],
        [side_data.MOST_WRITTEN], [1, ui.PAGE_BYTES], [limits.TOOLS],
        [limits.SCHEMA_VALUES], [limits.STOPS, limits.STOP_LENGTH], [limits.DEPTH],
        [asgi.MIDDLING, large_turns.LARGE, pool.READING_SECONDS, pool.READING_MEMORY // mib],
        [pool.CHECKING_SECONDS, pool.CHECKING_MEMORY // mib], [pool.WAITING],
        [connection.HEAD, connection.FIELDS, 431, keys.PARAMETERS], [connection.AHEAD], [connection.UNREAD],
        [connection.UNREAD_OF_STRANGERS, connection.STALLED_STRANGER, 1],
        [entries.MAX_BYTES], [held.UNCOUNTED, held.MOST_OF_AN_OWNER, held.MOST, held.PATIENCE],
        [attempt.MOST_ANSWER, attempt.A_VALUE, attempt.MOST_TOOL_TEXT],
    ]  # fmt: skip
    rows = [line for line in section("Limits").splitlines() if line.startswith("| ")][1:]
    codes = {str(status) for kind in subclasses(errors.ProxyError) for status in [kind.status]}
    stated = [[n for n in re.findall(r"\d+(?:,\d+)*", row) if n not in codes] for row in rows]
    assert stated == [[f"{number:,.0f}" for number in row] for row in enforced]
    assert reading.MOST_OF_A_PATH == entries.MAX_BYTES
    assert f"{structured.PATTERN_STEPS:,} steps" in section("Limits")


@pytest.mark.parametrize("kind", [shown.ChainDump, shown.NumberedDump, shown.SessionDump, shown.LinkDump])
def test_every_field_of_the_dump_is_named(kind: type) -> None:
    shape = section("The dump").partition("```text")[2].partition("```")[0]
    assert set(kind.__annotations__) <= set(re.findall(r"\w+", shape))


def test_every_route_is_named(make_settings: MakeSettings) -> None:
    settings = make_settings()
    routes = [route for route in create_app(Engine(settings), settings).routes if isinstance(route, Address)]
    there = {route.path.replace(":path", "") for route in routes if not NOT_NAMED.fullmatch(route.path)}
    assert len(there) > 20
    listed = {re.sub(r"\?.*", "", name) for name in named(section("Routes"))}
    assert there <= listed
