"""The rows of `rows.toml`: what is broken, by what it needs of a target."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from . import faults
from .faults import Breaks
from .targets.base import Surface


@dataclass(frozen=True, slots=True)
class Row:
    """`by_id`: the client sends only what is new."""

    id: str
    group: str
    name: str
    breaks: Breaks
    needs: frozenset[Surface] = frozenset()
    by_id: bool = True

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def row_of(data: Mapping[str, Any]) -> Row:
    """Raises `AttributeError` where there is no such fault, `TypeError` where it takes other arguments."""
    breaks = partial(getattr(faults, data["fault"]), **data.get("with", {}))
    return Row(
        data["id"], data["group"], data["name"], breaks, frozenset(data.get("needs", ())),
        data.get("client", "new") == "new",
    )  # fmt: skip


def _read() -> tuple[Row, ...]:
    text = resources.files(__package__).joinpath("rows.toml").read_text(encoding="utf-8")
    return tuple(row_of(data) for data in tomllib.loads(text)["row"])


ROWS = _read()
