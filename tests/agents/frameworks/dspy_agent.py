import os

import dspy

model = dspy.LM("openai/sonnet", api_base=f"{os.environ['ROOT']}/v1", api_key="none", cache=False)
messages = []
for number in (1, 2):
    messages.append({"role": "user", "content": f"Remember: secret {number} is value-{number}"})
    messages.append({"role": "assistant", "content": model(messages=messages)[0]})
print(messages[-1]["content"])
