import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike


def note(number: int) -> str:
    """The note of a secret."""
    return f"content-{number}-{number * 7919}"


async def main() -> None:
    model = OpenAILike(
        model="sonnet", api_base=f"{os.environ['ROOT']}/v1", api_key="none", is_chat_model=True,
        is_function_calling_model=True, context_window=100_000,
    )  # fmt: skip
    agent = FunctionAgent(tools=[note], llm=model)
    context = Context(agent)
    for number in (1, 2):
        print(await agent.run(f"Remember: secret {number} is value-{number}", ctx=context))


asyncio.run(main())
