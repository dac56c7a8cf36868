"""openai-agents with its SQLiteSession, over the model class for LiteLLM that it brings."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up on the net

from agents import Agent, Runner, SQLiteSession, set_tracing_disabled
from agents.extensions.models.litellm_model import LitellmModel

set_tracing_disabled(True)


class Session:
    def __init__(self, folder: str, base_url: str) -> None:
        self.file, self.base_url = f"{folder}/sessions.sqlite", base_url

    async def ask(self, agent: str, words: str, model: str) -> str:
        answers = LitellmModel(
            f"anthropic/claude-{model}-4-5", base_url=self.base_url, api_key=os.environ["ANTHROPIC_API_KEY"]
        )
        helper = Agent(name="helper", instructions="You are a helpful assistant.", model=answers)
        result = await Runner.run(helper, words, session=SQLiteSession(agent, self.file))
        return str(result.final_output)
