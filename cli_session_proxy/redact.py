"""Takes secrets out of anything that is shown: dumps, logs, errors. Pure, but for the keys that `know` was told.

A token is hidden by its form (a vendor's prefix), by what names it (a header, a variable, an address), or because it is
one of our own keys. A form must not fit prose: what only a name gives away has to look as a machine makes it, with
letters and digits, or small letters right before capitals. The store keeps the verbatim text.

Every pattern is linear: none can begin again inside what it has just looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "[redacted]"

# Values under these names are hidden whatever they look like; compared in lower case with - and _ equal.
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
# As a machine makes it, in what follows: letters and digits, or a small letter right before a capital.
_MADE = r"(?:(?=[{0}]*?[0-9])(?=[{0}]*?[A-Za-z])|(?=[{0}]*?[a-z][A-Z]))"
_WIDE = "A-Za-z0-9_-"
_URL = "A-Za-z0-9._~+/=-"


def _made(characters: str) -> str:
    return _MADE.format(characters)


_TOKEN = re.compile(
    rf"""
    sk-ant-[{_WIDE}]{{4,}}                                           # Anthropic
    | (?<![{_WIDE}]) (?:
        sk-(?:proj-|svcacct-|or-v1-)?{_made(_WIDE)}[{_WIDE}]{{20,}}  # OpenAI and who writes keys as they do
      | gh[pousr]_[A-Za-z0-9]{{20,}} | github_pat_[A-Za-z0-9_]{{20,}}
      | gl(?:{_GITLAB_KINDS})-{_made(_WIDE)}[{_WIDE}]{{16,}}
      | xox[a-z]-{_made("A-Za-z0-9-")}[A-Za-z0-9-]{{10,}} | xapp-{_made("A-Za-z0-9-")}[A-Za-z0-9-]{{10,}}
      | [rsp]k_(?:live|test)_[A-Za-z0-9]{{16,}} | whsec_[A-Za-z0-9+/=]{{16,}}
      | hf_[A-Za-z0-9]{{20,}} | npm_[A-Za-z0-9]{{30,}} | pypi-{_made(_WIDE)}[{_WIDE}]{{20,}}
      | csp-{_made(_WIDE)}[{_WIDE}]{{20,}}                           # our own (`serve --make-key`)
      | (?:AKIA|ASIA)[A-Z0-9]{{16}}(?![A-Za-z0-9]) | AIza[{_WIDE}]{{35}} | ya29\.[{_WIDE}]{{20,}}
      | eyJ[{_WIDE}]{{8,}}\.[{_WIDE}]{{8,}}\.[{_WIDE}]*              # JWT
    )
    """,
    re.VERBOSE,
)
# What is named by a header, a variable or a field; the name stays. Spaces around the sign are few.
_GAP = r"[\"'\\]{0,2}[ \t]{0,4}[:=][ \t]{0,4}[\"'\\]{0,2}"
_VALUE = r"[^\s\"',;&<>()\[\]{}\\]"
# Looked for this far only: a name may follow inside of what is no secret.
_LOOKS_MADE = rf"(?:(?={_VALUE}{{0,128}}[0-9]){_VALUE}{{6,}}|(?={_VALUE}{{0,128}}[a-z][A-Z]){_VALUE}{{16,}})"
_NAMED: tuple[tuple[re.Pattern[str], str], ...] = (
    # Authorization: Bearer …, and any other scheme
    (
        re.compile(
            rf"(?ai:\b(authorization{_GAP}(?:basic|bearer|digest|token|apikey)[ \t]{{1,4}}))"
            rf"(?:{_made(_URL)}[{_URL}]{{8,}}|[{_URL}]{{24,}})"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    (re.compile(rf"(?ai:\b(bearer[ \t]{{1,4}})){_made(_URL)}[{_URL}]{{8,}}"), rf"\g<1>{HIDDEN}"),
    (
        re.compile(
            r"(?ai:((?:authorization|api[_-]?key|access[_-]?key|secret[_-]?key|[_-]token|client[_-]?secret|password|passwd)"
            rf"{_GAP})){_LOOKS_MADE}"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    # An address that carries one
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

# Keys of our own that have no form. Shorter ones than any that we take are words.
_SHORTEST_KEY = 8
_known: set[str] = set()


def know(secrets: Iterable[str]) -> None:
    """Hide these values from now on in everything that this program shows."""
    _known.update(secret for secret in secrets if len(secret) >= _SHORTEST_KEY)


def known() -> frozenset[str]:
    return frozenset(_known)


def knowing(secrets: Iterable[str], show: Callable[..., T], *given: Any) -> T:
    """What this function shows in a helper process, which was told of no secrets yet."""
    know(secrets)
    return show(*given)


def text(value: str) -> str:
    """The text with every secret in it replaced by `[redacted]`."""
    return _scrubbed(value) if _may_hold_one(value) else value


def head(value: str, most: int) -> str:
    """Its first characters, without secrets. A part of what follows is looked at, too: half of one would not be known.
    Not all: in 16 MB that a shell says in its CLI's place there may be a minute of work."""
    return text(value[: 8 * most])[:most]


def _scrubbed(value: str) -> str:
    for secret in sorted(_known, key=len, reverse=True):
        value = value.replace(secret, HIDDEN)
    value = _TOKEN.sub(HIDDEN, _without_pem(value))
    for pattern, replacement in _NAMED:
        value = pattern.sub(replacement, value)
    return value


def _without_pem(value: str) -> str:
    """Private keys with their frame; one without an end is hidden to the end of the text."""
    pieces: list[str] = []
    done = 0
    while (found := _PEM_BEGIN.search(value, done)) is not None:
        pieces += (value[done : found.start()], HIDDEN)
        end = value.find(_PEM_END, found.end())
        done = len(value) if end < 0 else end + len(_PEM_END)
    return "".join([*pieces, value[done:]]) if pieces else value


# No pattern matches a text shorter than this.
_SHORTEST = 8
_GITLAB = tuple(f"gl{kind}-" for kind in _GITLAB_KINDS.split("|"))
_GITHUB = ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_")


def _may_hold_one(value: str) -> bool:
    """Whether it has a word that every match has: most texts have none, and the patterns take twenty times as long."""
    if len(value) < _SHORTEST:
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
    return "key" in low or "token" in low or "secret" in low or "passw" in low or "author" in low or (
        "sig" in low or ("@" in low and "://" in low)
    )  # fmt: skip


def data(value: Any) -> Any:
    """A copy of a JSON value without secrets, in values and in the names of fields."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for name, item in value.items():
            shown, secret = _names.get(name) or _named(str(name))
            kind = type(item)
            if kind in _PLAIN:
                out[shown] = item
            elif secret:
                out[shown] = _hidden(item)
            elif kind is str:
                out[shown] = _scrubbed(item) if _may_hold_one(item) else item
            else:
                out[shown] = data(item)
        return out
    if isinstance(value, (list, tuple)):
        return [data(item) for item in value]
    return value


_PLAIN = frozenset({int, float, bool, type(None)})


def _named(name: str) -> tuple[str, bool]:
    """How a field's name is shown, and whether its value is a secret whatever it looks like."""
    found = text(name), name.lower().replace("-", "_") in SECRET_NAMES
    if len(name) <= _SHORT and len(_names) < _MOST:
        _names[name] = found
    return found


def _hidden(value: Any) -> Any:
    """The value of a field whose name says that it is a secret, or several."""
    if isinstance(value, str):
        return HIDDEN if value else value
    return [_hidden(item) for item in value] if isinstance(value, (list, tuple)) else data(value)


# Of `_named`. Nearly all fields are those of a few shapes: the names that come first are remembered, up to this length
# (characters).
_SHORT = 64
_MOST = 1024
_names: dict[str, tuple[str, bool]] = {}
