"""What another key made is as unknown as what nobody made, on every wire and in its own shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..no_cli import no_cli

ALICE, BOB = "alices-secret-0123456789", "bobs-secret-0123456789"
AGENT = "agent-of-alice"
ASKED = {"model": "sonnet", "input": "hello", "agent_id": AGENT}
GOOGLE = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
SAID = {"model": "sonnet", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
NAMED = {"X-Agent-Id": AGENT}


class Two:
    """Alice has said something by every wire and in a conversation; Bob asks for it."""

    def __init__(self, alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
        self.alice = alice
        self.bob = bob
        self.ids = {"agent": AGENT}

    async def prepare(self) -> None:
        made = await self.by_alice("/v1/conversations", {"items": [{"role": "user", "content": "hello"}]})
        self.ids["conversation"] = made["id"]
        listed = (await self.alice.get(f"/v1/conversations/{made['id']}/items")).json()
        self.ids["item"] = listed["data"][0]["id"]
        self.ids["response"] = (await self.by_alice("/v1/responses", ASKED))["id"]
        self.ids["interaction"] = (await self.by_alice("/v1/interactions", ASKED))["id"]
        self.ids["turn"] = self.ids["response"].replace("resp_", "turn_")

    async def by_alice(self, path: str, body: Any) -> Any:
        answer = await self.alice.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(no_cli(tmp_path, keys={"alice": ALICE, "bob": BOB}))
        both = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, trust_env=False, headers={"Authorization": f"Bearer {key}"})
            )
            for key in (ALICE, BOB)
        ]
        found = Two(*both)
        await found.prepare()
        yield found


UNKNOWN: tuple[tuple[str, str, dict[str, Any] | None, int], ...] = (
    ("GET", "/v1/responses/{response}", None, 404),
    ("GET", "/v1/responses/{response}?stream=true", None, 404),
    ("GET", "/v1/responses/{response}/input_items", None, 404),
    ("POST", "/v1/responses/{response}/cancel", None, 404),
    ("DELETE", "/v1/responses/{response}", None, 404),
    ("POST", "/v1/responses", {**ASKED, "previous_response_id": "{response}"}, 400),
    ("POST", "/v1/responses/input_tokens", {**ASKED, "previous_response_id": "{response}"}, 400),
    ("POST", "/v1/responses", {**ASKED, "conversation": "{conversation}"}, 404),
    ("GET", "/v1/conversations/{conversation}", None, 404),
    ("POST", "/v1/conversations/{conversation}", {"metadata": {}}, 404),
    ("DELETE", "/v1/conversations/{conversation}", None, 404),
    ("GET", "/v1/conversations/{conversation}/items", None, 404),
    ("POST", "/v1/conversations/{conversation}/items", {"items": []}, 404),
    ("GET", "/v1/conversations/{conversation}/items/{item}", None, 404),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}", None, 404),
    ("GET", "/v1/interactions/{interaction}", None, 404),
    ("GET", "/v1beta/interactions/{interaction}?stream=true", None, 404),
    ("POST", "/v1/interactions/{interaction}/cancel", None, 404),
    ("DELETE", "/v1/interactions/{interaction}", None, 404),
    ("POST", "/v1/interactions", {**ASKED, "previous_interaction_id": "{interaction}"}, 404),
    ("GET", "/v1/chains/{agent}", None, 404),
    ("GET", "/v1/chains/{agent}/events", None, 404),
    ("GET", "/v1/chains/{agent}/turns", None, 404),
    ("GET", "/v1/chains/{agent}/turns/{turn}", None, 404),
    ("GET", "/v1/chains/{agent}/turns/{turn}/transcript", None, 404),
    ("GET", "/v1/chains/{agent}/repairs", None, 404),
    ("DELETE", "/v1/chains/{agent}", None, 404),
)


async def test_a_foreign_id_is_refused_word_for_word_as_a_made_up_one(two: Two) -> None:
    made_up = {name: f"{given[:-8]}00000000" for name, given in two.ids.items()}
    for method, path, body, status in UNKNOWN:
        foreign = await refused(two.bob, method, path, body, two.ids)
        assert (path, *foreign) == (path, status, (await refused(two.bob, method, path, body, made_up))[1])


async def refused(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None, ids: dict[str, str]
) -> tuple[int, str]:
    """The status and the answer's text with the names of the ids for the ids themselves."""
    sent = json.dumps(body or {})
    for name, given in ids.items():
        path, sent = path.replace(f"{{{name}}}", given), sent.replace(f"{{{name}}}", given)
    answer = await http.request(method, path, content=sent if body is not None else None)
    text = answer.text
    for name, given in ids.items():
        text = text.replace(given, name)
    return answer.status_code, text


async def test_what_was_asked_for_in_vain_is_still_there_for_its_owner(two: Two) -> None:
    for kind in ("responses", "interactions", "conversations"):
        path = f"/v1/{kind}/{two.ids[kind.removesuffix('s')]}"
        assert (await two.bob.delete(path)).status_code == 404
        assert (await two.alice.get(path)).status_code == 200
    assert (await two.bob.delete(f"/v1/chains/{AGENT}")).status_code == 404
    assert (await two.alice.get(f"/v1/chains/{AGENT}")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", SAID),
        ("/v1/messages", SAID),
        ("/v1/responses", {"model": "sonnet", "input": "hello"}),
        ("/v1/interactions", {"model": "sonnet", "input": "hello"}),
        ("/v1/models/sonnet:generateContent", GOOGLE),
        ("/v1beta/models/sonnet:streamGenerateContent?alt=sse", GOOGLE),
        ("/agents/agent-of-alice/v1/chat/completions", SAID),
        ("/api/chat", SAID),
        ("/api/generate", {"prompt": "hello"}),
        ("/agents/agent-of-alice/api/chat", SAID),
    ],
)
async def test_an_agent_of_the_same_name_is_another_agent(two: Two, path: str, body: dict[str, Any]) -> None:
    assert (await two.bob.post(path, json=body, headers=NAMED)).status_code == 200
    [row] = (await two.bob.get("/v1/chains")).json()["data"]
    assert (row["agent_id"], row["turns"]) == (AGENT, 1)
    alices = {one["agent_id"]: one["turns"] for one in (await two.alice.get("/v1/chains")).json()["data"]}
    assert alices[AGENT] == 2
    shown = (await two.bob.get(f"/v1/chains/{AGENT}/turns/{two.ids['turn']}")).json()
    assert shown["error"]["code"] == "not_found"


async def test_each_wire_says_unknown_in_its_own_shape(two: Two) -> None:
    response = (await two.bob.get(f"/v1/responses/{two.ids['response']}")).json()
    assert (response["error"]["type"], response["error"]["code"]) == ("not_found_error", "not_found")
    previous = await two.bob.post("/v1/responses", json={**ASKED, "previous_response_id": two.ids["response"]})
    assert previous.json()["error"]["code"] == "previous_response_not_found"
    interaction = (await two.bob.get(f"/v1beta/interactions/{two.ids['interaction']}")).json()
    assert set(interaction["error"]) == {"code", "message"}
    assert interaction["error"]["code"] == "not_found"


async def test_numbers_about_all_name_nobody(two: Two) -> None:
    text = (await two.bob.get("/metrics")).text
    assert AGENT not in text
    assert "alice" not in text
