"""Reads the package's source as a plan of a house: which module imports which, and which helpers are shreds.

A room is a folder of the package's top floor; of `backends` and of `backends/claude`, each folder and each loose module
is a room of its own. A module on the top floor is one too.

    python -m tests.house [folder of a package]
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "cli_session_proxy"
# Folders that are split into rooms, instead of being one.
SPLIT = ("backends", "backends/claude")
# Lines of a shred, from `def` to its end, with the docstring.
SHRED = 6


@dataclass(frozen=True, slots=True)
class Import:
    """One import, at the top, in a function or under TYPE_CHECKING. Paths are relative to the package."""

    module: str
    line: int
    imported: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.imported}"


@dataclass(frozen=True, slots=True)
class Helper:
    module: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.name}"


def top_floor(package: Path = PACKAGE) -> list[str]:
    return sorted(path.name for path in package.glob("*.py"))


def imports(package: Path = PACKAGE) -> Iterator[Import]:
    """Every import of the package's own modules, wherever it stands."""
    known = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    for path in sorted(package.rglob("*.py")):
        here = path.relative_to(package)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                dotted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = [package.name, *here.parent.parts][: len(here.parent.parts) + 2 - node.level]
                source = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
                dotted = [f"{source}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in dotted:
                parts = name.split(".")
                if parts[0] != package.name:
                    continue
                # `from room import name`: a module, or something that is defined in one.
                for part in (parts[1:], parts[1:-1]):
                    file = "/".join(part)
                    found = next((f for f in (f"{file}.py", f"{file}/__init__.py".lstrip("/")) if f in known), None)
                    if found is not None:
                        yield Import(here.as_posix(), node.lineno, found)
                        break


def size(package: Path = PACKAGE) -> tuple[int, int]:
    """Lines and functions of the package's modules."""
    sources = [path.read_text() for path in package.rglob("*.py")]
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
    return sum(len(source.splitlines()) for source in sources), functions


def room(module: str) -> str:
    parts = module.removesuffix("/__init__.py").split("/")
    at = 1
    while "/".join(parts[:at]) in SPLIT and at < len(parts):
        at += 1
    return "/".join(parts[:at])


def circles(found: list[Import]) -> list[set[str]]:
    """Rooms that import each other, directly or through others."""
    below: Mapping[str, set[str]] = defaultdict(set)
    for one in found:
        if room(one.module) != room(one.imported):
            below[room(one.module)].add(room(one.imported))

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for there in below.get(left.pop(), set()) - seen:
                seen.add(there)
                left.append(there)
        return seen

    reach = {start: reached(start) for start in list(below)}
    found_in = {frozenset(other for other in reach[one] if one in reach.get(other, ())) for one in reach}
    return [set(circle) for circle in found_in if circle]


def shreds(package: Path = PACKAGE) -> list[Helper]:
    """Private helpers of at most `SHRED` lines, functions and methods, whose name is used once in their own module."""
    found: list[Helper] = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        used = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, (ast.Name, ast.Attribute))
        )
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.end_lineno is None:
                continue
            private = node.name.startswith("_") and not node.name.startswith("__")
            if private and node.end_lineno - node.lineno < SHRED and used[node.name] == 1:
                found.append(Helper(path.relative_to(package).as_posix(), node.lineno, node.name))
    return found


def unowned(package: Path = PACKAGE) -> list[str]:
    """Where a log line names an agent otherwise than by `Agent.named_in_logs`, so perhaps without its owner."""
    return [
        f"{path.relative_to(package).as_posix()}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.match(r"(log\.\w+|failures_logged)$", ast.unparse(node.func))
        if any(keyword.arg in ("agent", "owner") for keyword in node.keywords)
    ]


def main() -> None:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    every = list(imports(package))
    little = shreds(package)
    for helper in little:
        print(helper)
    for rooms, number in Counter(room(helper.module) for helper in little).most_common():
        print(f"{number:5} shreds in {rooms}")
    print("{:,} lines, {:,} functions".format(*size(package)))
    print(f"{len(top_floor(package))} modules on the top floor")
    print(f"{len(little)} private helpers of at most {SHRED} lines are used once")
    for circle in circles(every):
        print("circle:", ", ".join(sorted(circle)))
        for one in every:
            if {room(one.module), room(one.imported)} <= circle and room(one.module) != room(one.imported):
                print("   ", one)


if __name__ == "__main__":
    main()
