"""The self-check as a program. `running.check` starts it and reads its output: one JSON document.

    python -m cli_session_proxy.selfcheck --claude-bin CLAUDE --folder FOLDER

It ends when its standard input is closed, so that it never outlives its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import sys
import threading
import time
from pathlib import Path

from turnfault.provider.upstream import Upstream

from ..backends.claude.process import capability, environment
from ..backends.claude.process.observed import NAMES
from ..domain.models import JSON
from ..errors import ProxyError
from ..sandbox import remove_any
from ..settings import Settings
from .scenes import play
from .stage import Stage

FAKE_KEY = "sk-ant-fake-selfcheck"
NICE = 5  # on a core shared with a turn, it gets a quarter
# Seconds to end its CLI after a cancellation.
END = 4.0


async def check(claude: Path, folder: Path, seconds: float) -> JSON:
    """Check this CLI and return the observations. `folder` is private; the caller removes it. No step begins after so
    many seconds."""
    began = time.monotonic(), time.process_time()
    for name in ("home", "config"):
        (folder / name).mkdir(mode=0o700)
    # With a secret: any other program of this machine could send requests to the port and falsify the result.
    async with Upstream(rules=None, secret=secrets.token_hex(16)) as upstream:
        settings = Settings(
            var=folder / "var", claude_bin=claude, claude_config_dir=folder / "config", cli_retries=0,
            spawn_timeout=seconds, stop_grace=1.0,
            claude_env={
                "HOME": str(folder / "home"), "ANTHROPIC_API_KEY": FAKE_KEY, "ANTHROPIC_BASE_URL": upstream.url,
                "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1",
            },
        )  # fmt: skip
        env = environment.build(settings, tmpdir=folder, config_dir=folder / "config")
        cli = await capability.probe(claude, env, folder)
        stage = Stage(cli, settings, upstream, folder, asyncio.get_running_loop().time() + seconds)
        try:
            await play(stage)
        finally:
            await stage.guardian.close()
    for name in NAMES:
        stage.note(name, "not tried")
    children = os.times()
    return {
        "version": stage.runs or cli.version,
        "path": str(claude),
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.monotonic() - began[0], 2),
        "cpu": round(time.process_time() - began[1] + children.children_user + children.children_system, 2),
        "observations": [stage.found[name].as_json() for name in NAMES],
    }


async def _until_input_ends(claude: Path, folder: Path, seconds: float) -> JSON:
    """Run the check until standard input is closed; then raise CancelledError."""
    loop, checking = asyncio.get_running_loop(), asyncio.create_task(check(claude, folder, seconds))

    def wait() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(checking.cancel)
        time.sleep(END)
        os._exit(1)  # the guardian ends remaining processes

    threading.Thread(target=wait, daemon=True).start()
    return await checking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claude-bin", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    os.nice(NICE)
    logging.disable()  # faults are part of the printed document
    try:
        print(json.dumps(asyncio.run(_until_input_ends(given.claude_bin, given.folder, given.seconds))))
    except asyncio.CancelledError:
        remove_any(given.folder)  # the parent may be dead
        return 1
    except ProxyError as exc:
        print(json.dumps({"why": exc.message}))
    except Exception as exc:  # noqa: BLE001 - the parent reads every fault
        print(json.dumps({"why": f"{type(exc).__name__}: {exc}"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
