"""How deep and how large a JSON value is, counted without recursion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.domain.limits import DEPTH, TooDeep, at_most, holds_more, is_deeper, loads
from cli_session_proxy.errors import InvalidRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def count_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_of, inner))


@given(JSON)
def test_depth_and_count_are_those_of_a_plain_walk(value: Any) -> None:
    depth, count = depth_of(value), count_of(value)
    assert [is_deeper(value, most) for most in (depth, depth - 1)] == [False, depth > 0]
    assert [holds_more(value, most) for most in (count, count - 1)] == [False, True]


@pytest.mark.parametrize("deep", [b"[%b]", b'{"a":%b}', b'[{"b":[%b]}]'])
@pytest.mark.parametrize("levels", [DEPTH + 1, 600, 2_000, 200_000])
def test_what_nests_too_deep_is_refused_however_deep_python_itself_would_go(deep: bytes, levels: int) -> None:
    opening, closing = deep.split(b"%b")
    text = opening * levels + b"1" + closing * levels
    for form in (text, text.decode()):
        with pytest.raises(TooDeep, match="deeper than 128"):
            loads(form)


def test_what_nests_as_deep_as_it_may_is_read() -> None:
    text = "[" * DEPTH + "]" * DEPTH
    assert depth_of(loads(text)) == DEPTH
    assert len(loads("[" + ",".join(["[]"] * 1000) + "]")) == 1000


def test_a_text_is_parsed_once_whatever_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that ended with a line end took twice as long."""
    monkeypatch.setattr(json, "loads", None)
    for end in ("", "\n", " \r\n\t"):
        assert loads('{"a": 1}' + end) == loads(b'{"a": 1}' + end.encode()) == {"a": 1}
    for end in ("x", "\n{}", "\u00a0", "\x0b"):
        with pytest.raises(json.JSONDecodeError, match="Extra data"):
            loads('{"a": 1}' + end)


def test_more_than_may_be_names_the_field_and_the_number() -> None:
    at_most([1, 2], 2, "stop")
    with pytest.raises(InvalidRequest, match="stop has 3 entries, and 2 is the most") as refused:
        at_most([1, 2, 3], 2, "stop")
    assert refused.value.param == "stop"
