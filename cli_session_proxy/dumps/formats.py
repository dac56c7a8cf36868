"""The forms of a dump by name. Every one is streamed: memory is bounded by one turn, not by the chain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..models import Agent
from ..stores.base import Store
from .chain_json import chain_json
from .markdown import markdown


class Write(Protocol):
    def __call__(self, store: Store, agent: Agent, *, sandbox: str) -> AsyncIterator[str]: ...


@dataclass(frozen=True, slots=True)
class Format:
    write: Write
    media_type: str


FORMATS: Mapping[str, Format] = {
    "json": Format(chain_json, "application/json"),
    "markdown": Format(markdown, "text/markdown; charset=utf-8"),
}
