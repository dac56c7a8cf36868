"""The LiteLLM provider `claude-cli`.

    from cli_session_proxy import provider
    provider.register()
    await litellm.acompletion(model="claude-cli/sonnet", messages=[…], agent_id="ada")

or, in a LiteLLM proxy's config.yaml, `custom_handler: cli_session_proxy.provider.handler` (docs/litellm/config.yaml).
The engine runs in this process, from the settings of environment and file; with `api_base` a running `serve`
answers instead. Importing this module imports litellm (2 s); nothing else of the package does.

It holds no state: LiteLLM executes a second copy of a handler's file beside its config.yaml. State is in
`sdk.runtime`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Any

import litellm
from litellm import ModelResponse
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponseStream
from litellm.utils import custom_llm_setup

from .errors import ProxyError
from .sdk import runtime
from .sdk.litellm import results, transports
from .sdk.litellm.call import ChatReply, ProviderCall
from .sdk.litellm.call import read as read_call
from .sdk.litellm.results import PROVIDER, translate
from .sdk.runtime import Source, close, configure

__all__ = ["PROVIDER", "ClaudeCLI", "close", "configure", "handler", "register"]


class ClaudeCLI(CustomLLM):
    """LiteLLM's custom handler for the engine. All arguments are keywords; errors are LiteLLM's exceptions."""

    async def acompletion(self, **kwargs: Any) -> ModelResponse:  # type: ignore[override]  # by keyword only
        with _translated(kwargs):
            async with aclosing(runtime.current().aitems(_complete(read_call(kwargs, stream=False)))) as replies:
                async for reply in replies:  # one reply; the turn is acknowledged at the end
                    answer = results.response(reply)
            return answer

    def completion(self, **kwargs: Any) -> ModelResponse:  # type: ignore[override]  # by keyword only
        with (
            _translated(kwargs),
            closing(runtime.current().items(_complete(read_call(kwargs, stream=False)))) as replies,
        ):
            for reply in replies:
                answer = results.response(reply)
            return answer

    async def astreaming(self, **kwargs: Any) -> AsyncGenerator[ModelResponseStream, None]:  # type: ignore[override]
        # LiteLLM calls this without awaiting it: it must be an async generator function.
        chunks = results.Chunks()
        with _translated(kwargs):
            async with aclosing(runtime.current().aitems(_stream(read_call(kwargs, stream=True)))) as replies:
                async for reply in replies:
                    for chunk in chunks.feed(reply):
                        yield chunk

    def streaming(self, **kwargs: Any) -> Generator[ModelResponseStream, None, None]:  # type: ignore[override]
        chunks = results.Chunks()
        with _translated(kwargs), closing(runtime.current().items(_stream(read_call(kwargs, stream=True)))) as replies:
            for reply in replies:
                yield from chunks.feed(reply)


handler = ClaudeCLI()


def register() -> None:
    """Make `claude-cli/<model>` known to the litellm of this process. Idempotent."""
    others = [item for item in litellm.custom_provider_map if item["provider"] != PROVIDER]
    litellm.custom_provider_map = [*others, {"provider": PROVIDER, "custom_handler": handler}]
    custom_llm_setup()  # type: ignore[no-untyped-call]  # LiteLLM does this at each call, but looks the name up before


def _complete(call: ProviderCall) -> Source[ChatReply]:
    complete = transports.complete_there if call.api_base else transports.complete_here
    return lambda here: complete(here, call)


def _stream(call: ProviderCall) -> Source[ChatReply]:
    stream = transports.stream_there if call.api_base else transports.stream_here
    return lambda here: stream(here, call)


@contextmanager
def _translated(kwargs: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except ProxyError as exc:
        raise translate(exc, str(kwargs.get("model"))) from exc
