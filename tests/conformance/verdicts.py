"""What is judged of each case that fails: by hand, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .suites import LANGCHAIN, LLMPROBE, Case

Kind = Literal["ours", "the suite's own fault", "a limit", "not judged"]
OURS: Kind = "ours"
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
    "`response.reasoning_summary_text.delta` and its like are in the document that it carries, not in its own list",
)
_CITATIONS = Verdict(THEIRS, "`citations` is a list or null in Anthropic's own document; it takes a list only")
# What is the same in every answer of a wire, by the suite and what it says.
_EVERYWHERE: Mapping[tuple[str, str], Verdict] = {
    ("llm-comply, openai-chat", "system_fingerprint: None is not of type 'string'"): Verdict(
        OURS, "`system_fingerprint` is null, and should be a string or absent"
    ),
    (LLMPROBE, "content.0: Invalid input"): _CITATIONS,
    (LLMPROBE, "content.1: Invalid input"): _CITATIONS,
    (LLMPROBE, "content_block: Invalid input"): _CITATIONS,
    ("llm-comply, anthropic", "'stop_details' is a required property"): Verdict(
        OURS, "`stop_details` is absent where nothing was refused, and should be null"
    ),
}

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


def verdict(suite: str, case: Case) -> Verdict:
    said = " ".join(case.why.replace("|", "/").split())[:300]
    if suite == LANGCHAIN and "Name or service not known" in case.why:
        return Verdict(LIMIT, "it fetches its pictures and documents from the network, of which these runs have none")
    if suite == LANGCHAIN and case.id.endswith(".test_json_mode"):
        return Verdict(LIMIT, "the scripted model does not understand which keys it is asked for")
    unknown = Verdict("not judged", f"the suite says: {said}")
    return _KNOWN.get((suite, case.id)) or _EVERYWHERE.get((suite, case.why), unknown)
