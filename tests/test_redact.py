"""What is hidden does not depend on how fast it is looked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy import redact

_WORDS = (
    "sk-ant-abcd1234", "sk-", "ASK-ME", "sk-proj-0123456789abcdefghij", "Bearer ", "BEARER abcdefgh12", "x-api-key: ",
    "X-Goog-Api-\u212aey=", "aws_\u017fecret_access_key=", "AWS_SESSION_TOKEN='", "claude_code_oauth_token\": \"",
    "AKIA0123456789ABCDEF", "ASIA0123456789ABCDEF", "AIza" + "0" * 35,
    "Authorization: Basic ", "AUTHORIZATION=", "abcdef0123456789", "secret", " ", "\n", "\"", "é",
)  # fmt: skip


@given(st.lists(st.sampled_from(_WORDS), max_size=6).map("".join) | st.text())
def test_a_text_is_redacted_as_by_the_patterns_alone(text: str) -> None:
    expected = text
    for pattern, replacement in redact._PATTERNS:
        expected = pattern.sub(replacement, expected)
    assert redact.text(text) == expected


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
