"""litellm and the provider, imported so that nothing reaches for the network."""

from __future__ import annotations

import os

import pytest

with pytest.MonkeyPatch.context() as patch:
    # Read at import only: without it litellm downloads its price list.
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from litellm import exceptions
    from litellm.proxy.types_utils.utils import get_instance_fn

    from cli_session_proxy import provider

__all__ = ["exceptions", "get_instance_fn", "litellm", "offline_environment", "provider"]


def offline_environment(**more: str) -> dict[str, str]:
    """The whole environment of a child process that imports litellm."""
    return {"PATH": os.environ["PATH"], "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}
