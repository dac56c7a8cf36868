"""Settings with two models of other providers, on the real LiteLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cli_session_proxy.settings import ModelSettings, Settings

from .servers import Provider

KEYS = {"OPENAI_TEST_KEY": "sk-openai-test", "GEMINI_TEST_KEY": "gemini-test-key"}


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider() as server:
        yield server


@pytest.fixture
def models(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, ModelSettings]]:
    """`[models.gpt]` and `[models.gemini]`; more fields by name."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)

    def made(**more: Any) -> dict[str, ModelSettings]:
        gpt: dict[str, Any] = {
            "litellm": "openai/gpt-scripted", "api_base": provider.openai_base, "api_key_env": "OPENAI_TEST_KEY",
        }  # fmt: skip
        gemini: dict[str, Any] = {
            "litellm": "gemini/gemini-scripted", "api_base": provider.gemini_base, "api_key_env": "GEMINI_TEST_KEY",
        }  # fmt: skip
        return {
            "gpt": ModelSettings(**gpt | more.get("gpt", {})),
            "gemini": ModelSettings(**gemini | more.get("gemini", {})),
        }

    return made


@pytest.fixture
def with_models(
    make_settings: Callable[..., Settings], models: Callable[..., dict[str, ModelSettings]]
) -> Callable[..., Settings]:
    """Settings of the real CLI beside the two models."""

    def made(*, of_models: dict[str, Any] | None = None, **more: Any) -> Settings:
        return make_settings(models=models(**(of_models or {})), **more)

    return made
