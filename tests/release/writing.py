"""Chains as an older release wrote them, over the real CLI: `python -m tests.release.writing CHECKOUT FILE`.

CHECKOUT holds that release's `cli_session_proxy`. FILE becomes a tar.gz of its store, of its CLI's
transcripts, and of the conversation as its clients know it. The one of this folder was written by 0.1.0, the first
release.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tarfile
from pathlib import Path

from turnfault.provider.upstream import Upstream

from ..chaos.__main__ import binary
from ..chaos.client import Caller, Client
from ..chaos.journal import Entry, Told
from ..chaos.model import Model, Plan, filler
from ..chaos.pictures import with_picture
from ..conftest import CLI_ENV
from .keeping import SPEAKERS, TURNS, known_written, written

# dee's calls are answered; fay's last ones still wait.
CALLS = {(3, 1): 2, (5, 3): 2}
# Where it is written, so that no path of a machine is in the file.
PLACE = Path("/tmp/cli-session-proxy-release")
KEPT = ("var/chains.sqlite3", "claude-config/projects", "journal.jsonl", "clients.json")
SECONDS = 60.0


async def main(checkout: Path, file: Path) -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    (PLACE / "home").mkdir(parents=True)
    journal: list[Entry] = []
    model = Model(journal.append)
    clients = [Client(speaker) for speaker in SPEAKERS]
    async with Upstream(behave=model.behave) as upstream:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli_session_proxy", "serve", cwd=PLACE, env=environment(checkout, upstream.url),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(SECONDS):
                while (found := re.search(rb"listening on (\S+)", await process.stdout.readline())) is None:
                    assert process.returncode is None
            caller = Caller(journal.append, {})
            for turn in range(TURNS):
                for at, client in enumerate(clients):
                    await said(
                        caller, model, client, found[1].decode(), 1 + turn * len(clients) + at, CALLS.get((at, turn), 0)
                    )
            await caller.close()
        finally:
            process.send_signal(signal.SIGTERM)
            await process.communicate()
    journal += [Told(number) for number, seen in model.seen.items() if seen.outcome == "answered"]
    (PLACE / "journal.jsonl").write_text(written(journal))
    told = {client.speaker.name: [known_written(known) for known in client.known.values()] for client in clients}
    (PLACE / "clients.json").write_text(json.dumps(told))
    with tarfile.open(file, "w:gz") as archive:
        for name in KEPT:
            archive.add(PLACE / name, name)
    shutil.rmtree(PLACE)


async def said(caller: Caller, model: Model, client: Client, url: str, turn: int, calls: int) -> None:
    text = f"Turn #{turn}# of {client.speaker.name}: {filler(turn, 60)}"
    model.plans[turn] = Plan(calls, size=60)
    # CLI 2.1.x takes a picture for what it is; a conversation with one is what older releases kept differently.
    request = client.next(turn, text=with_picture(turn, text) if turn % 5 == 0 else text, keyed=False)
    attempt = caller.send(client, request, url, 0)
    heard = await asyncio.wait_for(attempt.task, SECONDS)
    assert heard.outcome == "acknowledged", heard


def environment(checkout: Path, upstream: str) -> dict[str, str]:
    home = str(PLACE / "home")
    cli = CLI_ENV | {"ANTHROPIC_BASE_URL": upstream, "HOME": home}
    own = {
        "PORT": "0", "VAR": str(PLACE / "var"), "CLAUDE_BIN": str(binary("2")),
        "CLAUDE_CONFIG_DIR": str(PLACE / "claude-config"), "CLAUDE_ENV": json.dumps(cli),
    }  # fmt: skip
    around = {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", "PYTHONPATH": str(checkout)}
    return around | {f"CLI_SESSION_PROXY_{name}": value for name, value in own.items()}


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
