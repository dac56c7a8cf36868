import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def note(number: int) -> str:
    """The note of a secret.

    Args:
        number: of the secret
    """
    return f"content-{number}-{number * 7919}"


model = OpenAIServerModel(model_id="sonnet", api_base=f"{os.environ['ROOT']}/v1", api_key="none")
agent = ToolCallingAgent(tools=[note], model=model, verbosity_level=0)
for number in (1, 2):
    print(agent.run(f"Remember: secret {number} is value-{number}", reset=number == 1))
