import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class note(BaseModel):  # noqa: N801  # a tool of this name
    """The number of a secret."""

    number: int


client = instructor.from_openai(OpenAI(base_url=f"{os.environ['ROOT']}/v1", api_key="none"))
messages = []
for number in (1, 2):
    messages.append({"role": "user", "content": f"Remember: secret {number} is value-{number}"})
    found = client.chat.completions.create(model="sonnet", messages=messages, response_model=note)
    assert found.number == number
    messages.append({"role": "assistant", "content": found.model_dump_json()})
