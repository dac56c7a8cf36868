import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent


@tool
def note(number: int) -> str:
    """The note of a secret."""
    return f"content-{number}-{number * 7919}"


model = ChatOpenAI(model="sonnet", base_url=f"{os.environ['ROOT']}/v1", api_key="none")
agent = create_react_agent(model, [note], checkpointer=InMemorySaver())
for number in (1, 2):
    said = {"messages": [("user", f"Remember: secret {number} is value-{number}")]}
    answer = agent.invoke(said, {"configurable": {"thread_id": "one"}})
    print(answer["messages"][-1].content)
