"""A conversation on its way to another machine, or copied under another name: its items and responses come along."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cli_session_proxy.commands import moving
from cli_session_proxy.domain.limits import conversation_id
from turnfault.provider.upstream import Upstream

from .conftest import Door, OpenDoor


async def items(door: Door, conversation: str) -> list[tuple[str, str]]:
    page = await door.openai.conversations.items.list(conversation, order="asc")
    return [(str(item.id), part.text) async for item in page for part in getattr(item, "content", [])]


async def a_conversation(door: Door) -> tuple[Any, Any]:
    """Items written by hand, a turn that took them in, one of its items taken out, and one that waits."""
    made = await door.openai.conversations.create(
        metadata={"topic": "moving"},
        items=[
            {"type": "message", "role": "user", "content": "remember a = 1"},
            {"type": "message", "role": "assistant", "content": "Noted by hand."},
            {"type": "message", "role": "user", "content": "remember b = 2"},
        ],
    )
    response = await door.openai.responses.create(model="sonnet", input="recall", conversation=made.id)
    gone = next(item_id for item_id, text in await items(door, made.id) if text == "remember b = 2")
    await door.openai.conversations.items.delete(gone, conversation_id=made.id)
    waits: list[Any] = [{"type": "message", "role": "user", "content": "remember c = 3"}]
    await door.openai.conversations.items.create(made.id, items=waits)
    return made, response


async def goes_on(door: Door, conversation: str, upstream: Upstream) -> None:
    response = await door.openai.responses.create(model="sonnet", input="recall now", conversation=conversation)
    assert response.output_text == "I remember: a is 1; c is 3."
    assert "remember b = 2" not in upstream.requests[-1].raw.decode()


async def test_a_conversation_goes_on_elsewhere_with_all_its_items(
    open_door: OpenDoor, upstream: Upstream, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    async with open_door() as door:
        made, response = await a_conversation(door)
        before = await items(door, made.id)
        kept = (await door.http.get(f"/v1/responses/{response.id}")).json()
        await moving.export(door.settings, "local", made.id, file)
    async with open_door(var=tmp_path / "there", claude_config_dir=tmp_path / "config-there") as door:
        await moving.import_(door.settings, "local", file, None)
        assert await items(door, made.id) == before
        assert (await door.openai.conversations.retrieve(made.id)).metadata == {"topic": "moving"}
        assert (await door.http.get(f"/v1/responses/{response.id}")).json() == kept
        followed = await door.openai.responses.create(model="sonnet", input="and?", previous_response_id=response.id)
        assert followed.previous_response_id == response.id
        await goes_on(door, made.id, upstream)


async def test_a_copy_beside_it_has_ids_of_its_own(open_door: OpenDoor, upstream: Upstream, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    async with open_door() as door:
        made, _ = await a_conversation(door)
        await moving.export(door.settings, "local", made.id, file)
        assert (await moving.import_(door.settings, "local", file, "copy")).renamed
        copy = conversation_id("copy")
        before, after = await items(door, made.id), await items(door, copy)
        assert [text for _, text in after] == [text for _, text in before]
        assert not {item_id for item_id, _ in after} & {item_id for item_id, _ in before}
        kinds = [item_id.partition("_")[0] for item_id, _ in before]
        assert [item_id.partition("_")[0] for item_id, _ in after] == kinds
        *_, row = (await door.http.get("/v1/chains/copy")).json()["turns"]
        response = (await door.http.get(f"/v1/responses/{row['id'].replace('turn_', 'resp_')}")).json()
        assert response["conversation"] == {"id": copy}
        await goes_on(door, copy, upstream)
        await goes_on(door, made.id, upstream)


async def test_a_file_of_the_first_version_is_read_as_well(
    open_door: OpenDoor, upstream: Upstream, tmp_path: Path
) -> None:
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    async with open_door() as door:
        response = await door.openai.responses.create(
            model="sonnet", input="remember a = 1", extra_body={"agent_id": "a"}
        )
        await moving.export(door.settings, "local", "a", new)
    lines = [json.loads(line) for line in new.read_text().splitlines()]
    lines[0]["schema"] = "cli-session-proxy/export/1"
    told = [line for line in lines[:-1] if "conversation" not in line and "item" not in line]
    for turn in (line["turn"] for line in told if "turn" in line):
        for name in ("placed", "options", "evidence", "stop_sequence", "backend", "answered_by"):
            del turn[name]
        turn["reason"] = {"rule": "head", "messages": 1, "matched": 0, "imported": 0, "delta": True}
    body = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in told)
    end = lines[-1]["end"] | {"lines": len(told), "sha256": hashlib.sha256(body.encode()).hexdigest()}
    old.write_text(f"{body}{json.dumps({'end': end}, separators=(',', ':'))}\n")
    async with open_door(var=tmp_path / "there", claude_config_dir=tmp_path / "config-there") as door:
        await moving.import_(door.settings, "local", old, None)
        followed = await door.openai.responses.create(model="sonnet", input="recall", previous_response_id=response.id)
        assert followed.output_text == "I remember: a is 1."
