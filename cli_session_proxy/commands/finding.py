"""`find`: search all messages. `show`: one agent, session or turn. Both beside a running server or without one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends.claude.process import environment
from ..domain import times
from ..domain.models import JSON, Agent, Link, Session, Turn
from ..domain.searching import Found, Indexed, Search
from ..errors import NotFound, StoreUnavailable, printable
from ..export import explain, lists, shown, words
from ..export.words import count
from ..sandbox import LOCAL_OWNER, Sandboxes
from ..settings import Settings
from ..stores.auto import place_of
from ..stores.base import Store
from .listing import ChainFilter, moment_of
from .stored import opened
from .terminal import bold, dim, fitted, progress_bar

# Seconds of indexing between two moves of the bar.
STEP = 0.25
# Characters of a question.
QUESTION = 200


def parse(
    words: Sequence[str],
    owner: str | None,
    since: str | None,
    until: str | None,
    status: str | None,
    **more: Any,
) -> Search:
    """Parse the options. A word with blanks is a phrase. Raises `ConfigError`."""
    text = " ".join(f'"{word}"' if " " in word and '"' not in word else word for word in words)
    after = None if since is None else moment_of("--since", since)
    before = None if until is None else moment_of("--until", until)
    return Search(text, owner, after, before, status=ChainFilter.parse(None, None, status).status, **more)


@dataclass(frozen=True, slots=True)
class TurnExtras:
    """Extra lines for a found turn: its question, and its repairs in a few words each."""

    asked: str
    repairs: tuple[str, ...]


async def find(settings: Settings, query: Search) -> tuple[Found, Indexed, Mapping[str, TurnExtras]]:
    """Update the index (with a bar on stderr), and search. The last result has, by turn, extra lines for searches
    without words or for repairs."""
    async with opened(settings) as store:
        if store is None:
            return Found((), 0, 0), Indexed(0, 0), {}
        indexed = await store.index(STEP)
        if not indexed.is_whole:
            with progress_bar("reading what was said") as move:
                while not indexed.is_whole:
                    move(indexed.done, indexed.total)
                    indexed = await store.index(STEP)
        found = await store.search(query)
        extras = {}
        for hit in found.hits:
            if hit.kind == "agent" or (hit.snippet and not query.repaired):
                continue
            if (turn := await store.turn(hit.turn_id or "")) is not None:
                asked = [block for message in shown.contents(turn)["input"] for block in message["content"]]
                links = (await store.page(turn.agent_key, before_seq=turn.seq + 1, limit=1)).links
                repairs = tuple(one.says for one in words.in_brief(turn, links) if one.kind == "repair")
                extras[turn.id] = TurnExtras(shown.line(asked, QUESTION), repairs)
        return found, indexed, extras


def print_found(query: Search, found: Found, extras: Mapping[str, TurnExtras]) -> None:
    """Print each hit: where it is, a snippet or else the question, and each repair."""
    lines = [*_found_lines(found, extras), (0, [(lists.found_summary(query, found), "dim")])]
    if not sys.stdout.isatty():
        for indent, parts in lines:
            print(" " * indent + "".join(text for text, _ in parts))
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe needs none of it
    from rich.padding import Padding  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    for indent, parts in lines:
        console.print(Padding(Text.assemble(*parts), (0, 0, 0, indent), expand=False))


def _found_lines(found: Found, extras: Mapping[str, TurnExtras]) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Lines with their indent, each in parts of (text, style)."""
    for hit in found.hits:
        place = printable(lists.place_of(hit))
        status = "" if hit.status in (None, "completed") else f"  {hit.status.replace('_', ' ')}"
        line = fitted(f"{place}{status}  {times.written(hit.at, 'minutes')}", 4)
        yield 0, [(line[: len(place)], "bold"), (line[len(place) :], "dim")]
        of_turn = extras.get(hit.turn_id or "", TurnExtras("", ()))
        words = [
            (printable(re.sub(r"\s+", " ", text)), "bold yellow" if n % 2 else "") for n, text in enumerate(hit.snippet)
        ]
        repairs = ([(printable(says), "dim")] for says in of_turn.repairs)
        for parts in (words or [(printable(of_turn.asked), "")], *repairs):
            if any(text.strip() for text, _ in parts):
                yield 2, parts


# --- show

# Newest turns of an agent that are searched for repairs and failures.
NEWEST = 200
# How many repairs and failures are listed, and characters of each quoted text.
LINES = 5
WORDS = 300


async def show(settings: Settings, owner: str | None, name: str) -> JSON:
    """Details of the agent, session or turn that has this name or id, or this part of one. `owner` None: of any owner.

    Raises `NotFound` if none or several match.
    """
    async with opened(settings) as store:
        if store is None:
            raise NotFound(f"nothing is kept in {place_of(settings)} yet: see `chains`")
        match = await _find(store, owner, name)
        if isinstance(match, Agent):
            details = await _agent(settings, store, match)
        else:
            agent = await store.agent_by_key(match.agent_key)
            assert agent is not None
            if isinstance(match, Turn):
                details = await _turn(settings, store, agent, match)
            else:
                details = await _session(settings, store, agent, match)
        if details.get("waiting") or (details.get("turn") or {}).get("status") in ("queued", "running"):
            try:
                await store.probe()
            except StoreUnavailable as exc:
                details["unsure"] = f"it may have ended, but that could not be stored: {exc.message}"
        return details


async def _find(store: Store, owner: str | None, name: str) -> Agent | Session | Turn:
    """What has exactly this name or id, else the only one that has it as a part. Raises `NotFound`."""
    if (agent := await store.agent(owner or LOCAL_OWNER, name)) is not None:
        return agent
    for match in (await store.session(name), await store.turn(name)):
        agent = None if match is None else await store.agent_by_key(match.agent_key)
        if match is not None and agent is not None and owner in (None, agent.owner):
            return match
    hits = [hit for hit in (await store.search(Search(f'"{name}"', owner))).hits if hit.kind != "words"]
    exact = [hit for hit in hits if hit.kind == "agent" and hit.agent.agent_id == name]
    if len(hits) == 1 or exact:
        hit = (exact or hits)[0]
        if hit.kind == "session":
            return await store.session(hit.session_id or "") or hit.agent
        return (await store.turn(hit.turn_id or "") if hit.kind == "turn" else None) or hit.agent
    if not hits:
        raise NotFound(f"no agent, session or turn is called {name!r}: `find` looks for words, too")
    several = ", ".join(
        str({"agent": hit.agent.agent_id, "session": hit.session_id}.get(hit.kind, hit.turn_id)) for hit in hits[:LINES]
    )
    raise NotFound(f"{name!r} fits {several}: give more of it")


async def _agent(settings: Settings, store: Store, agent: Agent) -> JSON:
    async for row in store.summaries(agent.owner):
        if row.agent.key == agent.key:
            break
    else:
        raise NotFound(f"agent {agent.agent_id!r} was deleted just now")
    newest = (await store.page(agent.key, before_seq=None, limit=NEWEST)).turns
    head = await store.turn(agent.head) if agent.head is not None else None
    failed = [turn for turn in newest if turn.status in ("failed", "cancelled", "refused")]
    return {
        "kind": "agent", "agent_id": agent.agent_id, "owner": agent.owner,
        "turns": row.turns, "sessions": row.sessions, "repairs": row.repairs, "cost_usd": row.cost_usd,
        "head": await _turn_summary(store, head),
        "last_repairs": [_link(link) for link in await store.repairs(agent.key, limit=LINES)],
        "last_failures": [await _turn_summary(store, turn) for turn in failed[:LINES]],
        "waiting": [turn.id for turn in newest if turn.status in ("queued", "running")],
        **_place(settings, agent, head.session_id if head is not None else None),
    }  # fmt: skip


async def _session(settings: Settings, store: Store, agent: Agent, session: Session) -> JSON:
    tip = await store.turn(session.tip_turn_id) if session.tip_turn_id else None
    chain = await store.chain(agent.key)
    links = [link for link in (chain.links if chain else ()) if session.id in (link.from_session, link.to_session)]
    return {
        "kind": "session", "agent_id": agent.agent_id, "owner": agent.owner,
        "at_head": session.tip_turn_id == agent.head, "tip": await _turn_summary(store, tip),
        "transcript": session.transcript, "cli_version": session.cli_version,
        "links": [_link(link) for link in links[-LINES:]],
        **_place(settings, agent, session.id),
    }  # fmt: skip


async def _turn(settings: Settings, store: Store, agent: Agent, turn: Turn) -> JSON:
    from ..backends.claude.sessions import seeing  # noqa: PLC0415 - an agent and a session need no transcript

    links = (await store.page(agent.key, before_seq=turn.seq + 1, limit=1)).links
    request = await seeing.seen(store, turn)
    saw = None
    if request is not None:
        missing = len(request.missing)
        saw = explain.context(request.turns, missing, request.summarised, turn.usage, extends=request.extends)
    return {
        "kind": "turn", "agent_id": agent.agent_id, "owner": agent.owner, "turn": await _turn_summary(store, turn),
        "at_head": turn.id == agent.head, "parent_id": turn.parent_id,
        "says": [*(shown.link(link)["says"] for link in links), *shown.says(turn, links)],
        "saw": saw, **_place(settings, agent, turn.session_id),
    }  # fmt: skip


async def _turn_summary(store: Store, turn: Turn | None) -> JSON | None:
    if turn is None:
        return None
    redacted = shown.turn(turn)
    asked = [block for message in redacted["input"] for block in message["content"]]
    return {
        "id": turn.id, "number": (await store.page(turn.agent_key, before_seq=turn.seq + 1, limit=1)).newest,
        "status": turn.status, "continuity": turn.continuity, "model": turn.answered_by or turn.model,
        "cost_usd": turn.cost_usd, "at": turn.created_at, "asked": shown.line(asked, WORDS),
        "answered": shown.line(redacted["output"], WORDS), "error": redacted["error"],
    }  # fmt: skip


def _link(link: Link) -> JSON:
    return {
        "kind": words.link_in_brief(link).kind,
        "at": link.at,
        "turn_id": link.turn_id,
        "says": shown.link(link)["says"],
    }


def _place(settings: Settings, agent: Agent, session_id: str | None) -> JSON:
    sandboxes = Sandboxes(settings)
    sandbox, confined = sandboxes.path(agent.dir), sandboxes.was_confined(agent.dir)
    by_hand = None if session_id is None or confined else environment.resume_command(settings, sandbox, session_id)
    return {"session_id": session_id, "sandbox": str(sandbox), "by_hand": by_hand}


def print_shown(data: JSON) -> None:
    print(dim(f"{data['kind']} of agent " if data["kind"] != "agent" else "agent ") + bold(printable(data["agent_id"])))
    for name, value in _shown_lines(data):
        whole = f"{name:10}{printable(value)}"
        line = whole if name == "by hand" else fitted(whole, 10)  # a command stays on one line, to be copied
        print(dim(line[:10]) + line[10:])


def _shown_lines(data: JSON) -> Iterator[tuple[str, str]]:
    if data["kind"] == "agent":
        counts = [count(data[many], many.removesuffix("s")) for many in ("turns", "sessions", "repairs") if data[many]]
        yield "chain", ", ".join([*counts, f"${data['cost_usd']:.4f}"])
    place = {"agent": "head", "session": "tip", "turn": "turn"}[data["kind"]]
    if (turn := data[place]) is not None:
        yield place, _line(turn)
        if turn["status"] != "completed":
            yield "status", turn["status"].replace("_", " ")
        yield "asked", turn["asked"] or "(no text)"
        yield "answered", turn["answered"] or "(no text)"
        if turn["error"]:
            yield "error", explain.why(turn["error"])
    if data.get("unsure"):
        yield "unsure", data["unsure"]
    yield from (("told", says) for says in data.get("says", ()))
    if data.get("saw"):
        yield "model saw", data["saw"]
    yield from (("waits", turn_id) for turn_id in data.get("waiting", ()))
    for name in ("last_repairs", "links"):
        for one in data.get(name, ()):
            yield (
                one["kind"] if name == "last_repairs" else "link",
                f"{times.written(one['at'], 'minutes')}  {one['turn_id']}  {one['says']}",
            )
    for one in data.get("last_failures", ()):
        yield one["status"], _line(one)
        yield "", one["asked"] or "(no text)"
        yield "", one["answered"] or explain.why(one["error"] or {})
    yield "session", data["session_id"] or "none"
    if data.get("transcript"):
        yield "file", data["transcript"]
    yield "sandbox", data["sandbox"]
    if data["by_hand"]:
        yield "by hand", data["by_hand"]


def _line(turn: JSON) -> str:
    return f"#{turn['number']} {turn['id']}  {turn['model']}  {times.written(turn['at'], 'minutes')}"
