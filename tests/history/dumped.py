"""The dumps of the only agent there is."""

from __future__ import annotations

import json
from typing import Any

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export.formats import FORMATS


async def dumped(engine: Engine) -> tuple[dict[str, Any], str]:
    """(JSON, markdown) of the one chain in the store."""
    (chain,) = [summary async for summary in engine.store.summaries()]
    texts = {
        name: "".join([piece async for piece in FORMATS[name].write(engine.store, chain.agent, sandbox="s")])
        for name in ("json", "markdown")
    }
    return json.loads(texts["json"]), texts["markdown"]
