"""LiteLLM's HTTP clients belong to the engines that asked with them."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import ClientSession

from cli_session_proxy.settings import Settings
from turnfault.ports import free_port

from ...talking import ask, running
from .servers import Provider


def open_sessions() -> int:
    """On this loop, wherever LiteLLM keeps them."""
    loop = asyncio.get_running_loop()
    found = [one for one in gc.get_objects() if type(one) is ClientSession]
    return sum(not one.closed and one._loop is loop for one in found)


async def test_the_last_engine_of_a_loop_closes_them_and_the_first_leaves_them_to_the_others(
    with_models: Callable[..., Settings], provider: Provider, tmp_path: Path
) -> None:
    settings = with_models(claude_bin=tmp_path / "none")
    async with running(settings) as engine:
        async with running(settings) as other:
            for model in ("gpt", "gemini"):
                await ask(engine, "hello", model=model)
                await ask(other, "hello", agent="b", model=model)
            assert open_sessions() == 2
        assert open_sessions() == 2
        await ask(engine, "again", model="gpt")
        assert open_sessions() == 2
    assert open_sessions() == 0


async def test_an_engine_that_is_started_again_has_new_ones(
    with_models: Callable[..., Settings], provider: Provider, tmp_path: Path
) -> None:
    settings = with_models(claude_bin=tmp_path / "none")
    async with running(settings) as engine:
        for said in ("one", "two"):
            for model in ("gpt", "gemini"):
                assert (await ask(engine, said, model=model)).status == "completed"
            assert open_sessions() == 2
            await engine.stop()
            assert open_sessions() == 0
            await engine.start()


def test_the_first_request_imports_nothing_large() -> None:
    """The event loop would be held for a second. In a program of its own: here all is imported already."""
    program = f"""
import asyncio, sys
from cli_session_proxy.backends.litellm.library import litellm
module = litellm()
before = set(sys.modules)
refused = module.acompletion(
    model="openai/m", messages=[{{"role": "user", "content": "x"}}], api_base="http://127.0.0.1:{free_port()}/v1",
    api_key="none", num_retries=0, max_retries=0, stream=True,
)
try:
    asyncio.run(refused)
except Exception as exc:
    print(type(exc).__name__)
print(len([name for name in set(sys.modules) - before if name.split(".")[0] in ("openai", "fastapi")]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    error, imported = ran.stdout.split()
    assert error == "InternalServerError"
    assert int(imported) < 20
