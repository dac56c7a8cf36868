import os

from google import genai
from google.genai import types


def note(number: int) -> str:
    """The note of a secret."""
    return f"content-{number}-{number * 7919}"


client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=os.environ["ROOT"]))
thinking = types.ThinkingConfig(include_thoughts=True, thinking_budget=2048)
config = types.GenerateContentConfig(tools=[note], thinking_config=thinking)
chat = client.chats.create(model="sonnet", config=config)
for number in (1, 2):
    for piece in chat.send_message_stream(f"Remember: secret {number} is value-{number}"):
        print(piece.text)
thoughts = [part for said in chat.get_history() for part in said.parts or () if part.thought]
assert thoughts
