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
    # Authorization: Basic … and any other scheme; with "Bearer" it may stand without the header's name
    (
        re.compile(
            r"(?i)\b((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?)(?:(?:basic|bearer|digest|token)\s+)?[^\s\"',;]+"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    # AWS access key ids, Google's API keys
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{35}"), HIDDEN),
)


# No pattern matches a text shorter than this.
_SHORTEST = 11


def text(value: str) -> str:
    """The text with every secret in it replaced by `[redacted]`."""
    if len(value) < _SHORTEST or not _may_hold_one(value):
        return value
    for pattern, replacement in _PATTERNS:
        value = pattern.sub(replacement, value)
    return value


def _may_hold_one(value: str) -> bool:
    """Whether it has a word that every match has (in a dump of 20,000 turns the patterns alone took 2.2 s of 4).

    Where case is ignored, only by letters that have no third form: `(?i)s` also matches the long s. One letter is
    looked for in a tenth of the time that a word takes.
    """
    dash, low_line = "-" in value, "_" in value
    if dash and "sk-" in value:
        return True
    if "A" in value and ("AKIA" in value or "ASIA" in value or "AIza" in value):
        return True
    low = value.lower()
    if (dash and "-key" in low) or (low_line and ("_key" in low or "_token" in low)):
        return True
    return "bearer" in low or "author" in low


def data(value: Any) -> Any:
    """A copy of a JSON value without secrets, in values and in the names of fields."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for name, item in value.items():
            known = _names.get(name)
            shown, secret = _name(str(name)) if known is None else known
            out[shown] = item if type(item) in _PLAIN else _hidden(item) if secret else data(item)
        return out
    if isinstance(value, (list, tuple)):
        return [data(item) for item in value]
    return value


_PLAIN = frozenset({int, float, bool, type(None)})


def _hidden(value: Any) -> Any:
    """The value of a field whose name says that it is a secret, or several."""
    if isinstance(value, str):
        return HIDDEN if value else value
    return [_hidden(item) for item in value] if isinstance(value, (list, tuple)) else data(value)


def _name(name: str) -> tuple[str, bool]:
    """A field's name as it is shown, and whether its value is a secret whatever it looks like."""
    known = text(name), name.lower().replace("-", "_") in SECRET_NAMES
    if len(name) <= _SHORT and len(_names) < _MOST:
        _names[name] = known
    return known


# Nearly all fields are those of a few shapes: the names that come first are remembered, up to this length (characters).
_SHORT = 64
_MOST = 1024
_names: dict[str, tuple[str, bool]] = {}
