"""What docs/ and deploy/ tell a person to type exists, and the unit is one that systemd takes."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from importlib.metadata import version

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from cli_session_proxy.cli import app
from cli_session_proxy.settings import Settings

from ..conftest import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "cli-session-proxy.service"
PAGES = ("docs/self-hosting.md", "docs/troubleshooting.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_docs_exists_with_its_options(page: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    said = re.findall(
        r"(?<![/\w])cli-session-proxy ([a-z]+)((?: --?[a-z-]+(?: [\w.]+)?| \w+)*)", (ROOT / page).read_text()
    )
    used = [(name, options) for name, options in said if name in commands]
    assert len(used) >= 2
    assert {name for name, _ in said} <= {*commands, "auth", "is"}
    for name, options in used:
        known = {flag for parameter in commands[name].params for flag in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", options)) <= known, (name, options)


@pytest.mark.parametrize("page", PAGES)
def test_the_settings_that_the_docs_name_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    known = set(Settings.model_fields)
    assert {name.lower() for name in re.findall(r"CLI_SESSION_PROXY_([A-Z]+(?:_[A-Z]+)*)", text)} <= known
    named = {name for name in known if "_" in name and f"`{name}`" in text}
    assert named or page != "docs/troubleshooting.md"


def test_what_deploy_sets_on_several_hosts_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    recipe = set(re.findall(r"\$\{(CSP_[A-Z]+)}", (DEPLOY / "haproxy.cfg").read_text()))
    assert recipe == set(compose["services"]["haproxy"]["environment"])
    proxies = [one for name, one in compose["services"].items() if name.startswith("proxy-")]
    assert len(proxies) == len(recipe) - 1
    assert len({json.dumps(one["environment"], sort_keys=True) for one in proxies}) == 1
    assert {volume.partition(":")[0] for one in proxies for volume in one["volumes"]} < set(compose["volumes"])
    said = (DEPLOY / "compose.yaml").read_text() + (DEPLOY / "cluster.conf").read_text()
    named = {name.lower() for name in re.findall(r"CLI_SESSION_PROXY_([A-Z]+(?:_[A-Z]+)*)", said)}
    assert {"store", "sandbox_root", "keys"} <= named <= set(Settings.model_fields)


def test_the_pictures_of_the_docs_are_there() -> None:
    for page in PAGES:
        for path in re.findall(r"!\[[^]]*]\(([^)]+)\)", (ROOT / page).read_text()):
            assert (ROOT / "docs" / path).is_file(), path


def test_the_unit_stops_no_earlier_than_the_proxy_is_ready_to() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    fields = Settings.model_fields
    assert int(service["TimeoutStopSec"]) > fields["drain_timeout"].default + fields["stop_grace"].default
    assert service["User"] != "root"
    assert service["KillMode"] == "mixed"


def test_the_server_whose_internals_we_build_on_is_bounded_above() -> None:
    (uvicorn,) = [
        Requirement(one)
        for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if one.startswith("uvicorn")
    ]
    bounds = {part.operator: Version(part.version) for part in uvicorn.specifier}
    tried = Version(version("uvicorn"))
    assert bounds[">="] <= tried < bounds["<"]
    assert bounds["<"].release[:2] == (tried.major, tried.minor + 1)
