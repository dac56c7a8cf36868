"""What tests of OpenAI's clients look for in answers and errors."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest

from .conftest import client_of
from .test_socket import opened


async def test_errors_are_in_openais_own_words(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, place):
        client = client_of(f"http://{place}/v1")
        done = await client.responses.create(model="sonnet", input="hello")
        with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
            await client.responses.cancel(done.id)
        later = await client.responses.create(model="sonnet", input="hello again", background=True)
        async with httpx.AsyncClient(base_url=f"http://{place}", trust_env=False) as http:
            await http.get(f"/v1/responses/{later.id}?stream=true")  # it ends with the turn
        with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a completed response\."):
            await client.responses.cancel(later.id)
        with pytest.raises(openai.BadRequestError, match="mutually exclusive"):
            await client.responses.create(
                model="sonnet", input="x", previous_response_id=done.id, conversation={"id": "conv_1"}
            )
        await client.close()


async def test_there_is_no_fingerprint_that_is_none(tmp_path: Path) -> None:
    body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
    async with (
        opened(tmp_path) as (_, _, place),
        httpx.AsyncClient(base_url=f"http://{place}/v1", trust_env=False) as http,
    ):
        assert "system_fingerprint" not in (await http.post("/chat/completions", json=body)).json()
        streamed = await http.post("/chat/completions", json={**body, "stream": True})
    assert "system_fingerprint" not in streamed.text
