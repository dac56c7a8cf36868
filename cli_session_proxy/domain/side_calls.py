"""Is a request a side call: a title, tags, a suggestion, a routing question or a ping, which nobody continues? Pure.

A side call is only suspected: a hand-off, or a change between planning and building, looks the same. So the turn is
stored as usual, but runs beside the conversation's own process. It counts as an ordinary turn once another turn
continues it. A request at the head of its agent is never suspected, because the next turn continues it.
"""

from __future__ import annotations

import re

from .models import Rule, Turn, TurnRequest
from .system_prompts import is_another

# Beginnings of programs' prompts: of a user message, or a paragraph of the system prompt.
_PROMPTS = re.compile(
    r"(?:\A|\n\n)\s{0,64}(?:"
    # Open WebUI: titles, tags, follow-ups, queries, pictures, completions
    r"### Task:\s+(?:Generate a concise, 3-5 word title|Generate 1-3 broad tags|Suggest 3-5 relevant follow-up"
    r"|Analyze the chat history to determine the necessity|Generate a detailed prompt for|You are an autocompletion)"
    # LibreChat: titles
    r"|(?:Provide|Please generate) a concise, 5-word-or-less title|Analyze this conversation and provide:\s+1\. The"
    # Claude Code and qwen-code: titles, topics, what the user may say next
    r"|Please write a 5-10 word title|Generate a concise, sentence-case title|You are naming a coding session"
    r"|Analyze if this message indicates a new conversation topic|\[SUGGESTION MODE:"
    # Gemini CLI and qwen-code: who speaks next, which model
    r"|Analyze \*only\* the content and structure of your immediately preceding|You are a specialized Task Routing AI"
    # gptme: titles
    r"|Your task: Create a 2-4 word title for this conversation"
    # opencode: titles
    r"|You are a title generator|Generate a title for this conversation"
    r")"
)


def suspected(request: TurnRequest, rule: Rule | None, parent: Turn | None) -> bool:
    """Whether the request looks like a side call. `rule` and `parent` are where `lineage` placed it; `parent` is None
    if no turn of its history is known."""
    last = request.messages[-1].content
    if any(block.get("type") == "tool_result" for block in last):
        return False  # it answers a call
    if rule == "history" and parent is not None:
        tools = {tool.name for tool in parent.options.tools}
        without = bool(tools) and tools.isdisjoint(tool.name for tool in request.options.tools)
        other = without or is_another(parent.system, request.system)
        return _is_known(request) or (other and not parent.placed.side)
    if rule in ("new", "unknown") and request.agent_id is None:
        ping = rule == "new" and request.options.parameters.max_tokens == 1
        return ping or _is_known(request)
    return False


def _is_known(request: TurnRequest) -> bool:
    texts = (str(block["text"]) for block in request.messages[-1].content if block.get("type") == "text")
    return any(_PROMPTS.match(text) for text in texts) or bool(request.system and _PROMPTS.search(request.system))
