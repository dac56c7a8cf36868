import asyncio
import json
import os

import goose
from goose import MessageContent, MessageRole, ProviderMessage

tool = goose.ProviderTool(
    name="note",
    description="The note of a secret.",
    input_schema_json=json.dumps(
        {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    ),
)


async def main() -> None:
    model = goose.ProviderModelConfig(model_name="sonnet")
    provider = goose.anthropic_provider(api_key="none", base_url=os.environ["ROOT"], beta_headers=[])
    history = []
    for number in (1, 2):
        said = MessageContent.TEXT(f"Remember: secret {number} is value-{number}")
        history.append(ProviderMessage(role=MessageRole.USER, content=[said]))
        while True:
            answer = await provider.complete(model, "You take notes.", history, [tool])
            history.append(ProviderMessage(role=MessageRole.ASSISTANT, content=answer.content))
            calls = [block for block in answer.content if block.is_TOOL_REQUEST()]
            if not calls:
                break
            results = [
                MessageContent.TOOL_RESULT(call.id, True, json.dumps([{"type": "text", "text": note(call)}]))
                for call in calls
            ]
            history.append(ProviderMessage(role=MessageRole.TOOL, content=results))


def note(call: MessageContent) -> str:
    number = json.loads(call.arguments_json)["number"]
    return f"content-{number}-{number * 7919}"


asyncio.run(main())
