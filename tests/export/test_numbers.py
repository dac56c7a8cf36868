"""A turn has one number, wherever it is shown."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.commands import finding
from cli_session_proxy.domain.models import Message, Record
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sqlite.store import FILE
from cli_session_proxy_store_conformance.samples import a_finished_turn

from ..serving import serving
from ..talking import running


@pytest.mark.asyncio
async def test_a_turn_adopted_while_another_one_waited_shifts_no_number_in_any_form(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "claude-config")
    async with running(settings) as engine, serving(engine, settings) as url, httpx.AsyncClient(base_url=url) as http:
        agent = await engine.store.ensure_agent("local", "ada", "dir-ada", named=True, now=1.0)
        # in the order of acceptance; `late` waited while `adopted` was taken in, and continued that when it ran
        accepted = (("first", None), ("late", "first"), ("adopted", "first"), ("last", "late"))
        turns = [
            a_finished_turn(
                id=f"turn_{name}", agent_key=agent.key, parent_id=parent and f"turn_{parent}", model="sonnet",
                input=(Message.user(f"word {name}"),), output=({"type": "text", "text": "a"},),
                records=(Record("{}"),), created_at=float(at), path_hash=None, depth=at,
            )
            for at, (name, parent) in enumerate(accepted, 1)
        ]  # fmt: skip
        await engine.store.import_turns(turns, head="turn_last")
        with closing(sqlite3.connect(settings.var / FILE)) as file, file:
            file.execute("UPDATE turns SET parent_id = 'turn_adopted' WHERE id = 'turn_late'")
        expected = {f"turn_{name}": number for number, (name, _) in enumerate(accepted, 1)}

        dumped = (await http.get("/chains/ada")).json()["turns"]
        assert [turn["id"] for turn in dumped] == ["turn_first", "turn_adopted", "turn_late", "turn_last"]
        assert {turn["id"]: turn["number"] for turn in dumped} == expected
        part = (await http.get("/chains/ada/turns")).json()["data"]
        assert {row["id"]: row["number"] for row in part} == expected
        for turn_id, number in expected.items():
            assert (await http.get(f"/chains/ada/turns/{turn_id}")).json()["number"] == number
            assert (await finding.show(settings, None, turn_id))["turn"]["number"] == number
        for form in ("markdown", "html"):
            told = (await http.get("/chains/ada", params={"format": form})).text
            pairs = zip(re.findall(r"Turn (\d+) ", told), re.findall(r"word (\w+)", told), strict=False)
            assert {f"turn_{name}": int(number) for number, name in pairs} == expected
        hits = (await http.get("/search", params={"q": "word"})).json()["data"]
        assert {hit["turn_id"]: hit["number"] for hit in hits} == expected
