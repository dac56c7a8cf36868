"""What broke and how it was mended reads as a sentence, in every form for people, at its turn."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from cli_session_proxy.backends.claude.sessions.tails import Origin
from cli_session_proxy.backends.claude.transcript.comparing import Found
from cli_session_proxy.backends.claude.transcript.entries import How
from cli_session_proxy.domain import times
from cli_session_proxy.domain.evidence import (
    DONE,
    RECORDS,
    WHY,
    Evidence,
    Note,
    NoteCode,
    RecordsFrom,
    Refusal,
    Repair,
    RepairCode,
)
from cli_session_proxy.domain.models import Delivery, Fallback, Link, LinkReason, Placed, Session, Turn
from cli_session_proxy.domain.ordering import numbered, sorted_by_parent
from cli_session_proxy.engine.subscription import Happened
from cli_session_proxy.export import explain, feed, words
from cli_session_proxy.export.formats import FORMATS
from cli_session_proxy.stores.base import ChainPart, NewChain, WholeTurn
from cli_session_proxy.stores.sqlite.store import SqliteStore

from ..fakes import SESSION, FakeStore, turn
from .test_drawn import text_of
from .test_dumps import chain, store_of
from .told import CASES, every_repair


def test_there_is_a_case_for_every_reason() -> None:
    assert {case.reason for case in CASES} - {None} == set(get_args(LinkReason))


@pytest.mark.parametrize("number", range(1, len(CASES) + 1), ids=[case.name for case in CASES])
async def test_each_form_tells_it_at_its_turn_and_nowhere_else(number: int) -> None:
    case = CASES[number - 1]
    rows, links = every_repair()
    store = store_of(*rows, links=tuple(links))
    data = await chain(store)
    told = [link["says"] for link in data["links"] if link["turn_id"] == f"turn_{number}"]
    assert [*told, *data["turns"][number - 1]["says"]] == [case.says]
    markdown = _unescaped(await text_of(store, "markdown")).split("\n## Turn ")[1:]
    assert case.says in markdown[number - 1]
    assert (f"> **{case.kind}**" in markdown[number - 1]) == (case.kind != "link")
    assert sum(case.says in part for part in markdown) == sum(case.says in one.says for one in CASES)
    html = (await text_of(store, "html")).split("<details id='")[1:]
    assert _escaped(case.says) in html[number - 1]
    assert ("<span class='mend'>repaired</span>" in html[number - 1]) == case.is_repair
    happened = Happened(rows[number - 1], tuple(link for link in links if link.turn_id == f"turn_{number}"))
    lines = feed.lines(happened).splitlines()
    [line] = [line for line in lines if case.says in line]
    assert line.startswith(f"    {case.kind}")


@pytest.mark.parametrize("number", range(1, len(CASES) + 1), ids=[case.name for case in CASES])
def test_a_list_tells_it_in_one_short_line_without_paths_and_ids(number: int) -> None:
    rows, links = every_repair()
    told = words.in_brief(rows[number - 1], [link for link in links if link.turn_id == f"turn_{number}"])
    assert len(told) == (CASES[number - 1].reason != "started")
    for _, says in told:
        assert len(says) <= 80
        assert not re.search(r"/|turn_|[0-9a-f]{8}", says)


def test_each_of_them_has_its_one_name() -> None:
    now = 1_790_000_000.0
    many = replace(
        turn(1), fallback=Fallback("opus", "sonnet", "rate_limited", now),
        evidence=Evidence(refusal=Refusal(), retries=({}, {}), exit_code=-9),
    )  # fmt: skip
    links = [Link(SESSION, SESSION, "turn_1", "branched", {}, now), Link(None, SESSION, "turn_1", "started", {}, now)]
    kinds = [one.kind for one in words.in_brief(many, links)]
    assert kinds == ["branch", "fallback", "refusal", "repair", "retry"]


async def test_the_page_marks_what_only_the_turn_itself_tells_out_of_a_real_store(tmp_path: Path) -> None:
    rows, links = every_repair()
    store = SqliteStore(tmp_path / "chains.sqlite3")
    await store.open()
    try:
        parts: list[ChainPart] = [WholeTurn(row, ()) for row in rows]
        parts += [Session(SESSION, 0, rows[-1].id, "", "2.1.329", 1.0), *links]
        agent = await store.import_chain(NewChain("local", "a", "a", True, 1.0, 1.0, lambda: rows[-1].id), parts)
        html = "".join([piece async for piece in FORMATS["html"].write(store, agent, sandbox="/x")])
    finally:
        await store.close()
    tree, turns = html.partition("id='tree'")[2].split("<h2 id='turns'>")
    for case, entry, block in zip(CASES, tree.split("<li")[1:], turns.split("<details id='")[1:], strict=True):
        assert ("class='mend'" in entry) == case.is_repair, case.name
        assert ("<span class='mend'>repaired</span>" in block) == case.is_repair, case.name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"backend": "litellm", "fallback": Fallback("sonnet", "gpt", "rate_limited", 1_790_000_800.0)},
            "sonnet could not answer (the provider's limit was reached): gpt did. sonnet is asked again from "
            f"{times.written(1_790_000_800.0)} on.",
        ),
        (
            {"evidence": Evidence(written=Repair("other_model", 8))},
            "Another model had answered since the session was last used: its turns were added to the session.",
        ),
        (
            {"evidence": Evidence(notes=(Note("outside_window", 490),))},
            "The request shows a window of the conversation, without its first 490 turns, which the chain keeps.",
        ),
        ({"fallback": Fallback("sonnet", "gpt", "rate_limited", 1.0, here=False)}, None),
    ],
)
async def test_what_is_no_repair_is_told_all_the_same(fields: dict[str, Any], says: str | None) -> None:
    row = turn(1, **fields)
    assert (await chain(store_of(row)))["turns"][0]["says"] == ([] if says is None else [says])
    assert explain.turn(row.evidence, row.attempts) == []


GONE = Repair("rewritten", 4, found="missing", note="no transcript at /x")


async def test_a_repair_is_told_even_when_the_next_attempt_needed_another() -> None:
    behind = Repair("rewritten", 4, found="tail", behind="ours")
    row = turn(
        1, evidence=Evidence(repaired=behind),
        attempts=({"n": 1, "status": "failed", "why": "it died", "repaired": GONE.as_json()},
                  {"n": 2, "repaired": behind.as_json()}),
    )  # fmt: skip
    data = await chain(store_of(row, links=(Link("s1", "s1", "turn_1", "rebuilt", behind.as_json(), 1.0),)))
    assert [text.partition(" (")[0] for text in data["turns"][0]["says"]] == [
        "The session's transcript was gone", "Attempt 1 failed",
    ]  # fmt: skip
    assert "an attempt that was not kept" in data["links"][0]["says"]


async def test_a_repair_of_a_failed_attempt_is_told_once() -> None:
    tried = {"n": 1, "status": "failed", "why": "it died", "repaired": GONE.as_json()}
    [again] = (await chain(store_of(turn(1, evidence=Evidence(repaired=GONE), attempts=(tried, {"n": 2})))))["turns"]
    [failed] = (await chain(store_of(turn(1, evidence=Evidence(repaired=GONE), attempts=(tried, {"code": "x"})))))[
        "turns"
    ]
    for row, more in ((again, ["Attempt 1 failed"]), (failed, [])):
        assert [text.partition(" (")[0] for text in row["says"]] == ["The session's transcript was gone", *more]


async def test_attempts_are_counted_over_the_retries_of_a_client() -> None:
    tried = [{"n": n, "status": "failed", "why": why} for n, why in ((1, "a"), (2, "b"), (1, "c"))]
    data = await chain(store_of(turn(1, attempts=(*tried, {"n": 2, "status": "completed"}))))
    assert [text.split(";")[0] for text in data["turns"][0]["says"]] == [
        "Attempt 1 failed (a)", "Attempt 2 failed (b)", "Attempt 3 failed (c)",
    ]  # fmt: skip
    assert "attempt 4 sent the prompt again," in data["turns"][0]["says"][2]


def test_the_link_of_another_turn_hides_nothing() -> None:
    row = turn(2, evidence=Evidence(repaired=GONE))
    lines = feed.lines(Happened(row, (Link("s1", "s1", "turn_1", "rebuilt", {"found": "different"}, 1.0),)))
    assert "The session's transcript was gone" in lines


def test_there_are_words_for_each_code() -> None:
    assert set(RECORDS) == set(get_args(RecordsFrom))
    assert {*WHY, *DONE} == set(get_args(RepairCode))
    assert set(explain._NOTES) == set(get_args(NoteCode))
    assert set(explain._BEHIND) == set(get_args(Origin))
    assert set(explain._FOUND) | {"equal"} == set(get_args(Found))
    assert set(explain._CHANGED) == set(get_args(How))


def test_a_link_of_a_newer_version_is_told_as_such() -> None:
    assert explain.link("merged", {}, "s1", "s2") == "This version does not know this reason."  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["markdown", "html"])
@pytest.mark.parametrize("delivery", ["undelivered", "uncertain"])
async def test_an_answer_that_may_not_have_arrived_is_marked(format: str, delivery: Delivery) -> None:
    assert f"{delivery}: the " in await text_of(store_of(turn(1, delivery=delivery)), format)
    assert f"{delivery}: the " not in await text_of(store_of(turn(1, delivery="delivered")), format)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([\\`*<>\[\]&])", r"\1", text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#x27;").replace('"', "&quot;")


async def test_evidence_is_no_markup_and_no_secret() -> None:
    note = "no transcript at /x/**bold**<script>\n## Turn 9\n`code` sk-ant-api03-abcdef123456"
    links = (Link("s1", "s1", "turn_1", "rebuilt", {"found": "missing", "note": note}, 1.0),)
    failed = turn(2, status="failed", error={"code": "x", "message": "*no* <b>sk-ant-api03-abcdef123456"})
    store = store_of(turn(1), failed, links=links)
    text = await text_of(store, "markdown")
    assert text.count("\n## Turn ") == 2
    assert r"/x/\*\*bold\*\*\<script\> ## Turn 9 \`code\` \[redacted\]" in text
    assert r"**failed** (`x`): \*no\* \<b\>\[redacted\]" in text


async def test_a_sound_turn_says_nothing() -> None:
    data = await chain(
        store_of(turn(1, placed=Placed("head"), evidence=Evidence(verified="unchanged", records="transcript")))
    )
    assert data["turns"][0]["says"] == []


# --- in which order


def waited() -> FakeStore:
    """4 waited in its lane while 5 and 6 were adopted, and continues them; 7 waited behind it."""
    rows = [
        turn(1), turn(2), turn(3), turn(4, parent_id="turn_6"), turn(5, parent_id="turn_3", origin="adopted"),
        turn(6, origin="adopted"), turn(7, parent_id="turn_4"),
    ]  # fmt: skip
    return store_of(*rows)


ON_PATH = ["turn_1", "turn_2", "turn_3", "turn_5", "turn_6", "turn_4", "turn_7"]


async def test_every_dump_tells_a_turn_after_the_one_that_it_continues() -> None:
    data = await chain(waited())
    assert [row["id"] for row in data["turns"]] == ON_PATH
    markdown = await text_of(waited(), "markdown")
    assert re.findall(r"<sub>(turn_\d)", markdown) == ON_PATH
    assert "not the turn above" not in markdown
    html = await text_of(waited(), "html")
    assert re.findall(r"<details id='(turn_\d)", html) == ON_PATH
    assert re.findall(r"<a href='#(turn_\d)'>", html.partition("id='tree'")[2].partition("id='turns'")[0]) == ON_PATH
    assert "turns 1 to 7" in await text_of(waited(), "mermaid")


async def test_a_turn_without_its_parent_is_told_at_the_end() -> None:
    rows = [turn(1), turn(2, parent_id="turn_of_nobody"), turn(3, parent_id="turn_1")]

    async def streamed() -> AsyncIterator[Turn]:
        for row in rows:
            yield row

    assert [row.id async for _, row in numbered(streamed())] == ["turn_1", "turn_3", "turn_2"]
    assert [row.id for row in sorted_by_parent(reversed(rows))] == ["turn_1", "turn_2", "turn_3"]


async def test_a_turn_that_never_began_is_no_new_start() -> None:
    failed = turn(2, status="failed", parent_id=None, started_at=None, continuity=None, placed=Placed("head"))
    text = await text_of(store_of(turn(1), replace(failed, error={"code": "x", "message": "y"})), "markdown")
    assert "a new start" not in text
    assert "a new start" in await text_of(store_of(turn(1), turn(2, parent_id=None)), "markdown")
