"""Launches of a fake CLI that misbehaves on demand, and of the real ones."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process import capability as cli
from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.backends.claude.process.child import Launch
from cli_session_proxy.backends.claude.process.guardian import Guardian
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.settings import Profile, Settings

MakeSettings = Callable[..., Settings]
Fake = Callable[..., Awaitable[Launch]]
MakeLaunch = Callable[..., Awaitable[Launch]]


@pytest.fixture
def fake_cli(tmp_path: Path) -> Path:
    program = tmp_path / "fake-claude"
    program.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "fake_cli.py").read_text())
    program.chmod(0o755)
    return program


@pytest.fixture
def settings(tmp_path: Path, fake_cli: Path) -> Settings:
    return Settings(
        var=tmp_path, claude_bin=fake_cli, stop_grace=0.5, spawn_timeout=60.0, max_processes=4, max_spawns=2
    )


@pytest.fixture
def fake(tmp_path: Path, settings: Settings, fake_cli: Path) -> Fake:
    """`await fake("deaf", session_id=…)`: a launch of the fake CLI in that mode."""

    async def make(mode: str = "echo", *, session_id: str | None = None, **options: Any) -> Launch:
        env = environment.build(settings, tmpdir=tmp_path, config_dir=tmp_path) | {"FAKE_CLI": mode}
        env |= options.pop("env", {})
        given: dict[str, Any] = {"cwd": tmp_path, "resume": False, "model": "default", "profile": Profile()}
        return Launch(
            capability=await cli.probe(fake_cli, env),
            session_id=session_id or str(uuid.uuid4()),
            env=tuple(sorted(env.items())),
            **{**given, **options},
        )

    return make


Start = Callable[[Launch], Awaitable[ClaudeProcess]]


@pytest.fixture
async def guardian() -> AsyncIterator[Guardian]:
    guardian = Guardian()
    yield guardian
    await guardian.close()


@pytest.fixture
async def start(settings: Settings, guardian: Guardian) -> AsyncIterator[Start]:
    """Spawns; everything spawned is closed at the end."""
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def running(launch: Launch) -> AsyncIterator[ClaudeProcess]:
            process = await ClaudeProcess.spawn(launch, settings, guardian)
            try:
                yield process
            finally:
                await process.close()

        async def spawn(launch: Launch) -> ClaudeProcess:
            return await stack.enter_async_context(running(launch))

        yield spawn


@pytest.fixture
def real(tmp_path: Path, make_settings: MakeSettings) -> MakeLaunch:
    """`await real(binary, session_id=…, resume=…)`: a launch of a real CLI against the scripted upstream."""
    cwd = tmp_path / "cwd"
    tmpdir = tmp_path / "t"
    cwd.mkdir()
    tmpdir.mkdir()
    settings = make_settings()

    async def make(binary: Path, *, extra_env: dict[str, str] | None = None, **options: Any) -> Launch:
        config_dir = environment.config_dir(settings)
        env = environment.build(settings, tmpdir=tmpdir, config_dir=config_dir) | (extra_env or {})
        given: dict[str, Any] = {
            "session_id": str(uuid.uuid4()), "cwd": cwd, "resume": False, "model": "sonnet",
            "profile": Profile(), "system_prompt": "You are a helpful assistant.",
        }  # fmt: skip
        return Launch(
            capability=await cli.probe(binary, env),
            env=tuple(sorted((name, value) for name, value in env.items() if value)),
            **{**given, **options},
        )

    return make
