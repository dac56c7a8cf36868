"""The dump for people: the conversation in order, with every repair at its turn."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from ..errors import NotFound
from ..models import Agent, Chain, Continuity, Link, Turn
from ..stores.base import Store
from . import shown
from .words import WHY

_REPAIRED: frozenset[Continuity] = frozenset({"rebuilt", "branched"})


async def markdown(store: Store, agent: Agent, *, sandbox: str, verbatim: bool = False) -> AsyncIterator[str]:
    """The conversation in pieces, a turn each. Raises `NotFound` before the first one."""
    chain = await store.chain(agent.key)
    if chain is None:
        raise NotFound(f"there is no agent {agent.agent_id!r}", param="agent_id")
    links: dict[str | None, list[Link]] = defaultdict(list)
    for link in chain.links:
        links[link.turn_id].append(link)
    yield "\n".join(_title(chain, sandbox, links.pop(None, [])))
    number, before = 0, None
    async for turn in store.turns(agent.key):
        number += 1
        yield "\n".join(_turn(number, turn, before, links.pop(turn.id, []), verbatim=verbatim))
        before = turn.id


def _title(chain: Chain, sandbox: str, links: Sequence[Link]) -> Iterator[str]:
    yield f"# Agent {_inline(chain.agent.agent_id)}\n"
    yield f"- since {_time(chain.agent.created_at)}, sandbox {_inline(sandbox)}"
    yield f"- head {_inline(chain.agent.head or 'none')}, {len(chain.sessions)} session(s)"
    yield from (_link(link) for link in links)
    yield ""


def _turn(number: int, turn: Turn, before: str | None, links: Sequence[Link], *, verbatim: bool) -> Iterator[str]:
    told = shown.turn(turn, verbatim=verbatim)
    facts = [turn.status, turn.continuity or "not run", turn.model, _time(turn.created_at)]
    if turn.origin != "chat":
        facts.append(turn.origin)
    yield f"\n## Turn {number} · {' · '.join(facts)}\n"
    yield f"<sub>{turn.id}, session {turn.session_id or 'none'}</sub>\n"
    if turn.parent_id != before:
        yield f"> continues {_inline(turn.parent_id or 'nothing: a new start')}, not the turn above\n"
    if told["continuity_reason"]:
        yield f"> continuity: {_inline(_compact(told['continuity_reason']))}\n"
    for link in links:
        yield _link(link) + "\n"
    if turn.continuity in _REPAIRED and told["reason"]:
        yield f"> why: {_inline(_compact(told['reason']))}\n"
    for message in told["input"]:
        yield f"**{message['role']}**\n"
        yield from _content(message["content"])
    if told["tools"]:
        yield "**tools of the CLI**\n"
        yield from (f"- {_inline(_compact(entry))}" for entry in told["tools"])
        yield ""
    if told["output"]:
        yield "**assistant**\n"
        yield from _content(told["output"])
    if told["error"] is not None:
        yield f"> {turn.status}: {_inline(_compact(told['error']))}\n"
    if turn.delivery == "undelivered":
        yield "> undelivered: the client left before the answer reached it\n"


def _link(link: Link) -> str:
    told = shown.link(link)
    detail = f": {_inline(_compact(told['detail']))}" if told["detail"] else ""
    ids = f"{link.from_session or 'none'} → {link.to_session}"
    return f"> {WHY[link.reason]} (`{link.reason}`, {ids}){detail}"


def _content(blocks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A block each, quoted, so that no text of a conversation can pass for the dump's own words."""
    for block in blocks:
        yield "\n".join(f"    {line}" for line in _block(block).splitlines() or [""])
        yield ""


def _block(block: dict[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "thinking":
        return f"(thinking) {block.get('thinking', '')}"
    if kind == "image" and "sha256" in block:
        return f"(image {block['media_type']}, {block['bytes']} bytes, sha256 {block['sha256']})"
    return f"({kind}) {_compact({name: value for name, value in block.items() if name != 'type'})}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _inline(text: str) -> str:
    """One line of code style: a name cannot break out of its line."""
    line = " ".join(text.split()) or " "
    fence = "`" * (max((len(run) for run in _backticks(line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _backticks(text: str) -> Iterator[str]:
    run = ""
    for char in [*text, " "]:
        if char == "`":
            run += char
        elif run:
            yield run
            run = ""


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
