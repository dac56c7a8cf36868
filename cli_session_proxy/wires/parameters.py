"""The parameters of a turn under each wire's own names. Pure.

A wire's `PARAMETERS` say what it calls them, with their place in the body: so they are read, and so one that the turn
runs without is named in X-Ignored-Params.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..domain.parameters import Name, Parameters
from ..errors import InvalidRequest
from .common import wrong_type

Names = Mapping[Name, str]

# OpenAI's and Google's scale of temperature; Anthropic's goes to 1.
HOTTEST = 2.0
# A seed is any whole number of 64 bits.
SEEDS = (-(2**63), 2**63 - 1)


def read(
    fields: Mapping[str, Any],
    names: Names,
    *,
    thinking: bool | None = None,
    get: Callable[[Mapping[str, Any], str], Any] = lambda fields, name: fields.get(name),
) -> Parameters:
    """What these fields say. Raises `InvalidRequest`, which names the field."""

    def number(name: Name, least: float, most: float | None) -> float | None:
        if name not in names:
            return None
        where = names[name]
        value = get(fields, where.rpartition(".")[2])
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(where, "a number")
        if not least <= value or (most is not None and value > most):
            bounds = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise InvalidRequest(f"{where} must be {bounds}", param=where)
        return value

    def whole(name: Name, least: float, most: float | None = None) -> int | None:
        value = number(name, least, most)
        if isinstance(value, float) and not value.is_integer():
            raise wrong_type(names[name], "a whole number")
        return None if value is None else int(value)

    return Parameters(
        max_tokens=whole("max_tokens", 1),
        temperature=number("temperature", 0, HOTTEST),
        top_p=number("top_p", 0, 1),
        top_k=whole("top_k", 0),
        thinking=thinking,
        seed=whole("seed", *SEEDS),
    )


def told(names: Names, unmet: Iterable[Name]) -> list[str]:
    """The wire's own names of these."""
    return [names[name] for name in unmet if name in names]
