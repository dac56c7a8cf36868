"""The dump for people: the conversation in order, with every repair at its turn."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import lru_cache
from typing import Any

from ..domain import times
from ..domain.models import ON_PATH, Agent, Link, Turn
from ..domain.ordering import by_turn
from ..stores.base import Store, TurnPage
from . import shown
from .explain import cache_in_words, placed
from .outline import chain_of, turns_of
from .shown import ContentDump, Renderer, render_in_process
from .words import KINDS, UNSURE, count, mark_of, visible


async def markdown(
    store: Store,
    agent: Agent,
    *,
    sandbox: str,
    verbatim: bool = False,
    render: Renderer = render_in_process,
    part: TurnPage | None = None,
) -> AsyncIterator[str]:
    """Yields the title, then a text for each turn, of all or of those on the page `part`. Raises `NotFound` at once."""
    chain = await chain_of(store, agent)
    links = by_turn(chain.links)
    title = [
        f"# Agent {_inline(chain.agent.agent_id)}\n",
        f"- since {times.written(chain.agent.created_at)}, sandbox {_inline(sandbox)}",
        f"- head {_inline(chain.agent.head or 'none')}, {count(len(chain.sessions), 'session')}",
        *(_link(link) for link in links.get(None, ())),
        "",
    ]
    yield visible("\n".join(title))
    # The turn that is printed before each one. A page is newest first, so its last turn is printed first.
    previous_id = part.turns[-1].parent_id if part is not None and part.turns else None
    async for number, turn in turns_of(store, agent, part):
        turn_links = links.get(turn.id, ())
        rendered = await render(shown.contents, turn, turn_links, verbatim=verbatim)
        yield visible("\n".join(_turn(number, turn, previous_id, turn_links, rendered)))
        previous_id = turn.id


def _turn(number: int, turn: Turn, previous_id: str | None, links: Sequence[Link], dump: ContentDump) -> Iterator[str]:
    run_how = turn.continuity or (turn.origin if turn.origin in ("adopted", "imported") else "not run")
    facts = [turn.status, run_how, turn.model, times.written(turn.created_at)]
    cached = cache_in_words(turn.usage)
    ids = f"{turn.id}, session {turn.session_id or 'none'}" + (f", {cached}" if cached else "")
    yield f"\n## Turn {number} · {_plain(' · '.join(facts))}\n"
    yield f"<sub>{_plain(ids)}</sub>\n"
    # A turn that continues the head gets its parent when it begins.
    has_no_parent_yet = turn.parent_id is None and turn.started_at is None and turn.placed.at_head
    if turn.parent_id != previous_id and not has_no_parent_yet:
        yield f"> continues {_inline(turn.parent_id or 'nothing: a new start')}, not the turn above\n"
    if why := placed(turn):
        yield f"> {_plain_cached(' '.join(why))}\n"
    for link in links:
        yield _link(link) + "\n"
    for kind, text in shown.briefs(turn, links) if dump["says"] else ():
        yield f"> **{KINDS[kind]}**: {_plain(text)}\n"
    for message in dump["input"]:
        yield f"**{_plain_cached(message['role'])}**\n"
        yield from _content(message["content"])
    if dump["tools"]:
        yield "**tools of the CLI**\n"
        yield from (f"- {_inline(_compact(entry))}" for entry in dump["tools"])
        yield ""
    if dump["output"]:
        yield "**assistant**\n"
        yield from _content(dump["output"])
    if dump["error"] is not None:
        error = dump["error"]
        yield f"> **{_plain(turn.status)}** ({_inline(str(error.get('code')))}): {_plain(str(error.get('message')))}\n"
    if turn.delivery in UNSURE and turn.status in ON_PATH:
        yield f"> {UNSURE[turn.delivery]}\n"


def _link(link: Link) -> str:
    mark = mark_of(link.reason)
    mark = mark if mark == "link" else f"**{mark}**"
    ids = f"{(link.from_session or 'none')[:8]} → {link.to_session[:8]}"
    return f"> {mark} ({_inline(link.reason)}, {_plain(ids)}): {_plain(shown.link(link)['says'])}"


def _content(blocks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each block quoted, so that no message can imitate the dump's own text."""
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            text = str(block.get("text", ""))
        elif kind == "thinking":
            text = f"(thinking) {block.get('thinking', '')}"
        elif kind == "image" and "sha256" in block:
            text = f"(image {block['media_type']}, {block['bytes']} bytes, sha256 {block['sha256']})"
        else:
            text = f"({kind}) {_compact({name: value for name, value in block.items() if name != 'type'})}"
        yield "\n".join(f"    {line}" for line in text.splitlines() or [""])
        yield ""


def _inline(text: str) -> str:
    """Inline code on one line: a name cannot break out of it."""
    line = " ".join(text.split()) or " "
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _plain(text: str) -> str:
    """A sentence with markup escaped. Underscores stay, so that ids and paths can be copied."""
    return _MARKUP.sub(lambda found: "\\" + found[0], " ".join(text.split()))


_plain_cached = lru_cache(256)(_plain)  # for texts that most turns have
_MARKUP = re.compile(r"[\\`*<>\[\]&]")
_compact = json.JSONEncoder(ensure_ascii=False).encode
