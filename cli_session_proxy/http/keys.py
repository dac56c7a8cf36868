"""Authentication: a request's key names its owner. Pure, except that files of keys are read once.

    [keys]                       cli_session_proxy.toml, or CLI_SESSION_PROXY_KEYS__ALICE=…
    alice = "a secret"

    operators = ["alice"]        these see what every key spends: names and sums, no content

`keys_file` is a TOML file of such lines. `serve --make-key` puts a key of the owner `local` into `<var>/key`, which all
servers and commands of this `var` use. Without any key everybody is `local`, and given keys are ignored. With a gateway
that names owners (`gateway`) there is only the key in `<var>/key`, for requests that do not come from the gateway.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from .. import redact
from ..errors import ConfigError, SandboxError, Unauthorized, did_you_mean
from ..locks import to_drive
from ..sandbox import LOCAL_OWNER, make_private
from ..settings import MIN_SECRET, Settings, read_secret

if TYPE_CHECKING:
    from starlette.types import Scope
from .gateway import OWNER_NAME, Address, Gateway

# The file in `var` that `serve --make-key` writes, the prefix of its key, and its largest size in bytes.
KEY_FILE = "key"
PREFIX = "csp-"
LONGEST = 4096
# The most parameters of an address that may have a key: each is decoded, and each key hashed.
PARAMETERS = 64
_REPLACE_IT = "remove it, then `serve --make-key` makes another"


class Keys:
    """The named keys of the settings. Raises `ConfigError` for an invalid one."""

    def __init__(self, settings: Settings) -> None:
        keys = {name: secret.get_secret_value() for name, secret in settings.keys.items()}
        if settings.keys_file is not None:
            keys |= _read_keys(settings.keys_file)
        for name, secret in keys.items():
            _check(name, secret)
        self._owners = {_digest(secret): name for name, secret in keys.items()}
        if len(self._owners) < len(keys):
            raise ConfigError("two [keys] have the same secret: give each name its own")
        made_key = _read_key(settings.var / KEY_FILE)
        if made_key is not None:
            _check(str(settings.var / KEY_FILE), made_key, named=False)
            self._owners[_digest(made_key)] = LOCAL_OWNER
        if settings.keys_file is not None and not self._owners:
            # Without keys everybody is let in. The file may be half written just now.
            raise ConfigError(f'keys_file {settings.keys_file} has no key: write one `name = "secret"` a line')
        self._gateway = None if settings.trusted_header is None else Gateway(settings)
        unknown = sorted(set(settings.operators) - keys.keys())
        if unknown and self._gateway is None:
            raise ConfigError(f"operators: there is no key {unknown[0]!r}{did_you_mean(unknown[0], list(keys))}")
        if unknown := sorted(settings.budgets.keys.keys() - {*keys, LOCAL_OWNER}):
            raise ConfigError(f"budgets.keys: there is no key {unknown[0]!r}{did_you_mean(unknown[0], list(keys))}")
        self._operators = {*settings.operators}
        if made_key is not None and LOCAL_OWNER not in keys:
            # Whoever can read this file can read the store.
            keys[LOCAL_OWNER] = made_key
            self._operators.add(LOCAL_OWNER)
        self._secrets = keys
        redact.know([*keys.values(), *([made_key] if made_key else [])])

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return bool(self._owners) or self._gateway is not None

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(self._owners.values())

    def is_operator(self, owner: str) -> bool:
        """Whether this owner is shown what every key spends. Without keys everybody is."""
        return not self or owner in self._operators

    @property
    def secrets(self) -> Mapping[str, str]:
        """The secrets by name, for fingerprints."""
        return self._secrets

    def secret_of(self, owner: str) -> str | None:
        """The key of an owner, for our own commands."""
        return self._secrets.get(owner)

    def gateway(self, scope: Scope) -> tuple[Gateway, Address] | None:
        """The gateway and its address, if the request comes from it: it names the owner, whatever the key."""
        peer = None if self._gateway is None else self._gateway.believes(scope)
        return None if self._gateway is None or peer is None else (self._gateway, peer)

    def owner_of(self, headers: Mapping[str, str], query: str) -> str:
        """The owner that a request's key belongs to. `headers` have lower-case names. Raises `Unauthorized`."""
        if not self:
            return LOCAL_OWNER
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = [token.strip()] if scheme.lower() == "bearer" else []
        presented += [headers[name] for name in ("x-api-key", "x-goog-api-key") if name in headers]
        if "key=" in query:
            try:
                presented += parse_qs(query, max_num_fields=PARAMETERS).get("key", [])
            except ValueError as exc:
                raise Unauthorized(f"the address has more than {PARAMETERS} parameters: send fewer") from exc
        presented = [secret for secret in presented if secret]
        for secret in presented:
            found, presented_digest = None, _digest(secret)
            for digest, owner in self._owners.items():  # all of them: the time does not depend on the key
                if hmac.compare_digest(digest, presented_digest):
                    found = owner
            if found is not None:
                return found
        if not self._owners:
            raise Unauthorized("requests have to come through the gateway: this address is not in trusted_header_from")
        what = "this key is not known" if presented else "a key is needed"
        raise Unauthorized(f"{what}: send it as Authorization: Bearer, x-api-key or x-goog-api-key")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _read_keys(path: Path) -> dict[str, str]:
    try:
        data = tomllib.loads(read_secret(path, "keys_file").decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        # The parser's message may quote the line, which has a secret.
        raise ConfigError(f'keys_file {path} is not TOML: one `name = "secret"` a line') from exc
    if not all(isinstance(secret, str) for secret in data.values()):
        raise ConfigError(f'keys_file {path}: every line is `name = "secret"`, without sections')
    return data


def make_key(var: Path) -> Path:
    """The file with the key of this `var`; it is written if there is none. Raises `ConfigError`."""
    path = var / KEY_FILE
    try:
        make_private(var)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return path  # it existed, or another proxy has just created it
    except (OSError, SandboxError) as exc:
        raise ConfigError(f"the key {path} cannot be made ({exc}): make --var writable for this user") from exc
    with open(handle, "w") as file:
        file.write(f"{PREFIX}{secrets.token_urlsafe(32)}\n")
        file.flush()
        to_drive(file.fileno())
    return path


def _read_key(path: Path) -> str | None:
    """The key in the file; None without a file. Refused if others can read or write the file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise ConfigError(f"the key {path} cannot be read ({exc.strerror}): {_REPLACE_IT}") from exc
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise ConfigError(f"the key {path} must be a file of yours with mode 0600: {_REPLACE_IT}")
        return os.read(handle, LONGEST).decode("ascii", "replace").strip()
    finally:
        os.close(handle)


def _check(name: str, secret: str, *, named: bool = True) -> None:
    if named and not OWNER_NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r}: use up to 64 letters, digits and . _ @ -")
    if len(secret) < MIN_SECRET or not secret.isascii() or any(char.isspace() for char in secret):
        raise ConfigError(f"key {name}: its secret must have at least {MIN_SECRET} characters, ASCII without spaces")
