"""Runs the self-check as a child process: at low priority, bounded in time, and without access to a login.

The child's environment is built here: PATH, the language, and its own HOME, TMPDIR and config directory in a private
folder, which is removed afterwards. Its key is fake, and its provider is on loopback. After a failure the check runs
again: only what fails twice is reported as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..backends.claude.process import descriptors
from ..backends.claude.process.observed import Observation, Observed, expected, is_fit, read
from ..domain.models import JSON
from ..settings import Settings

# Seconds of one run: after which no further step begins, for the last step, and to end after its input was closed.
SECONDS, LAST_STEP, END_WAIT = 50.0, 10.0, 5.0
_LANGUAGE = ("LANG", "LC_ALL", "LC_CTYPE", "TZ")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run. `why`: the reason if it could not be completed; such a run decides nothing.

    `version`: as the CLI reports it.
    """

    path: Path
    version: str = ""
    day: str = ""
    seconds: float = 0.0
    observed: Observed = field(default_factory=dict)
    why: str | None = None

    @property
    def version_tuple(self) -> tuple[int, int, int]:
        numbers = [int(part) for part in self.version.split("-")[0].split(".")[:3] if part.isdecimal()]
        first, second, third = (*numbers, 0, 0, 0)[:3]
        return first, second, third

    @property
    def passed(self) -> bool:
        return self.why is None and is_fit(self.observed)

    def surprises(self) -> list[Observation]:
        """The failed observations that were expected to succeed."""
        failed = [one for one in self.observed.values() if one.outcome == "failed"]
        return [one for one in failed if expected(one.name, self.version_tuple)]


async def check(claude: Path, settings: Settings) -> Report:
    """Run the check, and once more after an unexpected failure. Whatever the CLI does, it never raises."""
    first = await _run(claude, settings)
    if first.why is not None or not first.surprises():
        return first
    second = await _run(claude, settings)
    if second.why is not None or second.version != first.version:
        return replace(second, why=second.why or f"it was version {first.version} first, then {second.version}")
    unsure: dict[str, Observation] = {
        one.name: replace(second.observed[one.name], detail=f"it failed once: {one.detail}")
        for one in first.surprises()
        if second.observed[one.name].outcome == "ok"
    }
    return replace(second, observed={**second.observed, **unsure})


async def _run(claude: Path, settings: Settings) -> Report:
    try:
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="csp-check-"))
    except OSError as exc:
        return Report(claude, why=f"no folder could be made for it ({exc.strerror})")
    try:
        return await _run_in(folder, claude, settings)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _run_in(folder: Path, claude: Path, settings: Settings) -> Report:
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.__main__ import main; sys.exit(main())"
    env = {name: os.environ[name] for name in _LANGUAGE if name in os.environ}
    env["PATH"] = settings.claude_env.get("PATH") or os.environ.get("PATH", os.defpath)
    env |= {"HOME": str(folder), "TMPDIR": str(folder)}
    try:
        descriptors.check()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, "--claude-bin", str(claude), "--folder", str(folder),
            "--seconds", str(SECONDS), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=folder, env=env,
            start_new_session=True,
        )  # fmt: skip
    except OSError as exc:
        return Report(claude, why=f"no process could be started for it ({exc.strerror})")
    try:
        async with asyncio.timeout(SECONDS + LAST_STEP):
            assert child.stdout is not None
            printed = await child.stdout.read()
            code = await child.wait()
    except TimeoutError:
        return Report(claude, why=f"it was not done within {SECONDS + LAST_STEP:.0f} s on this machine")
    finally:
        if child.returncode is None:  # a closed input ends it and its children
            assert child.stdin is not None
            child.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), END_WAIT)
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    try:
        output: JSON = json.loads(printed)
        if "observations" not in output:
            return Report(claude, why=str(output.get("why")))
        observed = read(output["observations"])
        why = None
        if "start" not in observed or observed["start"].outcome == "not tried":
            why = observed["start"].detail if "start" in observed else "it saw nothing"
        return Report(claude, str(output["version"]), str(output["day"]), float(output["seconds"]), observed, why)
    except ValueError:
        return Report(claude, why=f"it ended with exit code {code}, and said nothing")
