"""What is judged of each case that fails: by hand, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .suites import ANTHROPIC, COMPLY, LLMPROBE, OPENAI, Case

Kind = Literal["ours", "the suite's own fault", "a limit", "not judged"]
THEIRS: Kind = "the suite's own fault"
LIMIT: Kind = "a limit"


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    reason: str


_CACHED = Verdict(
    THEIRS, "in the Messages API `input_tokens` leaves out what was read from the cache; it takes them for OpenAI's"
)
_NO_MODEL = Verdict(LIMIT, "a request without a model runs as `default_model`; that is our contract")

_SUMMARIES = Verdict(
    THEIRS,
    "`response.reasoning_summary_text.delta` and `.done` are in the document that it carries, not in its own list of "
    "events; with them in that list both cases pass",
)

# By the suite (what its name begins with) and the case.
_KNOWN: Mapping[tuple[str, str], Verdict] = {
    (LLMPROBE, "messages-usage"): _CACHED,
    (LLMPROBE, "messages-prompt-caching"): _CACHED,
    (LLMPROBE, "messages-prompt-cache-prefix"): _CACHED,
    (LLMPROBE, "messages-assistant-prefill"): Verdict(
        LIMIT, "the CLI continues no answer that somebody else began, and newer models refuse prefills themselves"
    ),
    ("llm-comply, open-responses", "streaming-response"): _SUMMARIES,
    ("llm-comply, open-responses", "streaming-usage"): _SUMMARIES,
    ("llm-comply, google-interactions", "interactions-thinking"): Verdict(
        THEIRS, "it wants a thought of a model that has none; of the one that thinks it gets it"
    ),
    ("llm-comply, open-responses", "compact-missing-model"): _NO_MODEL,
    ("llm-comply, open-responses", "error-handling"): _NO_MODEL,
    ("llm-comply, openai-chat", "chat-error-handling"): _NO_MODEL,
}


# By the suite and what an SDK's test says of the proxy's error.
_MADE_UP = Verdict(THEIRS, "it asks for ids that it made up: the mock that it is written for takes any")
_STORED = Verdict(LIMIT, "completions are kept as turns of a chain: their own routes are not served")
_SDKS: Sequence[tuple[str, str, Verdict]] = (
    (OPENAI, r"(?:Conversation|Response|response) with id '\w+' not found", _MADE_UP),
    (OPENAI, "/v1/chat/completions(?:/completion_id(?:/messages)?)? does not (?:take|exist)", _STORED),
    (OPENAI, "must end with a user message", Verdict(THEIRS, "it sends neither an input nor a prompt")),
    (OPENAI, "mutually exclusive", Verdict(THEIRS, "it sends what OpenAI's own API refuses together")),
    (OPENAI, "logprobs: ", Verdict(LIMIT, "the CLI gives no logprobs")),
    (OPENAI, "prompt: templates", Verdict(LIMIT, "there are no prompt templates")),
    (OPENAI, "does not take DELETE", Verdict(LIMIT, "there are no models of a client's own to delete")),
    (ANTHROPIC, "there is no model 'model_id'", Verdict(THEIRS, "it asks for a model that it made up")),
    (
        f"{COMPLY}, anthropic",
        r"'type': 'text', .* is not valid under any of the given schemas",
        Verdict(
            THEIRS,
            "Anthropic's document requires `citations` of each text; the provider's own answers leave it out where "
            "nothing is cited, and llmprobe takes no null there",
        ),
    ),
    (ANTHROPIC, "is not a JSON Schema", Verdict(THEIRS, 'its tool has a schema that is none: `"location": "bar"`')),
    (ANTHROPIC, "mcp_servers: ", Verdict(LIMIT, "MCP servers are given by a profile of the settings")),
)


def verdict(suite: str, case: Case) -> Verdict:
    said = " ".join(case.why.replace("|", "/").split())[:300]
    for name, words, judged in _SDKS:
        if suite == name and re.search(words, case.why):
            return judged
    unknown = Verdict("not judged", f"the suite says: {said}")
    return _KNOWN.get((suite, case.id), unknown)
