"""A gateway in front that names owners in a header: who is believed, and who is not."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import Scope

from cli_session_proxy.commands import changing
from cli_session_proxy.commands.asking import key_of
from cli_session_proxy.commands.prerequisites import serves_others
from cli_session_proxy.errors import ConfigError, Unauthorized
from cli_session_proxy.http.audit import audit_of
from cli_session_proxy.http.binding import bound
from cli_session_proxy.http.gateway import Gateway, is_among, is_this_machine, peer_of
from cli_session_proxy.http.keys import Keys, make_key
from cli_session_proxy.http.server import notices
from cli_session_proxy.settings import Profile, Settings, load
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..fakes import FakeEngine
from ..serving import serving
from ..without_cli import running_without_cli
from .cluster import cluster
from .test_passing_on import said

HEADER = "X-Forwarded-User"
# The gateway's address; every other client of these tests has 127.0.0.1.
AT = "127.0.0.2"
BEHIND: dict[str, Any] = {"trusted_header": HEADER, "trusted_header_from": [AT]}


def settings_of(var: Path, **more: Any) -> Settings:
    return Settings(var=var, port=0, **BEHIND, **more)


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """The gateway, and somebody else on this machine."""
    base = url.removesuffix("/v1")
    transport = httpx.AsyncHTTPTransport(local_address=AT)
    async with (
        httpx.AsyncClient(base_url=base, transport=transport, trust_env=False, timeout=30) as gateway,
        httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as other,
    ):
        yield gateway, other


async def test_an_owner_is_whom_the_gateway_names_and_each_sees_only_their_own(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(**BEHIND)
    async with (
        running_without_cli(settings, upstream) as engine,
        serving(engine, settings) as url,
        clients(url) as (gateway, _),
    ):
        body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
        for owner in ("alice", "bob@example.com"):
            named = {HEADER: owner, "X-Agent-Id": "ada"}
            answer = await gateway.post("/v1/chat/completions", json=body, headers=named)
            assert answer.status_code == 200, answer.text
        for owner in ("alice", "bob@example.com"):
            assert await engine.store.agent(owner, "ada") is not None
            listed = (await gateway.get("/v1/chains", headers={HEADER: owner})).json()["data"]
            assert [row["agent_id"] for row in listed] == ["ada"]
        assert (await gateway.get("/v1/chains", headers={HEADER: "carol"})).json()["data"] == []


async def test_from_any_other_address_the_header_is_ignored(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "var")
    async with serving(FakeEngine().as_engine(), settings) as url, clients(url) as (gateway, other):
        for headers in ({HEADER: "alice"}, {}, {HEADER: "alice", "X-Forwarded-For": AT, "Forwarded": f"for={AT}"}):
            refused = await other.get("/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
            assert "trusted_header_from" in refused.json()["error"]["message"]
        for path in ("/healthz", "/readyz", "/ui"):
            assert (await other.get(path)).status_code != 401
        assert (await gateway.get("/v1/models", headers={HEADER.lower(): "alice"})).status_code == 200


@pytest.mark.parametrize("value", [None, ""])
async def test_a_gateway_that_names_nobody_is_refused(tmp_path: Path, value: str | None) -> None:
    settings = settings_of(tmp_path / "var")
    async with serving(FakeEngine().as_engine(), settings) as url, clients(url) as (gateway, _):
        refused = await gateway.get("/v1/models", headers={} if value is None else {HEADER: value})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    "headers",
    [
        [(HEADER, "alice"), (HEADER, "bob")],
        [(HEADER, "alice"), (HEADER.lower(), "")],
        [(HEADER, "alice, bob")],
        [(HEADER, "../etc")],
        [(HEADER, "ålice".encode())],
        [(HEADER, "a" * 65)],
        [(HEADER, "~importing")],
        [(HEADER, "local")],
    ],
)
async def test_several_values_and_what_is_no_owners_name_are_an_invalid_request(
    tmp_path: Path, headers: list[tuple[str, Any]]
) -> None:
    settings = settings_of(tmp_path / "var")
    async with serving(FakeEngine().as_engine(), settings) as url, clients(url) as (gateway, _):
        refused = await gateway.get("/v1/models", headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, HEADER)


async def test_this_machines_own_key_counts_elsewhere_and_never_at_the_gateway(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "var")
    make_key(settings.var)
    key = key_of(settings, "local")
    async with serving(FakeEngine().as_engine(), settings) as url, clients(url) as (gateway, other):
        assert (await other.get("/v1/models", headers=key)).status_code == 200
        assert (await other.get("/v1/models", headers={HEADER: "alice"})).status_code == 401
        assert (await gateway.get("/v1/models", headers=key)).status_code == 401


async def test_a_command_for_an_owner_that_only_the_gateway_names_works_beside_the_server(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(**BEHIND)
    async with (
        running_without_cli(settings, upstream) as engine,
        serving(engine, settings) as url,
        clients(url) as (gateway, _),
    ):
        body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
        named = {HEADER: "alice", "X-Agent-Id": "ada"}
        assert (await gateway.post("/v1/chat/completions", json=body, headers=named)).status_code == 200
        await changing.delete(settings, "ada", "alice")
        assert await engine.store.agent("alice", "ada") is None
    with pytest.raises(ConfigError, match="--make-key"):
        key_of(settings, "local")


async def test_over_a_hop_the_owner_goes_along_and_no_agent_of_another_proxy_is_believed(
    postgres_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, tmp_path, **BEHIND) as (one, two):
        body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
        named = {HEADER: "alice", "X-Agent-Id": "ada"}
        for host in (one, two):
            async with clients(str(host.http.base_url)) as (gateway, _):
                said(await gateway.post("/v1/chat/completions", json=body, headers=named))
        assert (len(one.asked), two.asked) == (2, [])
        assert await two.engine.store.agent("alice", "ada") is not None
        # the address of a proxy, although the settings trust it
        assert await is_among(ipaddress.ip_address("127.0.0.1"), [str(one.http.base_url)])
        assert not await is_among(ipaddress.ip_address(AT), [str(one.http.base_url), str(two.http.base_url)])


async def test_the_address_of_another_proxy_is_not_the_gateways(postgres_url: str, tmp_path: Path) -> None:
    here: dict[str, Any] = {"trusted_header": HEADER, "trusted_header_from": ["127.0.0.0/8"]}
    async with cluster(postgres_url, tmp_path, **here) as (one, _), clients(str(one.http.base_url)) as (gateway, agent):
        assert (await gateway.get("/v1/models", headers={HEADER: "alice"})).status_code == 200
        assert (await agent.get("/v1/models", headers={HEADER: "alice"})).status_code == 401


# --- whose address it is


def scope(peer: str | None, *values: str) -> Scope:
    headers = [(HEADER.lower().encode(), value.encode()) for value in values]
    return {"type": "http", "client": None if peer is None else (peer, 4711), "headers": headers}


@pytest.mark.parametrize(
    ("peer", "networks", "believed"),
    [
        ("10.1.2.3", ["10.1.2.0/24"], True),
        ("10.1.3.3", ["10.1.2.0/24"], False),
        ("::ffff:10.1.2.3", ["10.1.2.3"], True),
        ("2001:db8::7", ["2001:db8::/64"], True),
        ("2001:db8::7", ["10.1.2.0/24"], False),
        ("127.0.0.1", ["64.0.0.0/2"], False),
        ("127.0.0.1", ["127.0.0.1/32"], True),
        ("::1", ["::/1"], False),
        (None, ["10.1.2.0/24"], False),
        ("testclient", ["10.1.2.0/24"], False),
    ],
)
def test_the_peer_of_the_socket_decides(peer: str | None, networks: list[str], believed: bool) -> None:
    gateway = Gateway(Settings(trusted_header=HEADER, trusted_header_from=networks))  # type: ignore[arg-type]
    assert (gateway.believes(scope(peer, "alice")) is not None) is believed


def test_no_address_of_this_machine_is_a_gateways_unless_loopback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's shell reaches the proxy from all of them."""
    own = {
        ipaddress.ip_address(one.address.partition("%")[0])
        for every in psutil.net_if_addrs().values()
        for one in every
        if one.family.name in ("AF_INET", "AF_INET6")
    }
    usable = [address for address in own if not address.is_link_local]
    assert usable
    assert [str(address) for address in usable if not is_this_machine(address)] == []
    other = ipaddress.ip_address("198.51.100.7")
    assert not is_this_machine(other)
    # The second address of an interface: the kernel takes the first one as the source to reach it.
    second = {"eth0": [SimpleNamespace(address=str(other))]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: second)
    assert is_this_machine(other)
    assert peer_of(scope("::ffff:198.51.100.7")) == ipaddress.ip_address("198.51.100.7")


# --- what cannot be set


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"trusted_header": HEADER}, "needs trusted_header_from"),
        ({"trusted_header_from": [AT]}, "needs trusted_header"),
        ({**BEHIND, "trusted_header": "X Forwarded"}, "name of one header"),
        ({**BEHIND, "trusted_header_from": ["10.0.0.1/8"]}, "host bits"),
        ({**BEHIND, "trusted_header_from": ["gateway.lan"]}, "write an address"),
        ({**BEHIND, "trusted_header_from": ["0.0.0.0/0"]}, "every address"),
        ({**BEHIND, "trusted_header_from": ["::/0"]}, "every address"),
        ({**BEHIND, "keys": {"alice": "alices-secret-0123456789"}}, "two ways"),
        ({**BEHIND, "keys_file": "keys.toml"}, "two ways"),
        ({**BEHIND, "uds": "socket"}, "unix socket"),
        ({**BEHIND, "profiles": {"coder": {"tools": ["Bash"], "confined": True}}}, "profile coder is confined"),
    ],
)
def test_what_does_not_fit_together_is_a_config_error(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(**given)


def test_a_gateway_elsewhere_goes_with_confined_profiles(tmp_path: Path) -> None:
    confined = {"coder": Profile(tools=("Bash",), confined=True)}
    there = {"trusted_header": HEADER, "trusted_header_from": ["10.1.2.3/32"]}
    with bound(Settings(var=tmp_path / "var", port=0, host="0.0.0.0", profiles=confined, **there)):  # type: ignore[arg-type]
        pass


def test_a_file_that_merely_lies_in_the_working_directory_cannot_name_a_gateway() -> None:
    Path("cli_session_proxy.toml").write_text(f'trusted_header = "{HEADER}"\ntrusted_header_from = ["{AT}"]\n')
    with pytest.raises(ConfigError, match="who can come in"):
        load()
    os.rename("cli_session_proxy.toml", "mine.toml")
    assert load(config=Path("mine.toml")).trusted_header == HEADER


def test_a_gateway_on_this_machine_is_said_to_be_open_to_everybody_here(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "var")
    assert any("can be any owner" in line for line in notices(settings, Keys(settings)))
    assert not any("no key" in line for line in notices(settings, Keys(settings)))


def test_a_gateway_lets_others_in_whom_no_subscription_may_serve(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "var")
    assert serves_others(settings, Keys(settings)) == "a gateway names whom it lets in"
    assert audit_of(settings) is not None  # who did what is noted, as with keys


def test_operators_are_owners_that_the_gateway_names(tmp_path: Path) -> None:
    keys = Keys(settings_of(tmp_path / "var", operators=("alice",)))
    assert keys.is_operator("alice")
    assert not keys.is_operator("bob")
    with pytest.raises(Unauthorized):
        keys.owner_of({"x-api-key": "anything"}, "")
