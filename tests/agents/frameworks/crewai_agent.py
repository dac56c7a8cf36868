import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("note")
def note(number: int) -> str:
    """The note of a secret."""
    return f"content-{number}-{number * 7919}"


model = LLM(model="openai/sonnet", base_url=f"{os.environ['ROOT']}/v1", api_key="none")
ada = Agent(role="clerk", goal="to remember", backstory="You remember.", llm=model, tools=[note])
tasks = [
    Task(description=f"Remember: secret {number} is value-{number}", expected_output="The note.", agent=ada)
    for number in (1, 2)
]
print(Crew(agents=[ada], tasks=tasks).kickoff())
