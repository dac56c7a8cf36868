"""Codex, from npm, over its WebSocket: what it sends ahead, goes on from by id, and sends whole after a restart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli_session_proxy.wires.responses.socket import ResponsesSocket
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ...conftest import ROOT, MakeSettings, required
from ...every_wire import proxied, the_one_chain
from ...outputs import output_of

CODEX = ROOT / ".tools" / "agents" / "node_modules" / ".bin" / "codex"
TURN = 120.0  # seconds: it starts Node.js and a sandbox first
FACT = "Remember: the colour is teal"


async def test_codex_talks_over_its_socket_and_resumes(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    talk = ResponsesSocket.talk

    async def noted(sockets: ResponsesSocket, socket: object) -> None:
        opened.append("socket")
        await talk(sockets, socket)  # type: ignore[arg-type]

    monkeypatch.setattr(ResponsesSocket, "talk", noted)
    home = tmp_path / "codex"
    home.mkdir()

    async def codex(root: str, *arguments: str) -> str:
        provider = {
            "model_provider": '"p"', "model_providers.p.name": '"p"', "model_providers.p.env_key": '"K"',
            "model_providers.p.base_url": f'"{root}/v1"', "model_providers.p.wire_api": '"responses"',
            "model_providers.p.supports_websockets": "true", "check_for_update_on_startup": "false",
        }  # fmt: skip
        told = [part for name, value in provider.items() for part in ("-c", f"{name}={value}")]
        *before, last = arguments
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb", "K": "none", "CODEX_HOME": str(home)}
        return await output_of(
            str(required(CODEX, "make tools", what="Codex")), "exec", *before, "--skip-git-repo-check", *told, last,
            within=TURN, cwd=tmp_path, env=env,
        )  # fmt: skip

    async with proxied(make_settings(claude_bin=claude_2)) as (engine, root):
        upstream.when("look", ToolUse([("mcp__client__functions__exec", {"input": "text(6 * 7)"})]))
        assert "Noted: colour is teal." in await codex(root, FACT)
        assert "42" in await codex(root, "resume", "--last", "look around")
        assert "I remember: colour is teal." in await codex(root, "resume", "--last", "recall")
        path = await the_one_chain(engine, 4)
    assert len(opened) == 3
    assert [turn.origin for turn in path] == ["responses"] * 4
    shown = upstream.requests[-1].user_texts()
    assert [shown.count(words) for words in (FACT, "look around", "recall")] == [1, 1, 1]
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) >= 0.97
