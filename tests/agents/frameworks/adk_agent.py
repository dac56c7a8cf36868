import asyncio
import os

from google.adk.agents import Agent
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner


def note(number: int) -> str:
    """The note of a secret."""
    return f"content-{number}-{number * 7919}"


async def main() -> None:
    os.environ["GOOGLE_API_KEY"] = "none"
    os.environ["GOOGLE_GEMINI_BASE_URL"] = os.environ["ROOT"]
    agent = Agent(name="one", model=Gemini(model="sonnet"), tools=[note])
    runner = InMemoryRunner(agent=agent)
    await runner.run_debug([f"Remember: secret {number} is value-{number}" for number in (1, 2)])


asyncio.run(main())
