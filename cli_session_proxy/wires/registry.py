"""All wires. A new one is a folder beside this file and a line here."""

from __future__ import annotations

from .base import Wire
from .chat.wire import WIRE as CHAT
from .generate.wire import WIRE as GENERATE
from .interactions.wire import WIRE as INTERACTIONS
from .messages.wire import WIRE as MESSAGES
from .ollama.wire import WIRE as OLLAMA
from .responses.wire import WIRE as RESPONSES

# In the order in which they are asked where several speak one address.
WIRES: tuple[Wire, ...] = (CHAT, MESSAGES, GENERATE, INTERACTIONS, RESPONSES, OLLAMA)
