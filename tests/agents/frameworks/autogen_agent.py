import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def note(number: int) -> str:
    """The note of a secret."""
    return f"content-{number}-{number * 7919}"


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model="sonnet", base_url=f"{os.environ['ROOT']}/v1", api_key="none",
        model_info={
            "vision": False, "function_calling": True, "json_output": True, "structured_output": True,
            "family": "unknown",
        },
    )  # fmt: skip
    agent = AssistantAgent("ada", client, tools=[note], reflect_on_tool_use=True)
    for number in (1, 2):
        answer = await agent.run(task=f"Remember: secret {number} is value-{number}")
        print(answer.messages[-1].to_text())
    await client.close()


asyncio.run(main())
