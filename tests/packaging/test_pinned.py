"""What the image is made of is named by its bytes, in step with pyproject.toml, and all extras fit together."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from importlib import metadata
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..conftest import ROOT
from .dockerfile import instructions, only

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# A distribution of this checkout: the image builds its wheel beside the proxy's.
OURS = "turnfault"
BENCHMARK = tomllib.loads((ROOT / "benchmark" / "pyproject.toml").read_text())["project"]
# What each lock has to hold.
LOCKS = {
    "requirements.lock": [
        *(one for one in PROJECT["dependencies"] if Requirement(one).name != OURS),
        *BENCHMARK["dependencies"],
        *(one for name in ("claude", "postgresql", "redis") for one in EXTRAS[name]),
    ],
    "build.lock": PYPROJECT["build-system"]["requires"],
}
PIN = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[^ ]+)( ; (?P<marker>.+))?")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pin:
    version: Version
    hashes: int


def pins(name: str) -> dict[str, Pin]:
    """Each package of a lock. A line that is neither a pin, a hash nor a comment fails the test."""
    found: dict[str, Pin] = {}
    text = re.sub(r" \\\n +", " ", (ROOT / "deploy" / name).read_text())
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        pin, *hashes = re.split(r" (?=--hash)", line.rstrip())
        matched = PIN.fullmatch(pin)
        assert matched, f"{name}: {pin}"
        assert all(HASH.fullmatch(one) for one in hashes), f"{name}: {pin}"
        found[canonicalize_name(matched["name"])] = Pin(Version(matched["version"]), len(hashes))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_what_pyproject_asks_for(name: str) -> None:
    """If this fails: `make lock`."""
    locked = pins(name)
    for wanted in map(Requirement, LOCKS[name]):
        pin = locked.get(canonicalize_name(wanted.name))
        assert pin is not None, f"{wanted.name} is not in {name}"
        assert wanted.specifier.contains(pin.version, prereleases=True), f"{name} has {wanted.name} {pin.version}"


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_hashes_and_no_address(name: str) -> None:
    assert all(pin.hashes for pin in pins(name).values())
    assert not re.search(r"://|--index|--find-links|file:|/", (ROOT / "deploy" / name).read_text())


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_closed(name: str) -> None:
    """What a locked package asks for is locked too, as far as that package is installed here in that version."""
    locked = pins(name)
    compared = 0
    for package, pin in locked.items():
        try:
            installed = metadata.distribution(package)
        except metadata.PackageNotFoundError:  # for another system
            continue
        if Version(installed.version) != pin.version:
            continue
        compared += 1
        for wanted in map(Requirement, installed.requires or ()):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            asked = locked.get(canonicalize_name(wanted.name))
            assert asked is not None, f"{package} asks for {wanted}, which is not in {name}"
            assert wanted.specifier.contains(asked.version, prereleases=True), f"{package} asks for {wanted}"
    assert compared or name != "build.lock"  # hatchling itself is of the dev extra


def test_the_base_image_is_named_by_its_digest_in_every_stage() -> None:
    assert re.fullmatch(r"BASE=docker\.io/library/python@sha256:[0-9a-f]{64}", only("ARG").text)
    stages = [one.text for one in instructions() if one.name == "FROM"]
    assert {stage.split()[0] for stage in stages} == {"${BASE}"}


def test_the_image_installs_wheels_by_their_hashes_and_its_own_without_an_index() -> None:
    commands = [part for one in instructions() if one.name == "RUN" for part in one.text.split(" && ")]
    called = [command for command in commands if re.search(r"\bpip\b", command)]
    assert len(called) == 4
    for command in called:
        by_hash = "--only-binary :all: --require-hashes" in command
        own = "--no-index --no-deps" in command
        assert by_hash != own, command


def test_ci_asks_for_the_same_base_image() -> None:
    (line,) = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("base=")]
    told = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$base"'], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert f"BASE={told.stdout}" == only("ARG").text


def test_what_is_installed_is_what_all_extras_together_ask_for() -> None:
    """Also what packages ask for under an extra (`litellm[proxy]`), which `pip check` does not look at.

    CI installs all of it at once into a fresh environment; two packages that exclude each other end there. If only this
    environment has fallen behind: `make clean test`.
    """
    asked = [("pyproject.toml", one) for one in [*PROJECT["dependencies"], *chain.from_iterable(EXTRAS.values())]]
    seen: set[tuple[str, str]] = set()
    unmet = []
    while asked:
        by, text = asked.pop()
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": by.partition("[")[2].rstrip("]")}):
            continue
        installed = metadata.distribution(wanted.name)
        if not wanted.specifier.contains(installed.version, prereleases=True):
            unmet.append(f"{by} asks for {wanted}, found {installed.version}")
        for extra in ("", *wanted.extras):
            if (wanted.name, extra) not in seen:
                seen.add((wanted.name, extra))
                asked += [(f"{wanted.name}[{extra}]", one) for one in installed.requires or ()]
    assert unmet == []
    assert len(seen) > len(PROJECT["dependencies"])
