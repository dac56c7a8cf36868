"""Hosts in network namespaces, on one PostgreSQL and one Redis, with HAProxy in front. Each has a name, interfaces, a
`var/`, a HOME and a clock of its own, and passes on what another one has warm.

    hub              the scripted upstream, the clients, PostgreSQL, Redis and HAProxy: this process's own namespace
      front    10.77.1.1 ─┬─ h0 10.77.1.10   h1 10.77.1.11   h2 10.77.1.12
      store    10.77.2.1 ─┼─ h0 10.77.2.10   …
      registry 10.77.3.1 ─┤
      peers    10.77.4.1 ─┘  the hosts among themselves: each one's `advertise`

A network is a bridge. A host is cut off from it by taking its port out of the bridge: its packets are lost, and nobody
tells it. `enter` makes the hub: a namespace for this program alone, which vanishes with it, as do those of the hosts.

The database itself watches who writes: a trigger notes each beginning and end of a turn that a proxy without the lease
of its agent has written. A proxy's host name is its mark, and so is the application name of its connections.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psycopg
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis as RedisClient

from turnfault.provider.script import Behaviour
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT
from ..postgres import Postgres, server
from ..redis import Redis, redis
from ..until import until
from .history import Ending, History, Network
from .journal import Entry, Stale, Uncounted, Unserved
from .skewed import CLOCK
from .world import Place, Proxy, World

# Says that this process is in the hub already.
ENTERED = "CHAOS_HUB"
HUB = "10.77.{network}.1"
HOST = "10.77.{network}.{host}"
FIRST_HOST = 10
NETWORKS = {"front": 1, "store": 2, "registry": 3, "peers": 4}
HOSTS = 3
PORT = 8787
FRONT_PORT = 8080
KEY = "the-key-of-the-chaos-clusters-clients"
CLUSTER_KEY = "the-key-by-which-the-chaos-clusters-hosts-know-each-other"
# What a host says in its log when another one, or Redis, is not reached: a report counts them.
NOTICED = ("not_passed_on", "hop_broken", "registry_away", "registry_back")
# Seconds within which a proxy is ready again when nothing is in its way any more.
READY = 30.0
# Seconds for a small program to start, on a machine that is busy with CLIs.
STARTS = 30.0

_AUDIT = """
    CREATE TABLE audit (turn_id text, by_proxy text, holder text);
    CREATE FUNCTION audited() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        holds text;
    BEGIN
        SELECT proxies.host INTO holds FROM leases JOIN proxies ON proxies.id = leases.holder
        WHERE leases.agent_key = NEW.agent_key;
        IF holds IS DISTINCT FROM current_setting('application_name') THEN
            INSERT INTO audit VALUES (NEW.id, current_setting('application_name'), holds);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER audited AFTER UPDATE OF status ON turns FOR EACH ROW
    WHEN (OLD.status = 'running' OR NEW.status = 'running') EXECUTE FUNCTION audited();
"""


# --- networks


_TRIED = """
    ip link add bridge0 type bridge
    ip link add veth0 type veth peer name veth1
    ip netns add h0
"""


def missing() -> str | None:
    """What keeps this machine from having hosts, in one line."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for program in ("unshare", "ip", "haproxy"):
        if shutil.which(program) is None:
            return f"needs {program}: make tools"
    # A bridge and a pair of interfaces, in a namespace that ends with the command.
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-ec", _TRIED],
        capture_output=True, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.decode().strip()}"


# A folder of its own for the names of namespaces: nothing of them is seen, or left, on the machine.
_UNSHARE = (
    "unshare", "--net", "--mount", "--propagation", "private", "sh", "-c",
    'mkdir -p /run/netns && mount -t tmpfs netns /run/netns && ip link set lo up && exec "$@"', "sh",
)  # fmt: skip


def enter() -> None:
    """Go on in the hub: this program, with these arguments, started again in namespaces of its own."""
    if os.environ.get(ENTERED):
        _make_networks()
        return
    if (why := missing()) is not None:
        sys.exit(f"a cluster of hosts cannot be made: {why}")
    program = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    os.execvpe("unshare", [*_UNSHARE, *program], {**os.environ, ENTERED: "1"})


def _make_networks() -> None:
    lines = []
    for name, number in NETWORKS.items():
        lines += [f"link add {name} type bridge", f"addr add {HUB.format(network=number)}/24 dev {name}"]
        lines.append(f"link set {name} up")
    for host in range(HOSTS):
        lines.append(f"netns add h{host}")
        for name in NETWORKS:
            lines.append(f"link add {name}{host} type veth peer name {name} netns h{host}")
            lines.append(f"link set {name}{host} master {name} up")
    _ip(lines)
    for host in range(HOSTS):
        inside = ["link set lo up"]
        for name, number in NETWORKS.items():
            inside.append(f"addr add {HOST.format(network=number, host=FIRST_HOST + host)}/24 dev {name}")
            inside.append(f"link set {name} up")
        _ip(inside, "-n", f"h{host}")


def _ip(lines: list[str], *options: str) -> None:
    done = subprocess.run(
        ["ip", *options, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- the world


@asynccontextmanager
async def cluster(
    history: History, binary: Path, folder: Path, behave: Callable[[Seen], Behaviour]
) -> AsyncIterator[World]:
    """Three hosts, from nothing."""
    listens = ("-c", f"listen_addresses={HUB.format(network=NETWORKS['store'])}")
    at = HUB.format(network=NETWORKS["registry"])
    async with AsyncExitStack() as stack:
        with ExitStack() as starting:
            database = await asyncio.to_thread(
                starting.enter_context, server(*listens, hba="host all all 10.77.2.0/24 trust")
            )
            beside = starting.enter_context(tempfile.TemporaryDirectory(prefix="chaos-redis-"))
            registry = await asyncio.to_thread(
                starting.enter_context, redis(Path(beside), "--bind", "127.0.0.1", at, "--protected-mode", "no")
            )
            stack.push_async_callback(asyncio.to_thread, starting.pop_all().close)
        upstream = await stack.enter_async_context(Upstream(host=HUB.format(network=NETWORKS["front"]), behave=behave))
        shape = history.shape
        made = Cluster(
            folder, binary, upstream.url, shape.proxies, wrapper=shape.wrapper, database=database, registry=registry
        )
        stack.enter_context(made.haproxy())
        yield made


class Cluster(World):
    headers: Mapping[str, str] = MappingProxyType({"Authorization": f"Bearer {KEY}"})
    front = f"http://{HUB.format(network=NETWORKS['front'])}:{FRONT_PORT}"

    def __init__(self, *given: Any, database: Postgres, registry: Redis, **named: Any) -> None:
        super().__init__(*given, **named)
        self._database = database
        self._registry = registry
        self._chains = database.new_url()
        for host in range(HOSTS):  # as a history before this one may have left them
            for network in NETWORKS:
                _ip([f"link set {network}{host} master {network}"])

    def place(self, number: int) -> Place:
        here = self.folder / f"h{number}"
        return Place(here / "var", here / "claude-config", here / "home")

    @property
    def store_file(self) -> Path | None:
        return None

    async def started(self, proxy: Proxy) -> Process:
        # The host name is the proxy's mark: by it the database knows who holds a lease.
        named = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        inside = ["ip", "netns", "exec", f"h{proxy.number}", "unshare", "--uts", "sh", "-c", named, proxy.mark]
        if not self._clock(proxy).exists():
            self.skew(proxy, 0.0)
        return await asyncio.create_subprocess_exec(
            *inside, sys.executable, "-m", "tests.chaos.skewed", cwd=self.folder, stdin=DEVNULL, stdout=PIPE,
            stderr=STDOUT, env=self.environment(proxy), start_new_session=True,
        )  # fmt: skip

    def url_of(self, proxy: Proxy, listens: str) -> str:
        return f"http://{HOST.format(network=NETWORKS['front'], host=FIRST_HOST + proxy.number)}:{PORT}"

    def environment(self, proxy: Proxy, mark: str | None = None) -> dict[str, str]:
        where = f"postgresql://proxy@{HUB.format(network=NETWORKS['store'])}:{self._database.port}"
        database = self._chains.partition("@/")[2].partition("?")[0]
        own = {
            "STORE": f"{where}/{database}?application_name={proxy.mark}",
            "HOST": "0.0.0.0", "PORT": str(PORT), "KEYS__LOCAL": KEY, "CLUSTER_KEY": CLUSTER_KEY,
            "ADVERTISE": f"http://{HOST.format(network=NETWORKS['peers'], host=FIRST_HOST + proxy.number)}:{PORT}",
            "REGISTRY": f"redis://{HUB.format(network=NETWORKS['registry'])}:{self._registry.port}/0",
        }  # fmt: skip
        named = {f"CLI_SESSION_PROXY_{name}": value for name, value in own.items()}
        return super().environment(proxy, mark) | named | {CLOCK: str(self._clock(proxy))}

    async def joined(self) -> None:
        def audit() -> None:
            with psycopg.connect(self._chains) as conn:
                conn.execute(_AUDIT)

        await asyncio.to_thread(audit)
        # HAProxy has found them when its checks have succeeded.
        async with httpx.AsyncClient(trust_env=False, timeout=READY) as http:

            async def found() -> bool:
                return (await http.get(f"{self.front}/healthz")).status_code == 200

            await until(found)

    async def faults(self) -> list[Entry]:
        """What the database saw, and whether each proxy counts what it refused."""
        found: list[Entry] = []
        async with httpx.AsyncClient(trust_env=False, timeout=READY, headers=self.headers) as http:
            for proxy in self.proxies:
                refused = sum("stale_write_refused" in line for line in proxy.log[proxy.log_of_start :])
                families = text_string_to_metric_families((await http.get(f"{proxy.url}/metrics")).text)
                counted = 0
                for sample in (sample for family in families for sample in family.samples):
                    if sample.name == "cli_session_proxy_stale_writes_total":
                        counted = int(sample.value)
                    elif sample.name == "cli_session_proxy_requests_passed_on_total":
                        self.noticed[f"passed on and {sample.labels['result']}"] += int(sample.value)
                self.noticed["stale writes refused"] += counted
                for said in NOTICED:
                    if count := sum(said in line for line in proxy.log):
                        self.noticed[f"{said} at h{proxy.number}"] += count
                if refused != counted:
                    found.append(Uncounted(proxy.mark, refused, counted))

        def audited() -> list[Entry]:
            with psycopg.connect(self._chains) as conn:
                return [Stale(*row) for row in conn.execute("SELECT turn_id, by_proxy, holder FROM audit")]

        return found + await asyncio.to_thread(audited)

    async def ready(self) -> list[Entry]:
        late: list[Entry] = []
        # HAProxy last: after an outage of the store its checks find the hosts some seconds later than they are back.
        asked = {proxy.mark: proxy.url for proxy in self.proxies} | {"HAProxy": self.front}
        async with httpx.AsyncClient(trust_env=False, timeout=READY, headers=self.headers) as http:
            for name, url in asked.items():

                async def ready(url: str = f"{url}/readyz") -> bool:
                    return (await http.get(url)).status_code == 200

                try:
                    await until(ready, timeout=READY)
                except TimeoutError:
                    late.append(Unserved(name, (f"not ready after {READY:.0f} s",)))
        return late

    # --- what breaks

    def cut(self, proxy: Proxy, network: Network) -> None:
        _ip([f"link set {network}{proxy.number} nomaster"])

    def mend(self, proxy: Proxy, network: Network) -> None:
        _ip([f"link set {network}{proxy.number} master {network}"])

    def _clock(self, proxy: Proxy) -> Path:
        return self.folder / f"clock-{proxy.number}"

    async def database(self, how: Ending, seconds: float) -> None:
        number = {"restart": signal.SIGINT, "kill": signal.SIGKILL}[how]
        await asyncio.to_thread(self._database.stop, number)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._database.start)

    async def registry(self, seconds: float) -> None:
        async with RedisClient(port=self._registry.port) as told:
            self.noticed["entries that Redis forgot"] += await told.dbsize()
        await asyncio.to_thread(self._registry.stop)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._registry.start)

    @contextmanager
    def haproxy(self) -> Any:
        """The recipe of `deploy/`, as it is."""
        host = HOST.format(network=NETWORKS["front"], host="{}")
        names = ("ONE", "TWO", "THREE")
        told = {f"CSP_{name}": f"{host.format(FIRST_HOST + n)}:{PORT}" for n, name in enumerate(names)}
        told["CSP_LISTEN"] = self.front.removeprefix("http://")
        with (self.folder / "haproxy.log").open("wb") as log:
            running = subprocess.Popen(
                ["haproxy", "-db", "-f", ROOT / "deploy" / "haproxy.cfg"], env={"PATH": os.environ["PATH"], **told},
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            late = time.monotonic() + STARTS
            host, port = told["CSP_LISTEN"].split(":")
            while True:
                try:
                    socket.create_connection((host, int(port)), timeout=STARTS).close()
                    break
                except OSError:
                    said = (self.folder / "haproxy.log").read_text()
                    assert running.poll() is None, said
                    assert time.monotonic() < late, said
                    time.sleep(0.02)  # another program's start: nothing to wait on but its socket
            yield
        finally:
            running.kill()
            running.wait(STARTS)
