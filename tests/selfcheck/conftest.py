"""A check on a loaded machine takes as long as it takes: it runs at a low priority."""

from __future__ import annotations

import pytest

from cli_session_proxy.selfcheck import running

from ..serving import CHECK


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SECONDS", CHECK)
