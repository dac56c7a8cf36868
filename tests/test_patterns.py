"""No text makes one of our patterns slow: each is tried with repeats of what it looks for, in a bounded time of the
processor. What is linear takes a tenth of it at most, what is quadratic several times as much."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from re import _constants, _parser
from types import FrameType, ModuleType
from typing import Any

import pytest

import cli_session_proxy

LENGTH = 32 * 1024
BUDGET = 0.3  # seconds of the processor for one text

# Patterns that only see what is short, or where one failure ends the search.
BOUNDED = {
    "cli_session_proxy.backends.claude.process.capability": "4 KB of what a CLI says of its version",
    "cli_session_proxy.stores.sql.searching._TOKEN": "the loop ends at the first string that is cut off",
}
SKIPPED = ("cli_session_proxy.http.ui.script",)


def patterns() -> Iterator[tuple[str, re.Pattern[Any], frozenset[str]]]:
    """Each with where it stands, and the methods that it is used by (all, where it has no name)."""
    for found in pkgutil.walk_packages(cli_session_proxy.__path__, "cli_session_proxy."):
        if found.name.endswith("__main__") or found.name.startswith(SKIPPED) or found.name in BOUNDED:
            continue
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            if f"{found.name}.{name}" not in BOUNDED:
                yield from (
                    (f"{found.name.removeprefix('cli_session_proxy.')}.{name}", one, used(module, name))
                    for one in inside(value)
                )


def inside(value: object) -> Iterable[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        return [value]
    return [one for part in value for one in inside(part)] if isinstance(value, tuple | list) else []


def used(module: ModuleType, name: str) -> frozenset[str]:
    with open(module.__file__ or "", encoding="utf-8") as file:
        called = re.findall(rf"\b{name}\.(search|match|fullmatch|sub|findall|finditer)\b", file.read())
    return frozenset(called or ["fullmatch", "finditer"])


def letters(tree: Any) -> Iterator[int]:
    """Of what the pattern names, in its order."""
    for kind, told in tree:
        if kind in (_constants.LITERAL, _constants.NOT_LITERAL):
            yield told
        elif kind is _constants.RANGE:
            yield told[0]
        elif kind is _constants.CATEGORY:
            yield ord("0") if "DIGIT" in str(told) else ord(" ") if "SPACE" in str(told) else ord("a")
        elif kind is _constants.IN:
            yield from letters(told)
        elif kind is _constants.BRANCH:
            yield from itertools.chain.from_iterable(map(letters, told[1]))
        elif isinstance(told, tuple) and isinstance(told[-1], _parser.SubPattern):
            yield from letters(told[-1])
        elif isinstance(told, _parser.SubPattern):
            yield from letters(told)


def texts(pattern: re.Pattern[Any]) -> Iterator[Any]:
    flags = pattern.flags & ~(re.UNICODE if isinstance(pattern.pattern, bytes) else 0)
    seen = [*dict.fromkeys(letters(_parser.parse(pattern.pattern, flags)))]
    chars = dict.fromkeys((*seen[:3], *seen[-1:], ord(" "), ord("\n")))
    made: Callable[[Iterable[int]], Any] = (
        bytes if isinstance(pattern.pattern, bytes) else lambda of: "".join(map(chr, of))
    )
    beginnings = {made(seen[:1]), made(seen[:2]), made(())}
    for size in (1, 2):
        # in one order: two letters in turn are the same two in the other order, one letter later
        for pump in itertools.combinations(
            [one for one in chars if one < 0xD800 and (one < 256 or made is not bytes)], size
        ):
            for beginning in beginnings:
                yield beginning + made(pump) * (LENGTH // size) + made([0x7F])


@contextmanager
def budget(where: str) -> Iterator[None]:
    def over(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"{where} is slow")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, BUDGET)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def tried(where: str, pattern: re.Pattern[Any], methods: Iterable[str]) -> None:
    for text in texts(pattern):
        for method in methods:
            with budget(f"{where}.{method}: {text[:4]!r} × {LENGTH}"):
                if method == "sub":
                    pattern.sub(text[:0], text)
                elif method == "finditer":
                    for _ in pattern.finditer(text):
                        pass
                else:
                    getattr(pattern, method)(text)


def test_no_text_makes_a_pattern_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    found = [*patterns()]
    assert len(found) > 80
    for where, pattern, methods in found:
        tried(where, pattern, methods)


@pytest.mark.parametrize(
    ("pattern", "method"),
    [(r"(a+)+$", "match"), (r"\s*x?\s*y", "fullmatch"), (r"\s*y", "search")],
)
def test_a_slow_pattern_is_found(pattern: str, method: str) -> None:
    with pytest.raises(AssertionError, match="is slow"):
        tried("this", re.compile(pattern), [method])
