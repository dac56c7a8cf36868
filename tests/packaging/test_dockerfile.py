"""The Dockerfile's steps, tried without a container engine: what it copies, sets, starts, asks and keeps.

`test_image` builds and runs the image where there is an engine.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.settings import load
from turnfault.ports import free_port
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT
from .dockerfile import environment, health_check, instructions, only, start

SOON = 60.0
KEY = "a-key-for-the-container-0123"
TOKEN = "sk-ant-oat01-fake-for-tests"
# Every Debian has these users (base-passwd 3.6): `useradd` refuses their names.
DEBIANS = {
    "root", "daemon", "bin", "sys", "sync", "games", "man", "lp", "mail", "news", "uucp", "proxy", "www-data",
    "backup", "list", "irc", "_apt", "nobody",
}  # fmt: skip


def test_the_user_is_one_that_debian_does_not_have_and_the_files_are_theirs() -> None:
    (made,) = [one.text for one in instructions() if "useradd" in one.text]
    named = re.search(r"useradd .*--uid (\d+) (\w+) ", made)
    assert named
    assert int(named[1]) >= 1000
    assert named[2] not in DEBIANS
    assert f"--owner {named[2]} --group {named[2]}" in made
    assert only("USER").text == named[2]
    order = [one.name for one in instructions()]
    assert "RUN" not in order[order.index("USER") :]


def test_what_is_copied_is_there_and_passes_dockerignore() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for one in instructions():
        if one.name == "COPY" and not one.text.startswith("--from"):
            *sources, _ = one.words()
            for source in sources:
                assert (ROOT / source).exists()
                assert f"!{source.rstrip('/')}" in ignored, source


@pytest.mark.full
def test_what_is_copied_is_enough_to_build_the_wheel_that_the_last_step_installs(tmp_path: Path) -> None:
    """The build stage offline: its tools are those of the environment that runs the tests."""
    steps = instructions()
    second_stage = [at for at, one in enumerate(steps) if one.name == "FROM"][1]
    for one in steps[:second_stage]:
        if one.name == "COPY":
            *sources, target = one.words()
            inside = tmp_path / target.strip("/")
            for source in (ROOT / source for source in sources):
                if source.is_dir():
                    shutil.copytree(source, inside, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    inside.mkdir(exist_ok=True)
                    shutil.copy(source, inside)
    (build,) = [one for one in steps if "pip wheel" in one.text]
    made = [str(tmp_path / word[1:]) if word.startswith("/") else word for word in build.words()]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "HOME": str(tmp_path)}
    subprocess.run(made, env=path, check=True, capture_output=True, text=True, timeout=SOON)
    wheels = tmp_path / "wheel"
    assert len(list(wheels.iterdir())) == 2
    (copied,) = [one.words() for one in steps if one.text.startswith("--from=build")]
    assert copied[1:] == ["/wheel", "/wheel"]
    (installed,) = [one.text for one in steps if "/wheel/*.whl" in one.text]
    programs = tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", programs.parent], check=True, timeout=SOON)
    step = installed.partition(" && ")[0].replace("/wheel/", f"{wheels}/")
    path["PATH"] = f"{programs}:{os.defpath}"
    subprocess.run(["sh", "-c", step], env=path, check=True, capture_output=True, text=True, timeout=SOON)
    assert (programs / start()[0]).exists()


def test_its_variables_are_settings_and_its_volumes_hold_all_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    settings = load()
    kept = {str(settings.var), str(settings.claude_config_dir)}
    assert kept == set(only("VOLUME").words())
    assert environment()["CLAUDE_CONFIG_DIR"] == str(settings.claude_config_dir)  # for a `claude` by hand
    assert only("EXPOSE").text == str(settings.port)
    for folder in kept:
        assert any(one.name == "RUN" and f" {folder}" in one.text for one in instructions()), folder


def test_the_cli_that_the_extra_brings_is_where_the_link_points(claude_2: Path) -> None:
    (run,) = [one.text for one in instructions() if "ln -s" in one.text]
    target = re.search(r'ln -s ("\$\(.*\)\S*") ', run)
    assert target
    path = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}"}
    found = subprocess.run(["sh", "-c", f"printf %s {target[1]}"], env=path, check=True, capture_output=True, text=True)
    assert Path(found.stdout) == claude_2


# --- what it starts


@asynccontextmanager
async def container(tmp_path: Path, port: int, **more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """ENTRYPOINT and CMD under ENV, with the volumes below `tmp_path` and the port as an engine would map it."""
    env = {name: _inside(tmp_path, value) for name, value in environment().items()}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "HOME": str(tmp_path / "home"), "LANG": "C.UTF-8"}
    env |= {"CLI_SESSION_PROXY_PORT": str(port), **more}
    for folder in only("VOLUME").words():
        os.makedirs(_inside(tmp_path, folder), mode=0o700, exist_ok=True)
    workdir = _inside(tmp_path, only("WORKDIR").text)
    process = await asyncio.create_subprocess_exec(*start(), env=env, cwd=workdir, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), SOON)


def _inside(tmp_path: Path, value: str) -> str:
    return f"{tmp_path}{value}" if value in only("VOLUME").words() else value


@pytest.fixture
def port() -> int:
    return free_port()


async def healthy(port: int) -> None:
    """Wait until the HEALTHCHECK's own command says so."""
    command = [word.replace(":8787", f":{port}") for word in health_check()]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}"}
    async with asyncio.timeout(SOON):
        while True:
            asked = await asyncio.create_subprocess_exec(*command, env=path, stderr=PIPE)
            await asked.communicate()
            if asked.returncode == 0:
                return


async def test_without_a_key_it_says_so_and_does_not_start(tmp_path: Path, port: int) -> None:
    async with container(tmp_path, port) as process:
        _, complained = await asyncio.wait_for(process.communicate(), SOON)
    assert process.returncode == 2
    assert b"[keys]" in complained


async def test_it_serves_by_a_token_is_healthy_and_remembers_in_the_next_container(
    tmp_path: Path, port: int, upstream: Upstream, claude_2: Path
) -> None:
    more = {
        "CLI_SESSION_PROXY_KEYS__ME": KEY, "CLI_SESSION_PROXY_I_AM_THE_ONLY_USER": "true",
        "CLAUDE_CODE_OAUTH_TOKEN": TOKEN, "ANTHROPIC_BASE_URL": upstream.url,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLI_SESSION_PROXY_CLAUDE_BIN": str(claude_2),
    }  # fmt: skip
    for said, expected in (("Remember: the colour is teal", "Noted"), ("What is the colour?", "colour is teal.")):
        async with container(tmp_path, port, **more) as process:
            await healthy(port)
            headers = {"Authorization": f"Bearer {KEY}", "X-Agent-Id": "ada"}
            body = {"model": "sonnet", "messages": [{"role": "user", "content": said}]}
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=SOON, headers=headers
            ) as http:
                answer = await http.post("/v1/chat/completions", json=body)
                assert expected in answer.text
            process.terminate()
            assert await asyncio.wait_for(process.wait(), SOON) == 0
    assert {seen.headers["authorization"] for seen in upstream.requests} == {f"Bearer {TOKEN}"}
    assert _holding(tmp_path, TOKEN.encode()) == []


def _holding(folder: Path, secret: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]
