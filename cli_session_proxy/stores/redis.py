"""Which proxy has an agent warm, in Redis: one key an agent, which expires by itself.

    cli-session-proxy:<cluster>:<the agent's directory>   a seal, {"proxy", "address", "agent", …, "epoch", "until"}

Redis may vanish at any time. Each query has `PATIENCE` seconds; after a failure the store is asked, for `PAUSE`
seconds. An entry counts if its seal (HMAC-SHA256 with the cluster's key) and its agent are right, until it expires, and
unless a lease of a higher epoch was seen. An attacker who writes to this Redis can at most restore an older entry: the
proxy at its address has to prove itself (see `http.proof`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections import OrderedDict
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .. import logs, redact
from ..domain.models import Agent
from ..errors import ConfigError
from .base import Proxy, Whereabouts
from .registry import Registry, State

log = logs.get(__name__)
K = TypeVar("K")
V = TypeVar("V")

# Timeout of a query in seconds. Redis answers in less than a millisecond; the store takes a few.
PATIENCE = 0.25
# Seconds after a failure in which Redis is not asked.
PAUSE = 2.0
# Seconds that an entry is kept after the agent's last turn: an idle process is ended after 15 minutes.
KEPT = 3600
# How many agents' last epoch and own entry are remembered here.
REMEMBERED = 10_000
# Timeout in seconds for the removal of all own entries.
GOODBYE = 2.0
# The longest entry in bytes; ours have some hundred.
LONGEST = 16 * 1024
# Deletes an entry if it is still the one that was written.
REMOVE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


class RedisRegistry(Registry):
    """`secret`: the cluster's key. `store` is asked if Redis has no answer. `ConfigError` for a wrong URL."""

    def __init__(self, url: str, secret: str, store: Registry) -> None:
        try:
            # No retries of its own: the store is asked instead. In RESP3 a server can send the client, with its
            # password, to another host.
            self._redis = Redis.from_url(
                url, socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE, retry=Retry(NoBackoff(), 0), protocol=2
            )
        except (ValueError, TypeError):  # without its message: it quotes parts of the URL, maybe a password
            raise ConfigError("registry: this is no URL of Redis: write redis://host:6379/0 or rediss://…") from None
        if password := self._redis.connection_pool.connection_kwargs.get("password"):
            redact.know([str(password)])
        self._secret = secret.encode()
        self._cluster = hashlib.sha256(self._secret).hexdigest()[:16]
        self._store = store
        self._own_entries: OrderedDict[str, str] = OrderedDict()  # by key
        self._epochs: OrderedDict[tuple[Any, ...], int] = OrderedDict()  # the highest seen, by agent
        self._away_until = 0.0  # the loop's time
        self._state: State = "ok"

    @property
    def state(self) -> State:
        return self._state

    async def find(self, agent: Agent) -> Whereabouts:
        value = await self._query(self._redis.getrange, self._key(agent), 0, LONGEST)
        if isinstance(value, bytes):
            seal, text = value[:64].decode("ascii", "replace"), value[64:].decode("utf-8", "replace")
            if hmac.compare_digest(seal.encode(), self._seal(text).encode()):
                entry: dict[str, Any] = json.loads(text)
                identity = tuple(_identity(agent))
                is_newest = entry["epoch"] >= self._epochs.get(identity, 0)
                if entry["agent"] == [*identity] and entry.get("until", 0.0) > time.time() and is_newest:
                    _remember(self._epochs, identity, entry["epoch"])
                    return Whereabouts(entry["proxy"], entry["address"])
        return await self._store.find(agent)

    async def note(self, agent: Agent, here: Proxy, session_id: str | None, epoch: int) -> None:
        content = {"proxy": here.id, "address": here.address, "agent": _identity(agent), "session": session_id}
        text = json.dumps({**content, "sandbox": agent.dir, "epoch": epoch, "until": time.time() + KEPT})
        entry = f"{self._seal(text)}{text}"
        _remember(self._own_entries, self._key(agent), entry)
        _remember(self._epochs, tuple(_identity(agent)), epoch)
        await self._query(self._redis.set, self._key(agent), entry, ex=KEPT)

    async def forget(self, agent: Agent) -> None:
        self._own_entries.pop(self._key(agent), None)
        await self._query(self._redis.delete, self._key(agent))

    async def close(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE):
                async with self._redis.pipeline(transaction=False) as pipeline:
                    for key, entry in self._own_entries.items():
                        pipeline.eval(REMOVE, 1, key, entry)
                    await pipeline.execute(raise_on_error=False)
                await self._redis.aclose()
        except Exception as exc:  # noqa: BLE001 - see `_query`
            log.warning("registry_not_closed", error=type(exc).__name__)

    async def _query(self, command: Any, *args: Any, **kwargs: Any) -> Any:
        """The answer of Redis to a command; None while Redis is away. The log says once that it is away, and once that
        it is back."""
        clock = asyncio.get_running_loop().time
        if clock() < self._away_until:
            return None
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await command(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - its client raises anything for what no Redis answers
            self._away_until = clock() + PAUSE
            if self._state == "ok":
                self._state = "away"
                log.warning("registry_away", error=type(exc).__name__)
            return None
        if self._state == "away":
            self._state = "ok"
            log.warning("registry_back")
        return answer

    def _key(self, agent: Agent) -> str:
        return f"cli-session-proxy:{self._cluster}:{agent.dir}"

    def _seal(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def _remember(cache: OrderedDict[K, V], key: K, value: V) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > REMEMBERED:
        cache.popitem(last=False)


def _identity(agent: Agent) -> list[Any]:
    """Tells the agent from one of another store, and from a deleted one of the same name."""
    return [agent.key, agent.created_at]
