"""Google's Agent Development Kit with its DatabaseSessionService, over its model class for LiteLLM."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up on the net

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import Runner
from google.adk.sessions import DatabaseSessionService
from google.genai import types

APP, USER = "turnfault", "user"


class Sessions:
    def __init__(self, folder: str, base_url: str) -> None:
        self.base_url = base_url
        self.service = DatabaseSessionService(f"sqlite+aiosqlite:///{folder}/sessions.sqlite")

    async def ask(self, agent: str, words: str, model: str) -> str:
        answers = LiteLlm(
            f"anthropic/claude-{model}-4-5", api_base=self.base_url, api_key=os.environ["ANTHROPIC_API_KEY"]
        )
        helper = LlmAgent(name="helper", instruction="You are a helpful assistant.", model=answers)
        if await self.service.get_session(app_name=APP, user_id=USER, session_id=agent) is None:
            await self.service.create_session(app_name=APP, user_id=USER, session_id=agent)
        runner = Runner(app_name=APP, agent=helper, session_service=self.service)
        said = types.Content(role="user", parts=[types.Part(text=words)])
        answer = ""
        async for event in runner.run_async(user_id=USER, session_id=agent, new_message=said):
            if event.error_code:
                raise RuntimeError(event.error_code)
            if event.is_final_response() and event.content:
                answer = "".join(part.text or "" for part in event.content.parts or ())
        return answer
