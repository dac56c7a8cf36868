"""Removes secrets from everything that is shown: dumps, logs, errors. Pure, except for the keys of `know`.

A secret is recognised by its form (a vendor's prefix), by the name before it (a header, a variable, a parameter of a
URL), or as one of our own keys. A form must not match prose. A value that has only a name before it must also look
generated: letters and digits, or small letters right before capitals. The store keeps the verbatim text.

Every pattern takes linear time: none can start again inside the text that it has just scanned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "[redacted]"

# Values of fields with these names are always hidden. Names are compared in lower case, with - and _ equal.
SECRET_NAMES = frozenset(
    {
        "authorization", "proxy_authorization", "x_api_key", "x_goog_api_key", "api_key", "anthropic_api_key",
        "anthropic_auth_token", "claude_code_oauth_token", "aws_secret_access_key", "aws_session_token",
        "aws_bearer_token_bedrock", "openai_api_key", "gemini_api_key", "google_api_key", "github_token", "gh_token",
        "gitlab_token", "hf_token", "npm_token", "slack_token", "slack_bot_token", "stripe_secret_key", "access_token",
        "refresh_token", "client_secret", "private_key", "password", "cookie", "set_cookie",
    }
)  # fmt: skip

_GITLAB_KINDS = "pat|ptt|dt|rt|rtr|soat|ft|imt|agent|cbt|oas"
# A lookahead for generated text: letters and digits, or a small letter right before a capital.
_GENERATED = r"(?:(?=[{0}]*?[0-9])(?=[{0}]*?[A-Za-z])|(?=[{0}]*?[a-z][A-Z]))"
_WIDE = "A-Za-z0-9_-"
_URL = "A-Za-z0-9._~+/=-"


def _generated(characters: str) -> str:
    return _GENERATED.format(characters)


_TOKEN = re.compile(
    rf"""
    sk-ant-[{_WIDE}]{{4,}}                                           # Anthropic
    | (?<![{_WIDE}]) (?:
        sk-(?:proj-|svcacct-|or-v1-)?{_generated(_WIDE)}[{_WIDE}]{{20,}}  # OpenAI, and vendors with the same form
      | gh[pousr]_[A-Za-z0-9]{{20,}} | github_pat_[A-Za-z0-9_]{{20,}}
      | gl(?:{_GITLAB_KINDS})-{_generated(_WIDE)}[{_WIDE}]{{16,}}
      | xox[a-z]-{_generated("A-Za-z0-9-")}[A-Za-z0-9-]{{10,}} | xapp-{_generated("A-Za-z0-9-")}[A-Za-z0-9-]{{10,}}
      | [rsp]k_(?:live|test)_[A-Za-z0-9]{{16,}} | whsec_[A-Za-z0-9+/=]{{16,}}
      | hf_[A-Za-z0-9]{{20,}} | npm_[A-Za-z0-9]{{30,}} | pypi-{_generated(_WIDE)}[{_WIDE}]{{20,}}
      | csp-{_generated(_WIDE)}[{_WIDE}]{{20,}}                           # our own (`serve --make-key`)
      | (?:AKIA|ASIA)[A-Z0-9]{{16}}(?![A-Za-z0-9]) | AIza[{_WIDE}]{{35}} | ya29\.[{_WIDE}]{{20,}}
      | eyJ[{_WIDE}]{{8,}}\.[{_WIDE}]{{8,}}\.[{_WIDE}]*              # JWT
    )
    """,
    re.VERBOSE,
)
# Values after the name of a header, a variable or a field; the name stays. Around the sign are few spaces.
_GAP = r"[\"'\\]{0,2}[ \t]{0,4}[:=][ \t]{0,4}[\"'\\]{0,2}"
_VALUE = r"[^\s\"',;&<>()\[\]{}\\]"
# The lookahead is limited, so that it takes linear time in a text that has many names and no secret.
_LOOKS_GENERATED = rf"(?:(?={_VALUE}{{0,128}}[0-9]){_VALUE}{{6,}}|(?={_VALUE}{{0,128}}[a-z][A-Z]){_VALUE}{{16,}})"
_NAMED: tuple[tuple[re.Pattern[str], str], ...] = (
    # Authorization: Bearer …, and any other scheme
    (
        re.compile(
            rf"(?ai:\b(authorization{_GAP}(?:basic|bearer|digest|token|apikey)[ \t]{{1,4}}))"
            rf"(?:{_generated(_URL)}[{_URL}]{{8,}}|[{_URL}]{{24,}})"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    (re.compile(rf"(?ai:\b(bearer[ \t]{{1,4}})){_generated(_URL)}[{_URL}]{{8,}}"), rf"\g<1>{HIDDEN}"),
    (
        re.compile(
            r"(?ai:((?:authorization|api[_-]?key|access[_-]?key|secret[_-]?key|[_-]token|client[_-]?secret|password|passwd)"
            rf"{_GAP})){_LOOKS_GENERATED}"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    # A URL with a secret
    (
        re.compile(
            r"([?&](?:key|api_key|apikey|access_token|token|sig|signature)=)"
            r"(?:(?=[A-Za-z_.~%-]*[0-9])|(?=[^&\s]{24}))[^&\s\"'<>#]{8,}"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    (re.compile(r"(://[^/\s:@\"'<>]{0,128}:)[^/\s:@\"'<>]{1,512}(?=@)"), rf"\g<1>{HIDDEN}"),
)

_PEM_BEGIN = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----")
_PEM_END = "PRIVATE KEY-----"

# Characters. Our own keys may have any form. The settings refuse a shorter one: it could be a word of any text.
_SHORTEST_KEY = 8
_known: set[str] = set()


def know(secrets: Iterable[str]) -> None:
    """From now on, hide these values in everything that this process shows."""
    _known.update(secret for secret in secrets if len(secret) >= _SHORTEST_KEY)


def known() -> frozenset[str]:
    return frozenset(_known)


def knowing(secrets: Iterable[str], show: Callable[..., T], *given: Any) -> T:
    """Call `show` with these known secrets, in a helper process that does not know them yet."""
    know(secrets)
    return show(*given)


def text(value: str) -> str:
    """The text with every secret in it replaced by `[redacted]`."""
    return _scrubbed(value) if _may_have_secret(value) else value


def head(value: str, most: int) -> str:
    """The first characters, without secrets. Some of the following text is scanned too, as a cut secret would not be
    recognised; but not all of it: 16 MB, which a shell may write in its CLI's place, can take a minute."""
    return text(value[: 8 * most])[:most]


def of_call(value: str) -> str:
    """A tool's call without our own keys and tokens of a vendor's form. A person must be shown all that would run: what
    else `text` hides, such as all lines after the first one of a private key, may be commands."""
    return _TOKEN.sub(HIDDEN, _without_known(value))


def _without_known(value: str) -> str:
    for secret in sorted(_known, key=len, reverse=True):
        value = value.replace(secret, HIDDEN)
    return value


def _scrubbed(value: str) -> str:
    value = _without_known(value)
    # Private keys, with the lines around them; one without its last line is hidden to the end of the text.
    pieces: list[str] = []
    done = 0
    while (begin := _PEM_BEGIN.search(value, done)) is not None:
        pieces += (value[done : begin.start()], HIDDEN)
        end = value.find(_PEM_END, begin.end())
        done = len(value) if end < 0 else end + len(_PEM_END)
    value = _TOKEN.sub(HIDDEN, "".join([*pieces, value[done:]]))
    for pattern, replacement in _NAMED:
        value = pattern.sub(replacement, value)
    return value


_SHORTEST_MATCH = 8  # characters; no pattern matches a shorter text
_GITLAB = tuple(f"gl{kind}-" for kind in _GITLAB_KINDS.split("|"))
_GITHUB = ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_")


def _may_have_secret(value: str) -> bool:
    """Whether a pattern can match: every match contains one of these words. The patterns take twenty times as long."""
    if len(value) < _SHORTEST_MATCH:
        return False
    if "-" in value and (
        "sk-" in value or "xox" in value or "xapp-" in value or "pypi-" in value or "csp-" in value
        or "-----BEGIN" in value or ("gl" in value and any(word in value for word in _GITLAB))
    ):  # fmt: skip
        return True
    if "_" in value and (
        "_live_" in value or "_test_" in value or "hf_" in value or "npm_" in value or "whsec_" in value
        or ("g" in value and any(word in value for word in _GITHUB))
    ):  # fmt: skip
        return True
    if "A" in value and ("AKIA" in value or "ASIA" in value or "AIza" in value):
        return True
    if ("J" in value and "eyJ" in value) or ("9" in value and "ya29." in value):
        return True
    for secret in _known:
        if secret in value:
            return True
    low = value.lower()
    if "bearer" in low:
        return True
    if "=" not in value and ":" not in value:
        return False
    return (
        "key" in low or "token" in low or "secret" in low or "passw" in low or "author" in low or "sig" in low
        or ("@" in low and "://" in low)
    )  # fmt: skip


def data(value: Any) -> Any:
    """A copy of a JSON value without secrets, in values and in the names of fields."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for name, item in value.items():
            shown, secret = _fields.get(name) or _field(str(name))
            kind = type(item)
            if kind in _WITHOUT_TEXT:
                out[shown] = item
            elif secret:
                out[shown] = _hidden(item)
            elif kind is str:
                out[shown] = _scrubbed(item) if _may_have_secret(item) else item
            else:
                out[shown] = data(item)
        return out
    if isinstance(value, (list, tuple)):
        return [data(item) for item in value]
    return value


_WITHOUT_TEXT = frozenset({int, float, bool, type(None)})
# The cache of `_field`: the first `_CACHED` names of at most `_SHORT` characters. Most JSON has the fields of a few
# shapes.
_SHORT = 64
_CACHED = 1024
_fields: dict[str, tuple[str, bool]] = {}


def _field(name: str) -> tuple[str, bool]:
    """A field's name as it is shown, and whether its value is always hidden."""
    result = text(name), name.lower().replace("-", "_") in SECRET_NAMES
    if len(name) <= _SHORT and len(_fields) < _CACHED:
        _fields[name] = result
    return result


def _hidden(value: Any) -> Any:
    """The value of a field with a secret name, hidden; in a list each text is hidden."""
    if isinstance(value, str):
        return HIDDEN if value else value
    return [_hidden(item) for item in value] if isinstance(value, (list, tuple)) else data(value)
