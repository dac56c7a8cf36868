"""Every token that we know the form of is hidden wherever it stands; prose and our own messages never are."""

from __future__ import annotations

import ast
import json
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cli_session_proxy
from cli_session_proxy import redact

PACKAGE = Path(cli_session_proxy.__file__).parent
ALNUM = string.ascii_letters + string.digits
WIDE = ALNUM + "_-"


def random(alphabet: str, low: int, high: int) -> st.SearchStrategy[str]:
    """Random characters as a machine makes them: letters and digits are both there, words are not."""
    body = st.text(alphabet, min_size=low - 3, max_size=high - 3)
    return st.tuples(body, st.sampled_from("0123456789"), st.sampled_from("Qkx")).map(
        lambda part: f"{part[1]}{part[0]}{part[2]}0"
    )


def after(prefix: str, alphabet: str, low: int, high: int | None = None) -> st.SearchStrategy[str]:
    return random(alphabet, low, high or low + 20).map(prefix.__add__)


PEM = "-----BEGIN {0}PRIVATE KEY-----\n{1}\n-----END {0}PRIVATE KEY-----"
TOKENS: dict[str, st.SearchStrategy[str]] = {
    "anthropic": after("sk-ant-api03-", WIDE, 20),
    "openai": after("sk-proj-", WIDE, 40),
    "github": st.sampled_from(["ghp_", "gho_", "ghu_", "ghs_", "ghr_"]).flatmap(lambda p: after(p, ALNUM, 36, 40)),
    "github fine-grained": after("github_pat_", ALNUM + "_", 60, 82),
    "gitlab": st.sampled_from(["glpat-", "gldt-", "glrt-", "glptt-"]).flatmap(lambda p: after(p, WIDE, 20)),
    "slack": st.sampled_from(["xoxb-", "xoxp-", "xoxa-", "xapp-1-"]).flatmap(lambda p: after(p, ALNUM + "-", 24)),
    "stripe": st.sampled_from(["sk_live_", "rk_live_", "sk_test_", "pk_live_"]).flatmap(lambda p: after(p, ALNUM, 24)),
    "stripe webhook": after("whsec_", ALNUM, 32),
    "hugging face": after("hf_", ALNUM, 34, 37),
    "npm": after("npm_", ALNUM, 36, 37),
    "pypi": after("pypi-", WIDE, 60),
    "google": random(WIDE, 35, 35).map("AIza".__add__),
    "aws": st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16).map("AKIA".__add__),
    "ours": after("csp-", WIDE, 43, 44),
    "jwt": st.tuples(*(random(WIDE, 12, 40) for _ in range(3))).map(lambda p: f"eyJ{p[0]}.eyJ{p[1]}.{p[2]}"),
    "pem": st.tuples(
        st.sampled_from(["", "RSA ", "OPENSSH ", "EC ", "ENCRYPTED "]), random(ALNUM + "+/=\n", 40, 400)
    ).map(lambda p: PEM.format(*p)),
}
# Where a token may stand: before it and behind it.
AROUND = (
    ("", ""),
    ("my token is ", " ok"),
    ('{"a": "', '"}'),
    ("(", ")"),
    ("x=", "\n"),
    ("https://u:", "@host/x"),
    ("'", "',"),
)


@pytest.mark.parametrize("kind", TOKENS)
@given(data=st.data())
@pytest.mark.sample(5)
def test_a_token_is_hidden_wherever_it_stands_and_nothing_else(kind: str, data: st.DataObject) -> None:
    token, (before, behind) = data.draw(TOKENS[kind]), data.draw(st.sampled_from(AROUND))
    shown = redact.text(f"{before}{token}{behind}")
    assert token not in shown
    assert redact.HIDDEN in shown
    assert shown.startswith(before)
    assert shown.endswith(behind)
    escaped = json.dumps({"said": f"{before}{token}{behind}"})
    assert json.dumps(token)[1:-1] not in redact.text(escaped)


SECRET = random(ALNUM + "._~+/-", 16, 60)


@pytest.mark.parametrize(
    "form",
    [
        "Authorization: Bearer {}", "authorization: bearer {}", '"Authorization": "Bearer {}"',
        "Proxy-Authorization: Basic {}",
        "AUTHORIZATION=Bearer {}", "curl -H 'Authorization: token {}'", "use Bearer {} for it", "x-api-key: {}",
        "X-Goog-Api-Key:{}", "ANTHROPIC_API_KEY={}", "export OPENAI_API_KEY='{}'", '"api_key": "{}"', "HF_TOKEN={}",
        "aws_secret_access_key = {}", "GITHUB_TOKEN={}", "password={}", "client_secret: {}",
        "http://127.0.0.1/v1/models?key={}",
        "https://host/x?alt=sse&key={}&y=1", "https://host/x?access_token={}",
    ],
)  # fmt: skip
@given(secret=SECRET)
@pytest.mark.sample(7)
def test_what_a_header_a_variable_or_an_address_names_is_hidden(form: str, secret: str) -> None:
    assert secret not in redact.text(form.format(secret))


@given(secret=st.text(ALNUM, min_size=6, max_size=20))
def test_a_password_in_an_address_is_hidden_and_the_address_is_not(secret: str) -> None:
    shown = redact.text(f"postgresql://ada:{secret}@db.example:5432/chains")
    assert shown == f"postgresql://ada:{redact.HIDDEN}@db.example:5432/chains"


# --- what is never touched

WORDS = (
    "cup", "bearer", "Bearer", "understands", "torch-bearer", "authorization", "Authorization",
    "proxy-authorization", "basic",
    "token", "tokens", "api-key", "x-api-key", "API", "key", "keys", "password", "secret", "sk-learn", "sk", "the",
    "of", "is",
    "required", "missing", "characteristically", "internationalisation", "github", "npm", "https://example.com/a/b",
    "hf", "gl",
    "slack", "-", "–", "eyes", "eyJ", "BEGIN", "AKIA", "csp", "a", "I", "2026", "42", "never",
    "scikit-learn-pipelines-and-others",
    "sk-something-that-is-only-words", "csp-frame-ancestors-and-others", "x-goog-api-key",
)  # fmt: skip
JOINS = (" ", " ", " ", ", ", ". ", ": ", "; ", "\n", "? ", " (", ") ", "-", "/", " = ")


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(JOINS)), max_size=30))
def test_prose_is_never_touched(parts: list[tuple[str, str]]) -> None:
    """`cup-bearer understands` became `cup-bearer [redacted]`."""
    prose = "".join(word + join for word, join in parts)
    assert redact.text(prose) == prose


@pytest.mark.parametrize(
    "prose",
    [
        "The cup-bearer understands.", "send it as Authorization: Bearer, x-api-key or x-goog-api-key",
        "Authorization: the act of giving rights", "BEARER UNDERSTANDS NOTHING", "Bearer Understands Everything",
        "password: required, at least eight characters", "the api_key: a string", "x-api-key: characteristically",
        'api_key = os.environ["OPENAI_API_KEY"]', "?key=value", "token=abc", "a key: 5e551011",
        "-----BEGIN CERTIFICATE-----\nMII",
        "ssh-rsa and -----BEGIN", "eyJhbGciOi is how a JWT begins", "hf_hub_download", "npm_config_registry",
        "sk_live_", "ghp_",
        "glpat-", "see https://user@host/path", "at 12:30, call me: 555-0100",
        "sk-learn-a-very-long-name-without-digits",
    ],
)  # fmt: skip
def test_these_are_never_touched(prose: str) -> None:
    assert redact.text(prose) == prose


def literals() -> Iterator[tuple[str, str]]:
    """Every text of the program but the patterns themselves: messages, help, docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "redact.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


def test_our_own_words_are_never_touched() -> None:
    """`send it as Authorization: Bearer, …` became `send it as Authorization: [redacted]`."""
    found = list(literals())
    assert len(found) > 3000
    assert [(place, text) for place, text in found if redact.text(text) != text and "fake" not in text] == []


# --- keys of ours, whatever they look like


def test_a_key_that_we_know_is_hidden_whatever_it_looks_like() -> None:
    redact.know(["opensesame opensesame", "short"])
    assert redact.text("say opensesame opensesame, please") == "say [redacted], please"
    assert redact.data({"a": ["opensesame opensesame"]}) == {"a": ["[redacted]"]}
    assert redact.text("in short") == "in short"


# --- how it is looked for

PIECES = (
    "sk-ant-abcd1234", "sk-", "ASK-ME", "sk-proj-0123456789abcdefghij", "Bearer ", "BEARER abcdefGh12", "x-api-key: ",
    "X-Goog-Api-\u212aey=", "aws_\u017fecret_access_key=", "AWS_SESSION_TOKEN='", "claude_code_oauth_token\": \"",
    "AKIA0123456789ABCDEF", "ASIA0123456789ABCDEF", "AIza" + "0" * 35, "ghp_" + "a1" * 18, "xoxb-123456789012-abc",
    "?key=",
    "Authorization: Basic ", "AUTHORIZATION=", "abcdef0123456789", "secret", " ", "\n", "\"", "é",
    "-----BEGIN PRIVATE KEY-----",
    "-----END PRIVATE KEY-----", "eyJ0123456789.eyJ0123456789.0123456789", "://u:", "@", "hf_" + "b2" * 17, "password=",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text())
def test_a_text_is_redacted_as_by_the_patterns_alone(text: str) -> None:
    assert redact.text(text) == redact._scrubbed(text)


@pytest.mark.parametrize(
    "piece", [*PIECES, "eyJ-", "sk-a", "-----BEGIN RSA PRIVATE KEY-----\n", "bearer  ", "://a:", "key=", "a=", "?sig="]
)
@pytest.mark.sample(13)
def test_no_text_takes_longer_than_its_length_is_worth(piece: str) -> None:
    """A pattern that looks at a text again from each place in it would take hours here."""
    assert redact._scrubbed(piece * (500_000 // len(piece))) is not None


def test_a_field_named_like_a_secret_is_hidden_however_long_other_names_are() -> None:
    shown = redact.data({"api-key": "plain", "Authorization": "", "n" * 1000: ["sk-ant-abcd1234"], "count": 3})
    assert shown == {"api-key": "[redacted]", "Authorization": "", "n" * 1000: ["[redacted]"], "count": 3}


def test_every_value_under_a_secret_name_is_hidden() -> None:
    """Headers come as lists too, and no pattern knows what stands in this one."""
    shown = redact.data(
        {"headers": {"X-Api-Key": ["plain", "", 7], "Accept": ["plain"]}, "api_key": {"type": "string"}}
    )
    assert shown == {
        "headers": {"X-Api-Key": ["[redacted]", "", 7], "Accept": ["plain"]}, "api_key": {"type": "string"},
    }  # fmt: skip
