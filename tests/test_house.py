"""The house keeps its plan: few modules on top, arrows that go down only, steps that stand where they are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.trace import trace

from .conftest import ROOT
from .house import Import, circles, imports, room, shreds, size, top_floor

TOP_FLOOR = 12
# Lines and functions of the package as they are: a change that adds some says so here. Wanted: 50,000 and 3,100.
LINES = 61_283
FUNCTIONS = 3_723
SHREDS = 44


@pytest.fixture(scope="module")
def every() -> list[Import]:
    return list(imports())


def test_the_top_floor_holds_few_modules() -> None:
    assert len(top_floor()) <= TOP_FLOOR, top_floor()


def test_no_rooms_import_each_other_in_a_circle(every: list[Import]) -> None:
    assert circles(every) == []


def test_only_backends_commands_and_the_self_check_know_the_claude_backend(every: list[Import]) -> None:
    assert wrong(every, "backends/claude", but=("backends/", "commands/", "selfcheck/")) == []


@pytest.mark.parametrize("core", ["domain", "engine", "stores"])
@pytest.mark.parametrize("above", ["wires", "http", "sdk", "commands", "backends/claude"])
def test_the_core_knows_nothing_above_it(every: list[Import], core: str, above: str) -> None:
    assert [str(one) for one in every if within(one.module, core) and within(one.imported, above)] == []


def test_a_wire_imports_no_other_wire(every: list[Import]) -> None:
    between = [(one, wire_of(one.module), wire_of(one.imported)) for one in every]
    assert [str(one) for one, wire, other in between if wire and other and wire != other] == []


def test_the_sdk_needs_no_http_door(every: list[Import]) -> None:
    assert [str(one) for one in every if within(one.module, "sdk") and within(one.imported, "http")] == []


def test_the_benchmark_imports_nothing_of_the_proxy() -> None:
    sources = [path.read_text() for path in (ROOT / "benchmark").rglob("*.py")]
    assert sources
    assert not [
        source for source in sources if re.search(r"^\s*(from|import) +cli_session_proxy", source, re.MULTILINE)
    ]


def test_few_short_helpers_are_used_once() -> None:
    found = shreds()
    assert len(found) <= SHREDS, "\n".join(map(str, found))


def test_the_package_does_not_grow_unnoticed() -> None:
    lines, functions = size()
    assert lines <= LINES
    assert functions <= FUNCTIONS


@pytest.mark.usefixtures("claude_2")
async def test_a_trace_of_a_warm_turn_goes_from_the_socket_to_the_acknowledgement() -> None:
    found = await trace(ROOT, stream=False)
    steps = [
        ("http/connection.py", "Connection.data_received"),
        ("engine/engine.py", "Engine.submit"),
        ("backends/claude/backend.py", "ClaudeBackend.prepare"),
        ("backends/claude/process/process.py", "ClaudeProcess.turn"),
        ("engine/live.py", "Answer.acknowledge"),
    ]
    assert [step for step in found.functions if step in steps] == steps


# --- the reader itself


@pytest.fixture
def house(tmp_path: Path) -> Path:
    package = tmp_path / "house"
    for file, source in {
        "__init__.py": "",
        "a/__init__.py": "",
        "a/one.py": "from ..b import two\n",
        "b/__init__.py": "",
        "b/two.py": "def go() -> None:\n    from house.a.one import two\n",
        "c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import one\n",
        "backends/__init__.py": "",
        "backends/base.py": "",
        "backends/claude/__init__.py": "",
        "backends/claude/process/__init__.py": "from ... import base\n",
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(source)
    return package


def test_imports_are_found_wherever_they_stand(house: Path) -> None:
    assert {(one.module, one.imported) for one in imports(house)} == {
        ("a/one.py", "b/two.py"),
        ("b/two.py", "a/one.py"),
        ("c.py", "a/one.py"),
        ("backends/claude/process/__init__.py", "backends/base.py"),
    }


def test_a_circle_is_found_and_what_hangs_on_it_is_none(house: Path) -> None:
    assert circles(list(imports(house))) == [{"a", "b"}]


def test_a_room_is_a_folder_and_the_backends_are_split() -> None:
    assert [room(path) for path in ("http/ui/routes.py", "errors.py", "backends/base.py")] == [
        "http", "errors.py", "backends/base.py",
    ]  # fmt: skip
    assert room("backends/claude/process/pool.py") == "backends/claude/process"
    assert room("backends/claude/process/__init__.py") == "backends/claude/process"


def test_a_shred_is_short_private_and_used_once(tmp_path: Path) -> None:
    lines = "    pass\n" * 6
    (tmp_path / "m.py").write_text(
        "def _once(): pass\ndef _twice(): pass\ndef public(): pass\n"
        f"def _long():\n{lines}\n"
        "class C:\n    def _method(self): pass\n    def __init__(self): self._method()\n"
        "_once(); _twice(); _twice(); public(); _long()\n"
    )
    assert [helper.name for helper in shreds(tmp_path)] == ["_once", "_method"]


def within(module: str, folder: str) -> bool:
    return module.startswith(f"{folder}/")


def wire_of(module: str) -> str | None:
    parts = module.split("/")
    return parts[1] if parts[0] == "wires" and len(parts) > 2 else None


def wrong(every: list[Import], below: str, *, but: tuple[str, ...]) -> list[str]:
    return [str(one) for one in every if within(one.imported, below) and not one.module.startswith(but)]
