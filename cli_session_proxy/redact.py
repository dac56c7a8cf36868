"""Takes secrets out of anything that is shown: dumps, logs, errors. Pure.

A pattern errs on the side of hiding: a dump is for reading, the store keeps the verbatim text.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "[redacted]"

# Values under these names are hidden whatever they look like; compared in lower case with - and _ equal.
SECRET_NAMES = frozenset(
    {
        "authorization", "proxy_authorization", "x_api_key", "x_goog_api_key", "api_key", "anthropic_api_key",
        "anthropic_auth_token", "claude_code_oauth_token", "aws_secret_access_key", "aws_session_token",
    }
)  # fmt: skip

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # Anthropic's API keys and OAuth tokens
    (re.compile(r"sk-ant-[A-Za-z0-9_-]{4,}"), HIDDEN),
    # OpenAI-style keys; long enough not to hit words such as sk-learn
    (re.compile(r"\bsk-(?:proj-|svcacct-|or-v1-)?[A-Za-z0-9_-]{20,}"), HIDDEN),
    # Authorization: Bearer …; short words after "Bearer" are prose
    (re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\g<1>{HIDDEN}"),
    # NAME: value and NAME=value, in headers, shells, JSON and YAML alike
    (
        re.compile(
            r"(?i)\b((?:x-api-key|x-goog-api-key|anthropic_api_key|anthropic_auth_token|claude_code_oauth_token"
            r"|aws_secret_access_key|aws_session_token)[\"']?\s*[:=]\s*[\"']?)[^\s\"',;]+"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    # AWS access key ids
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
)


def text(value: str) -> str:
    """The text with every secret in it replaced by `[redacted]`."""
    for pattern, replacement in _PATTERNS:
        value = pattern.sub(replacement, value)
    return value


def data(value: Any) -> Any:
    """A copy of a JSON value without secrets, in values and in the names of fields."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(str(name)): _field(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [data(item) for item in value]
    return value


def _field(name: str, value: Any) -> Any:
    if isinstance(value, str) and value and name.lower().replace("-", "_") in SECRET_NAMES:
        return HIDDEN
    return data(value)
