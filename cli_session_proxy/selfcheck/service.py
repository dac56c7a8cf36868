"""A service beside the server: it checks each CLI that comes into use once, and applies the result from then on.

- A binary is identified by its hash and the version that it reports. Results are in the store, for all proxies that
  share it. One proxy claims a check; if it dies, another one claims the check later.
- Stored results are applied at the start. The checks run beside turns, at low priority.
- The store owns the results. A failure in use has effect in this process at once. It is stored after a concurrent check
  has ended; then, and every `RETRY` seconds, the stored results are applied again.
- If a new version fails an essential observation, turns use the newest version that passed and is still kept. They also
  use it until a changed binary is checked. One sentence says so: on the terminal, in the log, by `doctor`, on the page
  and in /metrics.
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
from ..backends.claude.process.observed import ESSENTIAL, Name, Observation, Observed, is_fit, mismatches, read
from ..domain.models import JSON
from ..errors import ClaudeUnavailable, StoreUnavailable
from ..settings import Settings
from ..stores.base import Finding, Findings
from .keeping import KeptBinaries
from .running import Report, check

log = logs.get(__name__)

Say = Callable[[str], None]

# The name of the finding that marks a check as ended. A new name, after an observation was added to the check, makes
# every CLI be checked again.
RUN = "run 5"
# Seconds for which a claim of a check is valid: longer than two runs take.
CLAIM = 180.0
# Seconds between polls for the result of another proxy's check.
POLL_INTERVAL = 5.0
# Seconds until a check that could not be run is tried again, and the most tries.
RETRY = 600.0
TRIES = 3
# The name of the finding that says why a check could not be run.
NOT_RUN = "not_run"
# The most observations in use that wait to be stored; one CLI has fewer.
WAITING = 100


class SelfChecks:
    """The service of one proxy. `run` never ends by itself. See the module docstring."""

    def __init__(self, settings: Settings, store: Findings, say: Say) -> None:
        self._settings = settings
        self._store = store
        self._say = say
        self._kept = KeptBinaries(settings.var / "cli")
        self._unchecked: dict[Identity, Capability] = {}
        self._tries: dict[Identity, int] = {}  # how often a check could not be run
        self._applied: dict[Identity, Observed] = {}  # the observations that were applied last
        self._degraded: list[tuple[Identity, Capability, Observation]] = []  # not stored yet
        self._wake = asyncio.Event()
        self._last_fit: dict[str, Identity] = {}  # by original path: the kept copy of the last one that passed
        self._logged: set[str] = set()

    # --- the methods of `capability.Listener`

    def found(self, identity: Identity, cli: Capability) -> None:
        for older in [one for one in self._unchecked if one[0] == identity[0]]:
            del self._unchecked[older]
        if not cli.observed and (passed := self._last_fit.get(identity[0])) is not None:
            capability.use_instead(identity, passed)
        self._applied.pop(identity, None)
        self._unchecked[identity] = cli
        self._wake.set()

    def degraded(self, identity: Identity, cli: Capability, seen: Observation) -> None:
        if len(self._degraded) < WAITING:
            self._degraded.append((identity, cli, seen))
        self._wake.set()

    # ---

    async def run(self) -> None:
        await self.recall()
        with capability.listening(self):
            while True:
                try:
                    async with asyncio.timeout(RETRY):
                        await self._wake.wait()
                except TimeoutError:
                    given_up = [one for one, tries in self._tries.items() if tries >= TRIES]
                    self._unchecked.update((one, cli) for one, cli in capability.probed_here() if one not in given_up)
                self._wake.clear()
                try:
                    await self._store_degraded()
                    while self._unchecked:
                        identity = next(iter(self._unchecked))
                        await self._check_once(identity, self._unchecked.pop(identity))
                except StoreUnavailable as exc:
                    log.warning("self_check_not_kept", error=exc.message)

    async def recall(self) -> None:
        """Apply the stored results to the files whose hashes this host has cached."""
        try:
            found = await self._store.findings()
        except StoreUnavailable as exc:
            log.warning("self_check_not_read", error=exc.message)
            return
        known = by_subject(found)
        for identity, sha256 in (await asyncio.to_thread(self._kept.identities)).items():
            for (checked, version), observed in known.items():
                if checked == sha256:
                    capability.observe(identity, version, observed)

    async def _check_once(self, identity: Identity, cli: Capability) -> None:
        """Apply the stored observations of this file; check it if there are none."""
        sha256 = await asyncio.to_thread(self._kept.sha256, identity)
        if sha256 is None:
            return  # another file has replaced it: `found` will be called for that one
        subject = f"{sha256} {cli.version}"
        while True:
            known = by_subject(await self._store.findings(subject)).get((sha256, cli.version))
            if known is not None:
                if known != self._applied.get(identity):
                    await self._apply(identity, cli, sha256, known)
                return
            if await self._store.claim_finding(subject, RUN, CLAIM):
                break
            await asyncio.sleep(POLL_INTERVAL)  # another proxy checks it
        log.info("self_check_begins", version=cli.version, path=str(cli.path))
        report = await check(cli.path, self._settings)
        if report.why is not None:
            log.warning("self_check_not_run", version=cli.version, path=str(cli.path), why=report.why)
            await self._store.keep_findings(subject, {NOT_RUN: {"why": report.why}})
            self._tries[identity] = self._tries.get(identity, 0) + 1
            capability.use_instead(identity, None)
            return
        log.info("self_check_ended", version=report.version, path=str(cli.path), seconds=report.seconds)
        await self._store.keep_findings(f"{sha256} {report.version}", findings_of(report))
        if report.version != cli.version:
            # It is a script that starts another CLI: the observations belong to that version.
            capability.observe(identity, report.version, report.observed)
            capability.use_instead(identity, None)
            return
        await self._apply(identity, cli, sha256, report.observed)

    async def _apply(
        self, identity: Identity, cli: Capability, sha256: str, observed: Observed, event: str = "failed its self-check"
    ) -> None:
        """Apply the observations to this file. If an essential one failed, use another CLI instead, and say so; `event`
        is what happened, for that sentence."""
        capability.observe(identity, cli.version, observed)
        self._tries.pop(identity, None)
        self._applied[identity] = observed
        cli = replace(cli, observed=observed)
        surprises = mismatches(cli.observed, cli.version_tuple)  # with what its version lets expect
        if surprises and (key := f"{cli.version} {cli.path}") not in self._logged:
            self._logged.add(key)
            lost = {one.name: one.detail for one in surprises if one.outcome == "failed"}
            gained = [one.name for one in surprises if one.outcome == "ok"]
            log.warning("claude_unexpected", version=cli.version, path=str(cli.path), lost=lost, gained=gained)
        essential: Sequence[Name] = ESSENTIAL
        if not cli.does("login"):  # a CLI that is billed by use needs no login
            env = environment.common(self._settings, environment.config_dir(self._settings))
            if await logged_in.login_kind(cli.path, env) != "by use":
                essential = (*ESSENTIAL, "login")
        failed = [observed[name] for name in essential if name in observed and observed[name].outcome == "failed"]
        if not failed:
            capability.use_instead(identity, None)
            if is_fit(observed):
                place = await asyncio.to_thread(self._kept.keep, cli.path, sha256)
                if place is not None:
                    self._last_fit[identity[0]] = capability.register(place, cli)
            return
        capability.use_instead(identity, await self._newest_that_passed(essential))
        _, instead = capability.known(cli.path) or (cli, cli)
        known = by_subject(await self._store.findings())
        passed = [version for (_, version), seen in known.items() if is_fit(seen, essential)]
        newest = max(passed, key=capability.numbers, default=None)
        text = sentence(cli, event, failed, None if instead == cli else instead, newest)
        if text not in self._logged:
            self._logged.add(text)
            log.error("claude_unfit", message=text)
            self._say(text)

    async def _newest_that_passed(self, essential: Sequence[Name]) -> Identity | None:
        """The newest CLI that passed and of which this host still keeps a copy. A copy that was only checked by an
        earlier version of this program is checked now."""
        found = await self._store.findings()
        known = by_subject(found)
        config_dir = environment.config_dir(self._settings)
        checked = {one.subject.partition(" ")[::2] for one in found}
        for sha256, version in sorted(checked, key=lambda one: capability.numbers(one[1]), reverse=True):
            observed = known.get((sha256, version))
            if observed is not None and not is_fit(observed, essential):
                continue
            place = await asyncio.to_thread(self._kept.of, sha256)
            if place is None:
                continue
            env = environment.common(self._settings, config_dir)
            try:
                cli = await capability.probe(place, env)
            except ClaudeUnavailable as exc:
                log.warning("kept_claude_unusable", path=str(place), error=exc.message)
                continue
            if cli.version != version:
                continue
            if observed is None:
                await self._check_once(capability.identity_of(place), cli)
                observed = by_subject(await self._store.findings(f"{sha256} {version}")).get((sha256, version), {})
            if is_fit(observed, essential):
                return capability.register(place, replace(cli, observed=observed))
        return None

    async def _store_degraded(self) -> None:
        """Store the observations in use, and apply what is stored now."""
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
                    await self._apply(identity, cli, sha256, now, "failed in use")
            self._degraded.pop(0)


async def beside(settings: Settings, store: Findings, say: Say) -> None:
    """Run as a service of the server, until it is cancelled."""
    if settings.self_check:
        await SelfChecks(settings, store, say).run()


def by_subject(found: Iterable[Finding]) -> dict[tuple[str, str], Observed]:
    """The observations of each CLI whose check has ended, by its hash and version."""
    seen: dict[tuple[str, str], dict[str, JSON]] = {}
    for one in found:
        sha256, _, version = one.subject.partition(" ")
        seen.setdefault((sha256, version), {})[one.name] = one.found
    return {of: read(names.values()) for of, names in seen.items() if RUN in names}


def recorded(settings: Settings, found: Iterable[Finding], claude: Path, version: str) -> Observed:
    """The stored observations of the file at this path, as this version; empty if no check of it has ended."""
    with contextlib.suppress(OSError):
        sha256 = KeptBinaries(settings.var / "cli").identities().get(capability.identity_of(claude), "")
        return by_subject(found).get((sha256, version), {})
    return {}


def findings_of(report: Report) -> dict[str, JSON]:
    """The observations as findings to store."""
    observations: dict[str, JSON] = {str(name): one.as_json() for name, one in report.observed.items()}
    run = {"version": report.version, "path": str(report.path), "day": report.day, "seconds": report.seconds}
    return {**observations, RUN: run}


def sentence(
    cli: Capability, event: str, failed: Sequence[Observation], instead: Capability | None, passed: str | None
) -> str:
    """The sentence for a person about a CLI that failed an essential observation."""
    what = "; ".join(f"{one.name}: {one.detail or 'nothing was seen'}" for one in failed)
    begin = f"Claude CLI {cli.version} at {cli.path} {event} ({what})"
    if instead is not None:
        return f"{begin}: turns go on with version {instead.version}, which passed and is kept at {instead.path}"
    harm = "words may be lost or overheard" if any(one.name in ESSENTIAL for one in failed) else "turns fail with 401"
    return f"{begin}: {harm}; {capability.pin(passed)}"
