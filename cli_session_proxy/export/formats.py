"""The formats of a dump by name. Each is streamed: memory is bounded by one turn and the outline, not by the chain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..domain.models import Agent
from ..stores.base import Store
from .chain_json import chain_json
from .html import html
from .markdown import markdown
from .mermaid import mermaid
from .shown import Renderer, render_in_process


class Write(Protocol):
    def __call__(
        self, store: Store, agent: Agent, *, sandbox: str, verbatim: bool = False, render: Renderer = render_in_process
    ) -> AsyncIterator[str]: ...


@dataclass(frozen=True, slots=True)
class Format:
    write: Write
    media_type: str


FORMATS: Mapping[str, Format] = {
    "json": Format(chain_json, "application/json"),
    "markdown": Format(markdown, "text/markdown; charset=utf-8"),
    "mermaid": Format(mermaid, "text/vnd.mermaid; charset=utf-8"),
    "html": Format(html, "text/html; charset=utf-8"),
}
