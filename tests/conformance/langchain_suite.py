"""LangChain's own tests of a chat model, for the five wires that it has a model for. Run in the suites' own venv; the
proxy's address is in ROOT. A picture and a PDF, which they would fetch from elsewhere, are in PICTURE and PAPER."""

from __future__ import annotations

import base64
import os
from typing import Any

import httpx
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

ROOT = os.environ["ROOT"]


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, **_: object) -> httpx.Response:
        return httpx.Response(200, content=base64.b64decode(os.environ["PAPER" if url.endswith(".pdf") else "PICTURE"]))

    monkeypatch.setattr(httpx, "get", get)


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "sonnet", "base_url": f"{ROOT}/v1", "api_key": "none", "stream_usage": True, "max_retries": 0}

    model_override_value = "opus"
    supports_image_inputs = True
    supports_image_tool_message = True
    supports_json_mode = True
    supports_pdf_inputs = True
    supports_pdf_tool_message = True
    supports_anthropic_inputs = True


class TestResponses(TestChat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestMessages(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "sonnet", "base_url": ROOT, "api_key": "none", "max_retries": 0}

    model_override_value = "opus"
    supports_image_inputs = True
    supports_image_tool_message = True
    supports_pdf_inputs = True
    supports_pdf_tool_message = True
    supports_anthropic_inputs = True


class TestGenerateContent(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatGoogleGenerativeAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "gemini-2.5-flash", "base_url": ROOT, "google_api_key": "none", "max_retries": 0}

    supports_image_inputs = True
    supports_image_tool_message = True
    supports_json_mode = True
    supports_pdf_inputs = True
    supports_pdf_tool_message = True


class TestOllama(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "sonnet", "base_url": ROOT}

    model_override_value = "opus"
    has_tool_choice = False  # ChatOllama drops it
    supports_image_inputs = True
    supports_json_mode = True
