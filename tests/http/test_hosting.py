"""What docs/ and deploy/ tell a person to type exists, and the unit is one that systemd takes."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from redis import Redis
from redis.exceptions import AuthenticationError

from cli_session_proxy.cli import app
from cli_session_proxy.settings import Settings, load

from ..conftest import ROOT
from ..redis import redis

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "cli-session-proxy.service"
COMPOSE, CLUSTER = DEPLOY / "compose.yaml", DEPLOY / "cluster.conf"
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
    compose = yaml.safe_load(COMPOSE.read_text())
    recipe = set(re.findall(r"\$\{(CSP_[A-Z]+)}", (DEPLOY / "haproxy.cfg").read_text()))
    assert recipe == set(compose["services"]["haproxy"]["environment"])
    proxies = [one for name, one in compose["services"].items() if name.startswith("proxy-")]
    assert len(proxies) == len(recipe) - 1
    own = [one["environment"].pop("CLI_SESSION_PROXY_ADVERTISE") for one in proxies]
    reached = [f"http://{address}" for name, address in compose["services"]["haproxy"]["environment"].items()
               if name != "CSP_LISTEN"]  # fmt: skip
    assert own == reached
    assert len({json.dumps(one["environment"], sort_keys=True) for one in proxies}) == 1
    assert {secret for one in proxies for secret in one["secrets"]} == set(compose["secrets"])
    assert {volume.partition(":")[0] for one in proxies for volume in one["volumes"]} < set(compose["volumes"])
    for path in (COMPOSE, CLUSTER):
        named = {name.lower() for name in re.findall(r"CLI_SESSION_PROXY_([A-Z]+(?:_[A-Z]+)*)", path.read_text())}
        wanted = {"store", "sandbox_root", "keys", "advertise", "registry", "cluster_key_file"}
        assert wanted <= named <= set(Settings.model_fields)


@pytest.mark.parametrize("host", ["proxy-one", "proxy-two", "proxy-three", "systemd"])
def test_a_host_takes_the_settings_of_deploy_and_knows_the_others_by_the_file_of_their_key(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "cluster-key"
    key.write_text("k" * 32 + "\n")
    key.chmod(0o600)
    if host == "systemd":
        said = CLUSTER.read_text()
        lines = [shlex.split(line.partition("=")[2]) for line in said.splitlines() if line.startswith("Environment=")]
        given = dict(pair.split("=", 1) for line in lines for pair in line)
        given |= dict(re.findall(r"^#.*?(CLI_SESSION_PROXY_(?:REGISTRY|ADVERTISE))=(\S+?)(?:,| |$)", said, re.M))
        (credential,) = re.findall(r"^LoadCredential=([\w-]+):/etc/", said, re.M)
        assert given["CLI_SESSION_PROXY_CLUSTER_KEY_FILE"] == f"%d/{credential}"
    else:
        given = yaml.safe_load(COMPOSE.read_text())["services"][host]["environment"]
        assert given["CLI_SESSION_PROXY_CLUSTER_KEY_FILE"] == "/run/secrets/cluster_key"
        given["CLI_SESSION_PROXY_KEYS__ME"] = "a key of a client"
    for name, value in (given | {"CLI_SESSION_PROXY_CLUSTER_KEY_FILE": str(key)}).items():
        if name.startswith("CLI_SESSION_PROXY_"):
            monkeypatch.setenv(name, value)
    settings = load()
    assert settings.cluster_secret() == "k" * 32
    assert settings.advertise is not None
    assert settings.registry is not None
    assert settings.registry.get_secret_value().startswith("redis")


def test_redis_takes_the_command_of_the_compose_file(tmp_path: Path) -> None:
    secret = "a-password-of-redis"
    compose = yaml.safe_load(COMPOSE.read_text().replace("${REDIS_PASSWORD:?}", secret))
    _, *options = compose["services"]["redis"]["command"]
    registries = {one["environment"]["CLI_SESSION_PROXY_REGISTRY"] for name, one in compose["services"].items()
                  if name.startswith("proxy-")}  # fmt: skip
    assert registries == {f"redis://:{secret}@redis:6379/0"}
    with redis(tmp_path, *options) as server:
        with Redis.from_url(server.url) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        with Redis.from_url(server.url, password=secret, decode_responses=True) as client:
            found = client.config_get("save", "appendonly", "maxmemory", "maxmemory-policy")
    assert found == {"save": "", "appendonly": "no", "maxmemory": str(64 * 1024**2), "maxmemory-policy": "allkeys-lru"}


def test_images_are_named_by_their_bytes() -> None:
    images = [one["image"] for one in yaml.safe_load(COMPOSE.read_text())["services"].values()]
    ours = {"cli-session-proxy"}
    assert ours < set(images)
    assert all(re.fullmatch(r"docker\.io/library/[a-z]+:[\w.-]+@sha256:[0-9a-f]{64}", one) for one in {*images} - ours)


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
