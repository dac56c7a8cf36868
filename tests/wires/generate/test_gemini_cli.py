"""What Gemini CLI sends as it comes, with the name of its default model."""

from __future__ import annotations

import json
from typing import Any

from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop, Finished, TurnEvent
from cli_session_proxy.settings import Profile, Settings
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.generate import body as generate

from ...fakes import block, turn

CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]
MANY = {"type": ["ARRAY", "NULL"], "items": {"type": "INTEGER"}}
CAPITALS = {"type": "OBJECT", "properties": {"type": {"type": "STRING", "enum": ["STRING"]}, "many": MANY}}
FEW = {"type": ["array", "null"], "items": {"type": "integer"}}
SMALL = {"type": "object", "properties": {"type": {"type": "string", "enum": ["STRING"]}, "many": FEW}}


def read(contents: list[Any] = CONTENTS, **more: Any) -> generate.GenerateCall:
    return generate.read({"contents": contents, **more}, Naming(), "gemini-2.5-pro")


def test_types_in_capitals_are_read_in_a_json_schema_too() -> None:
    declared = {"functionDeclarations": [{"name": "look", "parametersJsonSchema": CAPITALS}]}
    [tool] = read(tools=[declared]).request.options.tools
    assert tool.schema == SMALL
    config = {"responseMimeType": "application/json", "responseJsonSchema": CAPITALS}
    assert (read(generationConfig=config).request.options.format or {})["schema"] == SMALL


def test_tools_that_google_runs_are_named_and_not_offered() -> None:
    call = read(tools=[{"googleSearch": {}}, {"functionDeclarations": [{"name": "look"}], "urlContext": {}}])
    assert [tool.name for tool in call.request.options.tools] == ["look"]
    assert call.ignored == ("tools.googleSearch", "tools.urlContext")


def test_tokens_of_tools_are_counted() -> None:
    def count(**more: Any) -> int:
        return int(generate.count({"contents": CONTENTS, **more}, Naming())["totalTokens"])

    declared = {"functionDeclarations": [{"name": "look", "parametersJsonSchema": CAPITALS}]}
    assert count(tools=[declared]) > count() + 10


def test_a_bare_word_of_a_schema_is_asked_for_without_a_check() -> None:
    config = {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["A", "B"]}}
    call = read(generationConfig=config)
    assert call.request.options.format is None
    assert call.ignored == ("generationConfig.responseMimeType", "generationConfig.responseSchema")


def test_a_response_that_is_sent_again_counts_once() -> None:
    call = {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "look", "args": {}}}]}
    said = {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "look", "response": {"output": "21"}}}]}
    assert len(read([*CONTENTS, call, said, said, said]).request.messages) == 3


def test_a_stream_ends_with_its_last_words() -> None:
    writer = generate.GenerateWriter("turn_1", "sonnet", "req_1", thoughts=False)
    done = turn(1, output=(block("Hello there."),))
    said = [BlockDelta(0, {"type": "text_delta", "text": piece}) for piece in ("Hello ", "there.")]
    events: list[TurnEvent] = [BlockStart(0, {"type": "text", "text": ""}), *said, BlockStop(0), Finished(done)]
    raw = b"".join(piece for event in events for piece in writer.feed(event))
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    parts = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(parts) == "Hello there."
    assert all(parts)
    assert chunks[-1]["usageMetadata"]["candidatesTokensDetails"][0]["modality"] == "TEXT"


def test_names_of_other_vendors_models_stand_for_one_of_the_clis() -> None:
    settings = Settings()
    assert settings.model_for("gemini-2.5-pro", Profile()) == "sonnet"
    assert settings.model_for("gpt-5.5-codex", Profile()) == "sonnet"
    assert settings.model_for("opus", Profile()) == "opus"
    assert settings.model_for("default", Profile(model="haiku")) == "haiku"
    assert Settings(aliases={"mine": "opus"}).model_for("mine", Profile()) == "opus"
