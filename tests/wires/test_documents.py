"""PDFs and texts on every wire: by their data they are documents, by URL or id they are refused in words."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.settings import Settings
from cli_session_proxy.wires.chat import body as chat
from cli_session_proxy.wires.generate import content as generate
from cli_session_proxy.wires.interactions import steps as interactions
from cli_session_proxy.wires.messages import content as messages
from cli_session_proxy.wires.responses import items as responses
from turnfault.provider.script import Fail
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..every_wire import proxied
from ..media import paper
from ..talking import ask, heard

PDF = base64.b64encode(paper()).decode()
TEXT = base64.b64encode("naïve words".encode()).decode()
PDF_BLOCK: Block = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}
TEXT_BLOCK: Block = {
    "type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "naïve words"},
}  # fmt: skip
Read = Callable[[Any], tuple[Message, ...]]


def _chat(part: Any) -> tuple[Message, ...]:
    return chat.read_messages([{"role": "user", "content": [part]}])[1]


def _messages(part: Any) -> tuple[Message, ...]:
    return messages.read({"messages": [{"role": "user", "content": [part]}]})[1]


def _responses(part: Any) -> tuple[Message, ...]:
    return tuple(responses.read([{"role": "user", "content": [part]}]).messages)


def _generate(part: Any) -> tuple[Message, ...]:
    return generate.read({"contents": [{"parts": [part]}]})[1]


def _data(mime: str, data: str) -> str:
    return f"data:{mime};base64,{data}"


TAKEN: list[tuple[Read, Any, Any]] = [
    (_chat, {"type": "file", "file": {"file_data": _data("application/pdf", PDF)}},
     {"type": "file", "file": {"file_data": _data("text/markdown", TEXT)}}),
    (_messages, PDF_BLOCK, TEXT_BLOCK),
    (_responses, {"type": "input_file", "file_data": _data("application/pdf", PDF)},
     {"type": "input_file", "file_data": _data("text/csv", TEXT)}),
    (_generate, {"inlineData": {"mimeType": "application/pdf", "data": PDF}},
     {"inlineData": {"mimeType": "application/json", "data": TEXT}}),
    (lambda part: interactions.read([part]), {"type": "document", "mime_type": "application/pdf", "data": PDF},
     {"type": "document", "mime_type": "text/plain", "data": TEXT}),
]  # fmt: skip
DAMAGED = base64.b64encode(paper(password="secret")).decode()
ASKED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "file", "file": {"file_data": _data("application/pdf", DAMAGED)}}]}]}),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": DAMAGED}}]}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_file", "file_data": _data("application/pdf", DAMAGED)}]}]}),
    ("/v1beta/models/sonnet:generateContent", {"contents": [{"parts": [
        {"inlineData": {"mimeType": "application/pdf", "data": DAMAGED}}]}]}),
    ("/v1beta/interactions", {"input": [{"type": "document", "mime_type": "application/pdf", "data": DAMAGED}]}),
]  # fmt: skip
REFUSED: list[tuple[Read, Any]] = [
    (_chat, {"type": "file", "file": {"file_id": "file-1"}}),
    (_chat, {"type": "file", "file": {"file_data": "https://example.com/a.pdf"}}),
    (_messages, {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}}),
    (_responses, {"type": "input_file", "file_url": "https://example.com/a.pdf"}),
    (_generate, {"fileData": {"mimeType": "application/pdf", "fileUri": "https://example.com/a.pdf"}}),
    (lambda part: interactions.read([part]), {"type": "document", "uri": "https://example.com/a.pdf"}),
]


@pytest.mark.parametrize(("read", "pdf", "text"), TAKEN)
def test_a_pdf_and_a_text_are_documents_on_every_wire(read: Read, pdf: Any, text: Any) -> None:
    assert read(pdf) == (Message("user", (PDF_BLOCK,)),)
    assert read(text) == (Message("user", (TEXT_BLOCK,)),)


def test_a_result_of_a_tool_may_be_a_document() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    part = {"type": "file", "file": {"file_data": _data("application/pdf", PDF)}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": [part]}]
    answered = chat.read_messages([{"role": "user", "content": "read it"}, *said])[1][-1]
    assert answered.content == ({"type": "tool_result", "tool_use_id": "call_1", "content": [PDF_BLOCK]},)


@pytest.mark.parametrize(("read", "part"), REFUSED)
def test_a_file_that_is_only_named_is_refused_in_words(read: Read, part: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"data|inlineData"):
        read(part)


@pytest.mark.parametrize(
    ("mime", "data"),
    [("application/zip", TEXT), ("text/plain", "w7="), ("text/plain", "/w=="), ("application/pdf", "")],
)
def test_what_is_no_document_is_refused(mime: str, data: str) -> None:
    with pytest.raises(InvalidRequest):
        _generate({"inlineData": {"mimeType": mime, "data": data}})


def test_a_name_is_kept_and_tells_the_type_where_nothing_else_does() -> None:
    [message] = _chat({"type": "file", "file": {"filename": "notes.txt", "file_data": TEXT}})
    assert message.content == ({**TEXT_BLOCK, "title": "notes.txt"},)


@old_cli_in_full
async def test_documents_reach_the_model_and_are_known_again(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with proxied(make_settings(claude_bin=claude)) as (engine, root):
        part = {"type": "file", "file": {"filename": "a.pdf", "file_data": _data("application/pdf", PDF)}}
        said: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": "read it"}]}]
        async with httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as http:
            for _ in range(2):
                answer = await http.post("/v1/chat/completions", json={"model": "sonnet", "messages": said})
                assert answer.status_code == 200, answer.text
                said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and now?"}]
        sent = upstream.requests[-1].raw.decode()
        assert sent.count(PDF) == 1
        assert heard(upstream) == ["read it", "and now?"]
        [row] = [row async for row in engine.store.summaries()]
        assert row.turns == 2


@old_cli_in_full
async def test_a_pdf_that_the_model_cannot_read_fails_its_turn_and_no_later_one(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with proxied(make_settings(claude_bin=claude)) as (engine, _):
        await ask(engine, "one")
        upstream.when("broken", Fail(400, message="Could not process PDF"), times=None)
        with pytest.raises(InvalidRequest, match=r"(?i)could not (be )?process"):
            await ask(engine, Message("user", (PDF_BLOCK, {"type": "text", "text": "broken"})))
        await ask(engine, "two")
        assert heard(upstream) == ["one", "two"]
        assert PDF not in upstream.requests[-1].raw.decode()


async def test_a_pdf_that_no_model_can_read_is_refused_in_words_on_every_wire(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config", claude_bin=tmp_path / "none")
    async with proxied(settings) as (_, root), httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as http:
        for path, body in ASKED:
            answer = await http.post(path, json={"model": "sonnet", **body})
            assert answer.status_code == 400, answer.text
            assert "it is protected by a password" in answer.text
