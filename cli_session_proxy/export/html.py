"""The dump as one page that opens offline: tree, timeline, turns. No script, nothing from outside, all text escaped.

Its content security policy allows only its own style, named by its hash: whatever a text of the conversation contains,
a browser runs and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import lru_cache
from html import escape
from typing import Any

from ..domain import times
from ..domain.models import MARKED_REASONS, ON_PATH, REPAIR_REASONS, Agent, Link, Turn
from ..stores.base import Store
from . import shown
from .explain import cache_in_words
from .outline import Node, Outline, outline, turns_of
from .shown import MeasuredDump, Renderer, render_in_process
from .words import KINDS, UNSAFE, UNSURE, WHY, count, visible

# So many of the last turns are unfolded when the page opens.
UNFOLDED = 3
# The number of colours for sessions, and of steps by which lanes are indented.
HUES = 12

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --dim: #59636e; --line: #d1d9e0; --soft: #f6f8fa;
  --bad: #b91c1c; --mend: #92400e }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1117; --fg: #e6edf3; --dim: #9198a1; --line: #3d444d;
  --soft: #161b22; --bad: #f87171; --mend: #fbbf24 } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 70rem; padding: 1rem }
h1, h2 { line-height: 1.2 }
h2 { border-bottom: 1px solid var(--line); margin-top: 2rem }
pre { background: var(--soft); margin: .3rem 0; overflow-wrap: anywhere; padding: .6rem; white-space: pre-wrap }
table { border-collapse: collapse }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: left; vertical-align: top }
a { color: inherit }
.dim { color: var(--dim) } .bad { color: var(--bad) } .mend { color: var(--mend); font-weight: 600 }
details { border: 1px solid var(--line); border-left: .4rem solid var(--chip, var(--line)); border-radius: .3rem;
  margin: .4rem 0; padding: .3rem .7rem }
summary { cursor: pointer }
nav ol { list-style: none; margin: 0; padding: 0 }
nav li { overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.chip { background: var(--chip); border-radius: 50%; display: inline-block; height: .7em; margin-right: .4em;
  width: .7em }
.scroll { border: 1px solid var(--line); max-height: 24rem; overflow: auto; padding: .4rem }
:target { outline: 2px solid var(--mend) }
"""
_STYLE += "".join(f".s{n} {{ --chip: hsl({n * 360 // HUES} 60% 50%) }}\n" for n in range(HUES))
_STYLE += "".join(f".l{n} {{ padding-left: {n * 1.2:.1f}rem }}\n" for n in range(1, HUES))

_POLICY = "default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'"


async def html(
    store: Store, agent: Agent, *, sandbox: str, verbatim: bool = False, render: Renderer = render_in_process
) -> AsyncIterator[str]:
    """The page in pieces, one per turn. Raises `NotFound` before the first one."""
    shape = await outline(store, agent)
    colours = {session.id: f"s{n % HUES}" for n, session in enumerate(shape.chain.sessions)}
    for part in (_head(shape, sandbox), _tables(shape, colours), _tree(shape, colours)):
        yield "\n".join(part) + "\n"
    yield "<h2 id='turns'>Turns</h2>\n"
    async for _, turn in turns_of(store, agent):
        node = shape.nodes.get(turn.id)
        if node is None:  # accepted after the outline was read
            continue
        links = shape.links.get(turn.id, ())
        rendered = await render(shown.measured, turn, links, verbatim=verbatim)
        lines = [_summary(turn, node, shape, colours, links), *_turn(turn, links, rendered)]
        yield "\n".join(lines) + "\n"
    yield "</body></html>\n"


def _head(shape: Outline, sandbox: str) -> Iterator[str]:
    agent = shape.chain.agent
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    yield "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(digest)}">'
    yield "<meta name='viewport' content='width=device-width'><meta name='referrer' content='no-referrer'>"
    yield f"<title>{_text(agent.agent_id)}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>Agent {_text(agent.agent_id)}</h1>"
    repairs = sum(link.reason in ("rebuilt", "moved") for link in shape.chain.links)  # counted as in `chains`
    numbers = (len(shape.nodes), "turn"), (len(shape.chain.sessions), "session"), (repairs, "repair")
    counts = ", ".join(count(number, one) for number, one in numbers)
    yield f"<p>{counts}, since {times.written(agent.created_at)}<br>sandbox <code>{_text(sandbox)}</code></p>"


def _tables(shape: Outline, colours: dict[str, str]) -> Iterator[str]:
    """The sessions, and the timeline of their links."""
    yield "<h2 id='sessions'>Sessions</h2><div class='scroll'><table><tr><th>session<th>last turn<th>CLI<th>since</tr>"
    for session in shape.chain.sessions:
        chip = f"<span class='chip {colours[session.id]}'></span>"
        yield f"<tr><td>{chip}<code>{_text(session.id)}</code><td>{_turn_link(shape, session.tip_turn_id)}"
        yield f"<td>{_text(session.cli_version)}<td>{times.written(session.created_at)}</tr>"
    yield "</table></div>"
    yield "<h2 id='timeline'>Timeline</h2><div class='scroll'><table><tr><th>when<th>turn<th>what<th>why</tr>"
    for link in shape.chain.links:
        yield f"<tr><td>{times.written(link.at)}<td>{_turn_link(shape, link.turn_id)}<td>{_kind(link)}"
        yield f"<td>{_text(shown.link(link)['says'])}</tr>"
    yield "</table></div>"


def _tree(shape: Outline, colours: dict[str, str]) -> Iterator[str]:
    yield "<h2 id='tree'>Tree</h2><nav class='scroll' aria-label='turns'><ol>"
    before: str | None = None
    for node in shape.nodes.values():
        chip = f"<span class='chip {colours.get(node.session or '', '')}'></span>"
        lane = f" class='l{min(node.lane, HUES - 1)}'" if node.lane else ""
        above = shape.nodes.get(node.parent or "")
        jump = (
            "" if node.parent == before else f" <span class='dim'>after {above.number if above else 'nothing'}</span>"
        )
        marks = [link.reason for link in shape.links.get(node.id, ()) if link.reason in MARKED_REASONS]
        says = [WHY[reason] for reason in marks] + (["repaired"] if node.mended else [])
        kind = "mend" if node.mended or any(reason in REPAIR_REASONS for reason in marks) else "dim"
        mark = f" <span class='{kind}'>{_text('; '.join(says))}</span>" if says else ""
        state = "" if node.status == "completed" else f" <span class='bad'>{_text(node.status)}</span>"
        yield f"<li{lane}><a href='#{_text(node.id)}'>{chip}{node.number}</a>{jump}{state}{mark}"
        yield f" {_text(node.words)}</li>"
        before = node.id
    yield "</ol></nav>"


def _turn(turn: Turn, links: Sequence[Link], dump: MeasuredDump) -> list[str]:
    """The body of an unfolded turn."""
    lines = []
    for link in links:
        linked = shown.link(link)
        evidence = f"<details><summary>evidence</summary>{_compact(linked['detail'])}</details>" if link.detail else ""
        lines.append(f"<p>{_kind(link)} {_text(linked['says'])}</p>{evidence}")
    for kind, text in shown.briefs(turn, links) if dump["says"] else ():
        lines.append(f"<p class='{'mend' if kind == 'repair' else 'dim'}'>{KINDS[kind]}: {_text(text)}</p>")
    for message in dump["input"]:
        lines.append(f"<h4>{_common(message['role'])}</h4>")
        lines += [_block(block) for block in message["content"]]
    if dump["output"]:
        lines.append("<h4>assistant</h4>")
        lines += [_block(block) for block in dump["output"]]
    if dump["tools"]:
        lines.append(f"<details><summary>{len(dump['tools'])} tool calls and results</summary>")
        lines += [_compact(entry) for entry in dump["tools"]]
        lines.append("</details>")
    if dump["error"] is not None:
        lines.append(f"<div class='bad'>{_compact(dump['error'])}</div>")
    if turn.delivery in UNSURE and turn.status in ON_PATH:
        lines.append(f"<p class='bad'>{UNSURE[turn.delivery]}</p>")
    used = turn.usage.as_json()
    tokens = ", ".join([f"{name.removesuffix('_tokens')} {number}" for name, number in used.items()])
    tokens += f"\n{cache_in_words(turn.usage)}"
    steps = ", ".join([f"{name} {value!s}" for name, value in dump["timings"].items()])
    cost = "not known" if dump["cost_usd"] is None else f"${dump['cost_usd']:.6f}"
    measured = _text(f"tokens: {tokens}\ncost: {cost}\nmilliseconds: {steps}")
    why = _text(_json(dump["reason"]))
    lines.append(
        f"<details><summary>why, how long, how much</summary><pre>{measured}\nwhy: {why}</pre></details></details>"
    )
    return lines


def _summary(turn: Turn, node: Node, shape: Outline, colours: dict[str, str], links: Sequence[Link]) -> str:
    """The line of a folded turn, with its anchor. `colours`: a class of the style for each session."""
    is_mended = node.mended or any(link.reason in REPAIR_REASONS for link in links)
    repaired = " <span class='mend'>repaired</span>" if is_mended else ""
    opened = " open" if node.number > len(shape.nodes) - UNFOLDED else ""
    state = turn.status if turn.status == "completed" else f"<span class='bad'>{_text(turn.status)}</span>"
    head = " · head" if turn.id == shape.chain.agent.head else ""
    turn_id, colour = _text(turn.id), colours.get(turn.session_id or "", "")
    return (
        f"<details id='{turn_id}' class='{colour}'{opened}>\n<summary>Turn {node.number} · {state}\n"
        f" · {_common(turn.continuity or turn.origin)}{head}{repaired}"
        f" <span class='dim'>{_text(node.words)}</span></summary>\n"
        f"<p class='dim'>{turn_id} · after {_turn_link(shape, turn.parent_id)} · {_common(turn.model)}\n"
        f" · {times.written(turn.created_at)} · session {_common(turn.session_id or 'none')}</p>"
    )


def _kind(link: Link) -> str:
    """The reason of a link, and its sessions."""
    kind = "mend" if link.reason in REPAIR_REASONS else "dim"
    ids = f"{(link.from_session or 'none')[:8]} → {link.to_session[:8]}"
    return f"<span class='{kind}'>{_text(link.reason)}</span> <code>{_text(ids)}</code>"


def _turn_link(shape: Outline, turn_id: str | None) -> str:
    node = shape.nodes.get(turn_id or "")
    return "-" if node is None else f"<a href='#{_text(node.id)}'>{node.number}</a>"


def _block(block: dict[str, Any]) -> str:
    if block.get("type") == "text":
        return f"<pre>{_text(str(block.get('text', '')))}</pre>"
    if block.get("type") == "thinking":
        return f"<details><summary>thinking</summary><pre>{_text(str(block.get('thinking', '')))}</pre></details>"
    return _compact(block)


def _compact(value: Any) -> str:
    """JSON with one field per line. (`indent` would use Python's slow encoder: a third of the time of a long page.)"""
    if not value:
        return ""
    if not isinstance(value, dict):
        return f"<pre>{_text(_json(value))}</pre>"
    fields = ",\n".join([f" {_json(name)}: {_json(item)}" for name, item in value.items()])
    return "<pre>{\n" + _text(fields) + "\n}</pre>"


def _text(value: str) -> str:
    """Escaped text."""
    return escape(visible(value)) if _NOT_AS_IT_IS.search(value) else value


_common = lru_cache(256)(_text)  # for words that most turns have
_NOT_AS_IT_IS = re.compile(f"[&<>\"'{UNSAFE}]")


_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
