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

# Between which numbers each may be (None: there is no bound), and whether only whole ones. Of temperature it is
# OpenAI's and Google's scale, Anthropic's goes to 1; a seed is any whole number of 64 bits.
NUMBERS: Mapping[Name, tuple[float, float | None, bool]] = {
    "max_tokens": (1, None, True), "temperature": (0, 2.0, False), "top_p": (0, 1, False), "top_k": (0, None, True),
    "seed": (-(2**63), 2**63 - 1, True),
}  # fmt: skip


def read(
    fields: Mapping[str, Any],
    names: Names,
    *,
    thinking: bool | None = None,
    get: Callable[[Mapping[str, Any], str], Any] | None = None,
) -> Parameters:
    """What these fields say. `get` finds one of them where it may be spelt otherwise. Raises `InvalidRequest`, which
    names the field."""
    given: dict[str, Any] = {}
    for name, (least, most, whole) in NUMBERS.items():
        if name not in names:
            continue
        where = names[name]
        field = where.rpartition(".")[2]
        value = fields.get(field) if get is None else get(fields, field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(where, "a number")
        if not least <= value or (most is not None and value > most):
            bounds = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise InvalidRequest(f"{where} must be {bounds}", param=where)
        if whole and isinstance(value, float):
            if not value.is_integer():
                raise wrong_type(where, "a whole number")
            value = int(value)
        given[name] = value
    return Parameters(thinking=thinking, **given)


def told(names: Names, unmet: Iterable[Name]) -> list[str]:
    """The wire's own names of these."""
    return [names[name] for name in unmet if name in names]
