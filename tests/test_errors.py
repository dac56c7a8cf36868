"""The errors are those of the contract, and survive the store."""

from __future__ import annotations

import re

import pytest

from cli_session_proxy import errors
from cli_session_proxy.errors import ProxyError, QueueFull, UpstreamError, from_dict

from .conftest import ROOT


def every() -> list[type[ProxyError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ProxyError)]


def test_the_contract_lists_every_error_with_its_status() -> None:
    table = (ROOT / "docs" / "contract" / "errors.md").read_text().partition("## Errors")[2].partition("## ")[0]
    listed = {(int(status), code) for status, code in re.findall(r"\b(\d{3}) `(\w+)`", table)}
    assert {(kind.status, kind.code) for kind in every() if kind is not ProxyError} == listed


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in every()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", every())
def test_an_error_comes_back_from_its_dict(kind: type[ProxyError]) -> None:
    error = kind("what to do", param="field", retry_after=1.5, detail={"exit_code": 3})
    back = from_dict(error.as_dict())
    assert type(back) is kind
    assert (str(back), back.param, back.retry_after, back.detail) == ("what to do", "field", 1.5, {"exit_code": 3})


def test_a_subclass_that_inherits_its_code_takes_no_error_of_that_code() -> None:
    class Narrower(QueueFull):
        pass

    assert type(from_dict(Narrower("full").as_dict())) is QueueFull


def test_what_is_not_known_is_not_in_the_dict() -> None:
    assert QueueFull("full").as_dict() == {"status": 429, "code": "queue_full", "message": "full"}


def test_an_unknown_code_is_an_upstream_error() -> None:
    back = from_dict({"code": "from_the_future", "message": "new"})
    assert type(back) is UpstreamError
    assert back.message == "new"
