"""litellm and the provider, imported so that nothing reaches for the network."""

from __future__ import annotations

import os

import pytest

with pytest.MonkeyPatch.context() as patch:
    # Read at import only: without it litellm downloads its price list.
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from litellm import exceptions
    from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients
    from litellm.proxy.types_utils.utils import get_instance_fn

    from cli_session_proxy import provider

__all__ = ["close_clients", "exceptions", "get_instance_fn", "litellm", "offline_environment", "provider"]


def offline_environment(**more: str) -> dict[str, str]:
    """The whole environment of a child process that imports litellm."""
    return {"PATH": os.environ["PATH"], "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}


async def close_clients() -> None:
    """Close the clients that litellm keeps, and forget them: the next test has another loop."""
    await close_litellm_async_clients()  # type: ignore[no-untyped-call]
    litellm.in_memory_llm_clients_cache.flush_cache()  # type: ignore[no-untyped-call]
