"""LiteLLM itself, imported once, where models are configured: it takes two seconds and 170 MB.

Its price list comes from the package, not from the network; it says nothing on its own, and repeats nothing: we
count retries ourselves.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from ...errors import ConfigError


@cache
def litellm() -> Any:
    """The module. Raises `ConfigError` where it is not installed."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read at its import only
    try:
        import litellm as module  # noqa: PLC0415 - a proxy without models never pays for it
    except ImportError as exc:
        raise ConfigError(
            "[models.*] needs LiteLLM, which is not installed: pip install 'cli-session-proxy[models]'"
        ) from exc
    module.telemetry = False
    module.suppress_debug_info = True
    module.disable_aiohttp_transport = True  # its sessions are left open when the loop ends
    return module
