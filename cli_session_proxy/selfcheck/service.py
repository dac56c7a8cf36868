"""Beside a proxy that serves: each CLI that comes into use is checked once, and what was seen decides from then on.

- A binary is known by its hash and by the version that it says it is. What one proxy found out is in the store, and all
  that share it go by that. One of them checks; a check that dies with its proxy is claimed by another one later.
- What the store knows is applied at the start. The rest is found out beside turns, at low priority.
- The store owns what is known. What fails in use decides at once in this process, and is in the store behind what a
  check that runs meanwhile will say; then, and every `RETRY` seconds, what the store says is applied again.
- Where a new version fails what is essential, turns go on with the newest one that passed and is still kept.
  Until a changed binary was checked they do, too. It is said in one sentence: on the terminal, in the log, by `doctor`,
  on the page and in /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .. import logs
from ..backends.claude.process import capability, environment, logged_in
from ..backends.claude.process.capability import Capability, Identity
from ..backends.claude.process.observed import ESSENTIAL, Name, Observation, Observed, fit, mismatches, read
from ..domain.models import JSON
from ..errors import ClaudeUnavailable, StoreUnavailable
from ..settings import Settings
from ..stores.base import Finding, Findings
from .keeping import KeptBinaries
from .running import Report, check

log = logs.get(__name__)

Say = Callable[[str], None]

# The finding that says that a check has ended. It gets another name where there is more to look for: what an earlier
# version of this program checked is checked again.
RUN = "run 4"
# Who has claimed a check has so long for it, in seconds: longer than two runs take.
CLAIM = 180.0
# How often it is looked whether another proxy's check has ended, and what a store that does not answer is given.
AGAIN = 5.0
# A check that could not be run is tried again after so many seconds, so many times at most.
RETRY = 600.0
TRIES = 3
# The finding that says why it could not be run.
NOT_RUN = "not_run"
# Observations in use that wait to be stored, at most: there are fewer than this of one CLI.
WAITING = 100


class SelfChecks:
    """The service of one proxy. `run` never ends by itself. See the module docstring."""

    def __init__(self, settings: Settings, store: Findings, say: Say) -> None:
        self._settings = settings
        self._store = store
        self._say = say
        self._kept = KeptBinaries(settings.var / "cli")
        self._new: dict[Identity, Capability] = {}  # to be looked at
        self._tries: dict[Identity, int] = {}  # checks that could not be run
        self._decided: dict[Identity, Observed] = {}  # by what
        self._degraded: list[tuple[Identity, Capability, Observation]] = []  # to be stored
        self._more = asyncio.Event()
        self._last_fit: dict[str, Identity] = {}  # by path: what passed there last, where it is kept
        self._logged: set[str] = set()

    # --- as `capability.Listener`

    def found(self, identity: Identity, cli: Capability) -> None:
        for older in [one for one in self._new if one[0] == identity[0]]:
            del self._new[older]
        if not cli.observed and (passed := self._last_fit.get(identity[0])) is not None:
            capability.stand_in(identity, passed)
        self._decided.pop(identity, None)
        self._new[identity] = cli
        self._more.set()

    def degraded(self, identity: Identity, cli: Capability, seen: Observation) -> None:
        if len(self._degraded) < WAITING:
            self._degraded.append((identity, cli, seen))
        self._more.set()

    # ---

    async def run(self) -> None:
        await self.recall()
        with capability.listening(self):
            while True:
                try:
                    async with asyncio.timeout(RETRY):
                        await self._more.wait()
                except TimeoutError:
                    given_up = [one for one, tries in self._tries.items() if tries >= TRIES]
                    self._new.update((one, cli) for one, cli in capability.there() if one not in given_up)
                self._more.clear()
                try:
                    await self._store_degraded()
                    while self._new:
                        identity = next(iter(self._new))
                        await self._look_at(identity, self._new.pop(identity))
                except StoreUnavailable as exc:
                    log.warning("self_check_not_kept", error=exc.message)

    async def recall(self) -> None:
        """Apply what the store knows of the files that were seen on this host."""
        try:
            found = await self._store.findings()
        except StoreUnavailable as exc:
            log.warning("self_check_not_read", error=exc.message)
            return
        known = by_subject(found)
        for identity, sha256 in (await asyncio.to_thread(self._kept.identities)).items():
            for (of, version), observed in known.items():
                if of == sha256:
                    capability.observe(identity, version, observed)

    async def _look_at(self, identity: Identity, cli: Capability) -> None:
        sha256 = await asyncio.to_thread(self._kept.sha256, identity)
        if sha256 is None:
            return  # another file lies there by now: it will be told
        subject = f"{sha256} {cli.version}"
        while True:
            known = by_subject(await self._store.findings(subject)).get((sha256, cli.version))
            if known is not None:
                if known != self._decided.get(identity):
                    await self._decide(identity, cli, sha256, known)
                return
            if await self._store.claim_finding(subject, RUN, CLAIM):
                break
            await asyncio.sleep(AGAIN)  # another proxy checks it
        log.info("self_check_begins", version=cli.version, path=str(cli.path))
        report = await check(cli.path, self._settings)
        if report.why is not None:
            log.warning("self_check_not_run", version=cli.version, path=str(cli.path), why=report.why)
            await self._store.keep_findings(subject, {NOT_RUN: {"why": report.why}})
            self._tries[identity] = self._tries.get(identity, 0) + 1
            capability.stand_in(identity, None)
            return
        log.info("self_check_ended", version=report.version, path=str(cli.path), seconds=report.seconds)
        await self._store.keep_findings(f"{sha256} {report.version}", findings_of(report))
        if report.version != cli.version:
            # A script that starts another one there: what was seen is of that version.
            capability.observe(identity, report.version, report.observed)
            capability.stand_in(identity, None)
            return
        await self._decide(identity, cli, sha256, report.observed)

    async def _decide(
        self, identity: Identity, cli: Capability, sha256: str, observed: Observed, how: str = "failed its self-check"
    ) -> None:
        capability.observe(identity, cli.version, observed)
        self._tries.pop(identity, None)
        self._decided[identity] = observed
        cli = replace(cli, observed=observed)
        self._warn_of_mismatches(cli)
        essential = await self._essential(cli)
        failed = [observed[name] for name in essential if name in observed and observed[name].outcome == "failed"]
        if not failed:
            capability.stand_in(identity, None)
            if fit(observed):
                place = await asyncio.to_thread(self._kept.keep, cli.path, sha256)
                if place is not None:
                    self._last_fit[identity[0]] = capability.register(place, cli)
            return
        capability.stand_in(identity, await self._newest_that_passed(essential))
        _, instead = capability.known(cli.path) or (cli, cli)
        known = by_subject(await self._store.findings())
        passed = [version for (_, version), seen in known.items() if fit(seen, essential)]
        newest = max(passed, key=capability.numbers, default=None)
        words = sentence(cli, how, failed, None if instead == cli else instead, newest)
        if words not in self._logged:
            self._logged.add(words)
            log.error("claude_unfit", message=words)
            self._say(words)

    async def _essential(self, cli: Capability) -> Sequence[Name]:
        """What the CLI must be able to do under these settings. One that is billed by use needs no login."""
        if cli.does("login"):
            return ESSENTIAL
        env = environment.common(self._settings, environment.config_dir(self._settings))
        by_use = await logged_in.kind(cli.path, env) == "by use"
        return ESSENTIAL if by_use else (*ESSENTIAL, "login")

    async def _newest_that_passed(self, essential: Sequence[Name]) -> Identity | None:
        """The newest CLI that passed and that this host still has a copy of."""
        known = by_subject(await self._store.findings())
        passed = [(version, sha256, seen) for (sha256, version), seen in known.items() if fit(seen, essential)]
        config_dir = environment.config_dir(self._settings)
        for version, sha256, observed in sorted(passed, key=lambda one: capability.numbers(one[0]), reverse=True):
            place = await asyncio.to_thread(self._kept.of, sha256)
            if place is None:
                continue
            env = environment.common(self._settings, config_dir)
            try:
                cli = await capability.probe(place, env)
            except ClaudeUnavailable as exc:
                log.warning("kept_claude_unusable", path=str(place), error=exc.message)
                continue
            if cli.version == version:
                return capability.register(place, replace(cli, observed=observed))
        return None

    def _warn_of_mismatches(self, cli: Capability) -> None:
        surprises = mismatches(cli.observed, cli.version_tuple)
        if surprises and (key := f"{cli.version} {cli.path}") not in self._logged:
            self._logged.add(key)
            lost = {one.name: one.detail for one in surprises if one.outcome == "failed"}
            gained = [one.name for one in surprises if one.outcome == "ok"]
            log.warning("claude_unexpected", version=cli.version, path=str(cli.path), lost=lost, gained=gained)

    async def _store_degraded(self) -> None:
        while self._degraded:
            identity, cli, seen = self._degraded[0]
            sha256 = await asyncio.to_thread(self._kept.sha256, identity)
            if sha256 is not None:
                subject = f"{sha256} {cli.version}"
                await self._store.keep_findings(subject, {seen.name: seen.as_json() | {"in_use": True}})
                known = by_subject(await self._store.findings(subject)).get((sha256, cli.version))
                now = {**cli.observed, seen.name: seen} if known is None else known
                capability.observe(identity, cli.version, now)
                if seen.name in ESSENTIAL:  # the next turn uses another CLI, if there is one
                    await self._decide(identity, cli, sha256, now, "failed in use")
            self._degraded.pop(0)


async def beside(settings: Settings, store: Findings, say: Say) -> None:
    """Run as a service of the server, until it is cancelled."""
    if settings.self_check:
        await SelfChecks(settings, store, say).run()


def by_subject(found: Iterable[Finding]) -> dict[tuple[str, str], Observed]:
    """By hash and version of each CLI whose check has ended: what it was seen to do."""
    seen: dict[tuple[str, str], dict[str, JSON]] = {}
    for one in found:
        sha256, _, version = one.subject.partition(" ")
        seen.setdefault((sha256, version), {})[one.name] = one.found
    return {of: read(names.values()) for of, names in seen.items() if RUN in names}


def recorded(settings: Settings, found: Iterable[Finding], claude: Path, version: str) -> Observed:
    """What the store knows of the file that lies there, as this version; nothing where no check of it has ended."""
    with contextlib.suppress(OSError):
        sha256 = KeptBinaries(settings.var / "cli").identities().get(capability.identity_of(claude), "")
        return by_subject(found).get((sha256, version), {})
    return {}


def findings_of(report: Report) -> dict[str, JSON]:
    """The observations as findings to store."""
    observations: dict[str, JSON] = {str(name): one.as_json() for name, one in report.observed.items()}
    about = {"version": report.version, "path": str(report.path), "day": report.day, "seconds": report.seconds}
    return {**observations, RUN: about}


def sentence(
    cli: Capability, how: str, failed: Sequence[Observation], instead: Capability | None, passed: str | None
) -> str:
    """The sentence for a person about a CLI that failed what memory needs."""
    what = "; ".join(f"{one.name}: {one.detail or 'nothing was seen'}" for one in failed)
    begin = f"Claude CLI {cli.version} at {cli.path} {how} ({what})"
    if instead is not None:
        return f"{begin}: turns go on with version {instead.version}, which passed and is kept at {instead.path}"
    harm = "what is said may be lost" if any(one.name in ESSENTIAL for one in failed) else "turns fail with 401"
    return f"{begin}: {harm}; {capability.pin(passed)}"
