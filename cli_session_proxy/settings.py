"""Settings: flags override the environment (`CLI_SESSION_PROXY_*`), which overrides a file. Only read here.

The file is the one that `--config` names, else `cli_session_proxy.toml` in the working directory. The latter may be
from somebody else (a cloned repository): it may set no program, environment, link or access
(`_REFUSED_IN_A_FOUND_FILE`).

`Settings` is resolved once at start-up and passed down. An invalid file or value is a `ConfigError` that names the
place and the remedy.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import sys
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    model_validator,
)

from .domain.limits import is_model, origin
from .domain.options import Window
from .domain.times import Zone
from .errors import ConfigError, did_you_mean, likely
from .machine import cores, half_of_memory

CONFIG_FILE = "cli_session_proxy.toml"
PREFIX = "CLI_SESSION_PROXY_"
DELIMITER = "__"

# This name stands for no profile, whatever the default is.
NO_PROFILE = "-"

# Names that the CLI maps to its newest models; `default` is `default_model`. The CLI also accepts other names.
MODELS = ("sonnet", "opus", "haiku", "default")

# The same models under names that start with `claude-`, for clients that check that. They are listed, too.
ALIASES = {"claude-sonnet-latest": "sonnet", "claude-opus-latest": "opus", "claude-haiku-latest": "haiku"}

# Other names that the CLI accepts: its other aliases, ids of Anthropic and Vertex, ids and ARNs of Bedrock.
_CLI_MODELS = re.compile(
    r"(?:sonnet|opus|haiku|default|best|opusplan)(?:\[1m\])?|.*claude.*|arn:aws[a-z-]*:bedrock:.*", re.I
)

# For a changed system prompt. `auto` keeps the start of the request if only dates, times, numbers or ids differ.
SystemPromptChanges = Literal["auto", "newest-turn", "replace"]

# For a turn at a limit of the provider: a configured fallback model answers, the turn fails, or it waits until the
# limit is over.
OnLimit = Literal["fallback", "error", "wait"]

# The file's data, for the `Settings` that are being built.
_file: ContextVar[Mapping[str, Any]] = ContextVar("settings_file", default=MappingProxyType({}))

# Settings that are refused in a file found in the working directory, and what each decides: they run or configure
# programs, lead to other files, give access, or delete. The second table has settings of profiles.
_REFUSED_IN_A_FOUND_FILE = {
    "backend": "a program",
    "claude_bin": "a program", "claude_config_dir": "a program's settings", "claude_env": "a program's environment",
    "host": "who can come in", "allowed_origins": "who can come in", "store": "where conversations are kept",
    "models": "where conversations and keys are sent", "otel": "where traces are sent", "advertise": "who can come in",
    "registry": "where agents are looked for", "cluster_key": "who can come in", "cluster_key_file": "who can come in",
    "sandbox_root": "other directories", "keys": "who can come in", "keys_file": "who can come in",
    "retention_days": "what is deleted", "forget_unnamed": "what is deleted",
    "audit": "a file that is written", "i_am_the_only_user": "who can come in",
    "archive_to": "where conversations are sent", "archive_key_file": "where conversations are sent",
    "trusted_header": "who can come in", "trusted_header_from": "who can come in",
}  # fmt: skip
_PROFILE_REFUSED_IN_A_FOUND_FILE = {
    "mcp_config": "programs", "tools": "programs", "setting_sources": "programs", "add_dirs": "other directories",
    "git_memory": "a repository to read from and write to",
}  # fmt: skip

# The largest share of connections and of `queue_limit` that one owner may take, if there can be several owners.
OWNERS_SHARE = 0.75

# The system prompt if the client sends none and no tools are on. One sentence, to cost few tokens.
NEUTRAL_SYSTEM_PROMPT = "You are a helpful assistant."

# The variables of the proxy's environment that reach the CLI. A trailing * matches any suffix.
ENVIRONMENT_ALLOWED = (
    "PATH", "HOME", "USER", "LOGNAME", "CLAUDE_CONFIG_DIR", "CLAUDE_SECURESTORAGE_CONFIG_DIR",
    "LANG", "LC_*", "TZ", "ANTHROPIC_*", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_*",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
# A cloud's credentials are valid for all of its services, so they reach the CLI only if it is set to use that cloud.
# The names are those of CLI 2.1.329.
_AWS, _GOOGLE = ("AWS_*",), ("GOOGLE_*", "CLOUD_ML_REGION", "VERTEX_REGION_*")
ENVIRONMENT_OF_PROVIDERS = {
    "CLAUDE_CODE_USE_BEDROCK": _AWS, "CLAUDE_CODE_USE_MANTLE": _AWS, "CLAUDE_CODE_USE_ANTHROPIC_AWS": _AWS,
    "CLAUDE_CODE_USE_VERTEX": _GOOGLE, "CLAUDE_CODE_USE_ANTHROPIC_GOOGLE_CLOUD": _GOOGLE,
}  # fmt: skip


# Characters. A shorter secret can be guessed over a network; `openssl rand -hex 16` prints 32.
MIN_SECRET = 16
# The most bytes of a file of secrets.
_LONGEST_SECRETS = 1024 * 1024
# Characters. A fix_id must fit into one line of a commit's trailers.
FIX_ID_LIMIT = 300


def _matching(value: str, pattern: re.Pattern[str], error: str) -> str:
    """The value, if it matches. Else raises `ValueError` with this text."""
    if not pattern.fullmatch(value):
        raise ValueError(error)
    return value


def fix_id_of(text: str) -> str:
    """The text, if it fits into one line of a commit. Raises `ValueError`."""
    if not 0 < len(text) <= FIX_ID_LIMIT or not text.isprintable() or text != " ".join(text.split()):
        raise ValueError(f"fix_id must be one line of 1 to {FIX_ID_LIMIT} printable characters, without double spaces")
    return text


def spelled(path: Path) -> Path:
    """The absolute path, spelled as on the disk. macOS also accepts other spellings, but the CLI would make a session
    folder for each of them. Missing parts stay as they are."""
    if sys.platform != "darwin":
        return path

    def folded(name: str) -> str:
        return unicodedata.normalize("NFC", name).casefold()

    folder = Path(path.anchor)
    for part in path.parts[1:]:
        try:
            names = os.listdir(folder)
            alike = [name for name in names if folded(name) == folded(part)] if part not in names else []
            folder /= next((name for name in alike if os.path.samefile(folder / name, folder / part)), part)
        except OSError:
            folder /= part
    return folder


def _origin(text: str) -> str:
    """One origin, as browsers write it. Raises `ValueError`."""
    named = origin(text)
    if named is None:
        raise ValueError(f"{text!r} is not one origin: give scheme://host or scheme://host:port, without * or a path")
    scheme, name, port = named
    host = f"[{name}]" if ":" in name else name
    is_usual = port is None or origin(f"{scheme}://{host}") == named
    return f"{scheme}://{host}" if is_usual else f"{scheme}://{host}:{port}"


def _of_scheme(url: SecretStr, schemes: tuple[str, ...], like: str) -> SecretStr:
    """The URL, if it has one of the schemes. Raises `ValueError`, which never quotes it: it may contain a password."""
    if not url.get_secret_value().startswith(schemes):
        raise ValueError(f"it takes {like}")
    return url


def _advertised(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("it takes the address at which other proxies reach this one: http://10.0.0.2:8787")
    return _origin(url)


def _networks(given: Any) -> Any:
    """Addresses, or networks in CIDR, but not the whole address space."""
    networks = []
    for text in [given] if isinstance(given, str) else given:
        try:
            network = ip_network(text if isinstance(text, IPv4Network | IPv6Network) else str(text))
        except ValueError as exc:
            raise ValueError(f"{exc}: write an address, or a network such as 10.1.2.0/24") from exc
        if network.prefixlen == 0:
            raise ValueError(f"{network} is every address: name those of the gateway")
        networks.append(network)
    return tuple(networks)


PathOnDisk = Annotated[Path, AfterValidator(lambda path: spelled(Path(os.path.abspath(path.expanduser()))))]
Origins = Annotated[tuple[str, ...], AfterValidator(lambda given: tuple(map(_origin, given)))]
PostgresqlUrl = Annotated[SecretStr, AfterValidator(partial(
    _of_scheme, schemes=("postgresql://", "postgres://"),
    like="postgresql://user@host:5432/database; leave it out for SQLite in --var",
))]  # fmt: skip
RedisUrl = Annotated[SecretStr, AfterValidator(partial(
    _of_scheme, schemes=("redis://", "rediss://"),
    like="redis://host:6379 or rediss://…; leave it out, and the store tells",
))]  # fmt: skip
AbsolutePath = Annotated[Path, AfterValidator(lambda path: Path(os.path.abspath(path.expanduser())))]
VariableName = Annotated[str, AfterValidator(partial(
    _matching, pattern=re.compile(r"[A-Za-z_][A-Za-z0-9_]*"),
    error="it must be the name of an environment variable, not its value",
))]  # fmt: skip
HeaderName = Annotated[str, AfterValidator(partial(
    _matching, pattern=re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}"),
    error="it takes the name of one header, such as X-Forwarded-User",
))]  # fmt: skip


class _Table(BaseModel):
    """A table of the file. Other names are refused."""

    model_config = ConfigDict(extra="forbid")


class GitMemory(_Table):
    """`[profiles.<name>.git_memory]`: the profile's agents are told of earlier attempts (see `git_memory`).

    `fix_id` None: each agent is its own fix, with the agent's name.
    """

    repo: AbsolutePath
    attempts: int = Field(default=10, ge=1, le=100)
    fix_id: Annotated[str, AfterValidator(fix_id_of)] | None = None


# The prefix of addresses of S3-compatible storage.
S3 = "s3://"
# Parameters that the proxy itself sets in a request to another model: `params` must not have them.
OWN_PARAMS = frozenset({
    "model", "messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "functions",
    "api_base", "base_url", "api_key", "timeout", "num_retries", "max_retries", "n", "response_format",
})  # fmt: skip
# Where secret files may be named: options of PostgreSQL and Redis URLs, variables of libpq and AWS, and their defaults.
_FILES_IN_URLS = ("passfile", "sslkey", "servicefile", "ssl_keyfile")
_FILES_OF_LIBPQ = ("PGPASSFILE", "PGSSLKEY", "PGSERVICEFILE")
_FILES_OF_AWS = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_HOME_OF_AWS = (".aws/credentials", ".aws/config")
_HOME_OF_LIBPQ = (".pgpass", ".pg_service.conf", ".postgresql/postgresql.key")


PositiveDollars = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# A text such as `40 turns` or `100k tokens`, or a `Window`.
WindowText = Annotated[Window, BeforeValidator(lambda value: Window.parse(value) if isinstance(value, str) else value)]


def web_address(value: str, like: str) -> str:
    """The value, if it is an http(s) URL. Raises `ValueError`, with `like` as an example."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value[:80]!r} is no address: write it like {like}")
    return value


def _litellm_model(name: str) -> str:
    """LiteLLM's name of a model that is not behind this proxy. Raises `ValueError`."""
    if not is_model(name):
        raise ValueError(f"{name[:80]!r} is no name of a model: write it as LiteLLM does, like openai/gpt-5.2")
    if name.startswith("claude-cli/"):
        raise ValueError(f"{name} is the Claude CLI behind this proxy: ask for {name.partition('/')[2]} instead")
    return name


def _free_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters, without those that the proxy itself sets. Raises `ValueError`."""
    if taken := sorted(OWN_PARAMS & params.keys()):
        raise ValueError(f"{taken[0]} is set by the proxy itself: leave it out")
    return params


class ModelSettings(_Table):
    """`[models.<name>]`: a model that LiteLLM reaches. Clients ask for it by this name, as they ask for `sonnet`.

    `litellm`: LiteLLM's name of the model. `params` are sent with every request, unless the request has its own value.
    `fallbacks`: models that answer if this one cannot. `window_summary`: turns outside the window are replaced by a
    summary, which the model itself writes. `thinking_as_text`: earlier thinking is sent as plain text; else it is left
    out. `images`, `documents`, `tools`: whether the model accepts these; None: as LiteLLM knows.
    """

    litellm: Annotated[str, AfterValidator(_litellm_model)]
    api_base: Annotated[str, AfterValidator(partial(web_address, like="https://api.example.com/v1"))] | None = None
    api_key_env: VariableName | None = None
    window: WindowText | None = None
    window_summary: bool = False
    params: Annotated[dict[str, Any], AfterValidator(_free_params)] = Field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    thinking_as_text: bool = False
    images: bool | None = None
    documents: bool | None = None
    tools: bool | None = None

    @property
    def provider(self) -> str:
        """LiteLLM's name of the model's provider."""
        return self.litellm.partition("/")[0] if "/" in self.litellm else "openai"


class Profile(_Table):
    """`[profiles.<name>]`: what an agent's CLI may do beyond talking. Without a profile its tools are off."""

    tools: tuple[str, ...] = ()
    permission_mode: Literal["default", "acceptEdits", "bypassPermissions", "dontAsk", "plan"] = "default"
    model: str | None = None
    system_prompt: str | None = None
    add_dirs: tuple[AbsolutePath, ...] = ()  # a CLI would take a relative path from its agent's directory
    mcp_config: AbsolutePath | None = None
    setting_sources: tuple[Literal["user", "project", "local"], ...] = ()
    confined: bool = False  # the CLI runs under bubblewrap: see `backends.claude.process.confine`
    git_memory: GitMemory | None = None
    window: WindowText | None = None  # how much of a conversation a request shows
    fallbacks: tuple[str, ...] | None = None  # models that answer if the model cannot; None: those of the settings
    on_limit: OnLimit | None = None  # None: the value of the settings
    # Tools, by name or by a rule such as Bash(git push *), of which a person must approve each call.
    approve: tuple[str, ...] = ()
    # Another login of the same person: the variable with the token of `claude setup-token`. None: the CLI's own login.
    login_env: VariableName | None = None

    @model_validator(mode="after")
    def _approvals_are_possible(self) -> Profile:
        if self.approve and self.permission_mode not in ("default", "acceptEdits"):
            raise ValueError(
                f"approve takes permission_mode default or acceptEdits: with {self.permission_mode} the CLI asks nobody"
            )
        names = {tool.partition("(")[0] for tool in self.tools}
        for tool in self.approve:
            if tool.partition("(")[0] not in names and not (tool.startswith("mcp__") or "default" in names):
                raise ValueError(f"approve names {tool!r}, which is not among the profile's tools")
        return self


WITHOUT_TOOLS = Profile()


class Limits(_Table):
    """What one key or agent may spend in each minute, day and month of UTC; None: no limit.

    Tokens: those that the model read (cached ones included) and wrote. USD: as the CLI or LiteLLM reports.
    """

    requests_per_minute: PositiveInt | None = None
    requests_per_day: PositiveInt | None = None
    requests_per_month: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    tokens_per_day: PositiveInt | None = None
    tokens_per_month: PositiveInt | None = None
    usd_per_minute: PositiveDollars | None = None
    usd_per_day: PositiveDollars | None = None
    usd_per_month: PositiveDollars | None = None


class BudgetSettings(_Table):
    """`[budgets]`. `each_key` and `each_agent` apply to each key and agent separately; a limit under its own name
    replaces the one there. An agent's name applies to the agent of that name of each key."""

    each_key: Limits = Field(default_factory=Limits)
    each_agent: Limits = Field(default_factory=Limits)
    keys: dict[str, Limits] = Field(default_factory=dict)
    agents: dict[str, Limits] = Field(default_factory=dict)


class OtelSettings(_Table):
    """`[otel]`: send traces and metrics over OTLP/HTTP to `endpoint` (`/v1/traces`, `/v1/metrics`); None: do not.

    `headers`, such as a key of the collector, go with each request. `content`: also send the texts of conversations.
    """

    endpoint: Annotated[str, AfterValidator(partial(web_address, like="http://127.0.0.1:4318"))] | None = None
    headers: dict[str, SecretStr] = Field(default_factory=dict, repr=False)
    metrics: bool = True
    content: bool = False


class SandboxSettings(_Table):
    """`[sandbox]`. `links` maps a path inside every agent's sandbox to the link's target."""

    links: dict[str, Path] = Field(default_factory=dict)


class Settings(BaseModel):
    """Every option of the proxy. Times in seconds, sizes in bytes."""

    model_config = ConfigDict(
        extra="forbid", hide_input_in_errors=True, validate_default=True, arbitrary_types_allowed=True
    )

    # the file of settings, the address, the data
    config: AbsolutePath | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8787, ge=0, le=65535)
    uds: AbsolutePath | None = None  # a unix socket for this user only, instead of host and port
    var: PathOnDisk = Path("var")
    store: PostgresqlUrl | None = Field(default=None, repr=False)  # a PostgreSQL URL; None: SQLite in `var`
    sandbox_root: PathOnDisk | None = None  # the folder of agents' directories, equal on all hosts; None: <var>/sandbox
    allowed_origins: Origins = ()  # other pages that may send requests, exactly: scheme://host[:port]
    # the CLI
    backend: str = "claude"  # a name that a package registered (see `backends.auto`)
    claude_bin: AbsolutePath | None = None
    claude_config_dir: AbsolutePath | None = None
    claude_env: dict[str, str] = Field(default_factory=dict)
    self_check: bool = True  # `serve` checks each new CLI once, offline and beside turns
    # Models for names that programs send by default: the first matching pattern counts.
    any_model: bool = False
    aliases: dict[str, str] = {"gemini-*": "sonnet", "gpt-*": "sonnet", "codex-*": "sonnet"}
    default_model: str = "default"  # the model for `default` or no name; "default": the CLI's own choice
    system_prompt: str = NEUTRAL_SYSTEM_PROMPT
    profile: str | None = None
    profiles: dict[str, Profile] = Field(default_factory=dict)
    # Further models, by the name that clients ask for; and the models that answer if Claude cannot, in this order.
    models: dict[str, ModelSettings] = Field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    on_limit: OnLimit = "fallback"
    max_limit_wait: float = Field(default=6 * 3600.0, gt=0)  # with "wait": no turn waits for a longer limit
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    # the clients: a name for each secret (see `keys`); none: everybody on this machine
    keys: dict[str, SecretStr] = Field(default_factory=dict, repr=False)
    keys_file: AbsolutePath | None = None
    operators: tuple[str, ...] = ()  # names of keys that see what every key spends, on the page
    make_key: bool = False  # require a key of `local` in <var>/key, and create a missing one (see `keys`)
    budgets: BudgetSettings = Field(default_factory=BudgetSettings)  # what a key and an agent may spend
    otel: OtelSettings = Field(default_factory=OtelSettings)  # where traces and metrics are sent
    audit: Path | None = None  # the audit log (see `http.audit`); None: in `var` if there are keys
    i_am_the_only_user: bool = False  # all keys and addresses belong to one person, so a subscription may serve them
    # Instead of keys: the header in which a gateway names the owner, and the networks of the gateway.
    trusted_header: HeaderName | None = None
    trusted_header_from: Annotated[tuple[IPv4Network | IPv6Network, ...], BeforeValidator(_networks)] = ()
    # several hosts on one store: this proxy's address for the others, their shared secret, the registry of which host
    # has an agent warm (a Redis URL; None: the store), and whether all hosts see the same sandboxes
    advertise: Annotated[str, AfterValidator(_advertised)] | None = None
    cluster_key: SecretStr | None = Field(default=None, repr=False)
    cluster_key_file: AbsolutePath | None = None
    registry: RedisUrl | None = Field(default=None, repr=False)
    sandboxes: Literal["own", "shared"] = "own"
    # bounds
    turn_timeout: float = Field(default=1800.0, gt=0)
    idle_timeout: float = Field(default=300.0, gt=0)
    spawn_timeout: float = Field(default=60.0, gt=0)
    tool_timeout: float = Field(default=3600.0, gt=0)
    stop_grace: float = Field(default=5.0, ge=0)
    drain_timeout: float = Field(default=30.0, ge=0)
    lease: float = Field(default=10.0, gt=0)  # seconds until the agents of a silent proxy may be taken over
    disconnect_grace: float = Field(default=10.0, ge=0)
    approval_timeout: float = Field(default=600.0, gt=0)  # how long a tool waits for a person's approval
    keepalive: float = Field(default=15.0, gt=0)
    lane_limit: int = Field(default=64, ge=1)
    queue_limit: int = Field(default=1024, ge=1)
    max_turns: int = Field(default_factory=lambda: 8 * cores(), ge=1)
    max_processes: int = Field(default_factory=lambda: 8 * cores(), ge=1)
    max_memory: int | None = Field(default_factory=half_of_memory, ge=1)  # of the CLIs together; None: no limit
    spares: int = Field(default=1, ge=0)
    max_spawns: int = Field(default_factory=cores, ge=1)
    process_idle: float = Field(default=900.0, gt=0)
    # The same processes answer unnamed first questions without tools, one after the other. `auto`: if hardly any
    # conversation of the kind was continued.
    share_processes: Literal["auto", "always", "never"] = "auto"
    cli_retries: int = Field(default=2, ge=0)
    max_body: int = Field(default=64 * 1024 * 1024, ge=1024)
    on_context_full: Literal["compact", "error"] = "compact"
    system_prompt_changes: SystemPromptChanges = "auto"  # see `domain.system_prompts`
    # data
    retention_days: float | None = Field(default=None, gt=0)
    forget_unnamed: PositiveFloat | Literal["never"] = 30 * 24.0  # hours until one-shots go, as the CLI's own cleanup
    # Archived chains are encrypted and deleted here. The place (a directory, or s3://bucket/prefix), the age keys, and
    # the days without a turn until then (None: only by command).
    archive_to: str | None = None
    archive_key_file: AbsolutePath | None = None
    archive_after_days: float | None = Field(default=None, gt=0)
    idempotency_hours: float = Field(default=24.0, gt=0)
    timezone: Zone = "local"  # of times that are shown to people
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _trusted_header_is_safe(self) -> Settings:
        if self.trusted_header is None:
            if self.trusted_header_from:
                raise ValueError("trusted_header_from needs trusted_header: the header in which the gateway names them")
            return self
        if not self.trusted_header_from:
            raise ValueError(
                "trusted_header needs trusted_header_from: the addresses of the gateway, such as 10.1.2.3/32"
            )
        if self.keys or self.keys_file is not None:
            raise ValueError("trusted_header and keys are two ways to name an owner: leave one of them out")
        if self.uds is not None:
            raise ValueError("trusted_header needs host and port: clients of a unix socket have no address")
        confined = sorted(name for name, profile in self.profiles.items() if profile.confined)
        if confined and any(network.is_loopback for network in self.trusted_header_from):
            raise ValueError(
                f"trusted_header_from names loopback, and profile {confined[0]} is confined: its agents could be any "
                "owner there; put the gateway on another machine, or in a network namespace of its own"
            )
        return self

    @model_validator(mode="after")
    def _archive_comes_before_the_end(self) -> Settings:
        if self.archive_after_days is None:
            return self
        for name in ("archive_to", "archive_key_file"):
            if getattr(self, name) is None:
                raise ValueError(f"archive_after_days needs {name}: where chains go, and by which key")
        if self.retention_days is not None and self.retention_days <= self.archive_after_days:
            raise ValueError("archive_after_days must be less than retention_days: otherwise chains are deleted first")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        """Raises one error with a line for each setting that contradicts another."""
        wrong = list(self._misfits())
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def _misfits(self) -> Iterator[str]:
        if self.cluster_key is None and self.cluster_key_file is None:
            for name in ("advertise", "registry"):
                if getattr(self, name) is not None:
                    yield f"{name}: it needs cluster_key or cluster_key_file, by which proxies recognise each other"
        if self.profile is not None and self.profile not in (NO_PROFILE, *self.profiles):
            yield f"profile: {self._no_profile(self.profile)}"
        for name, model in self.models.items():
            if not is_model(name) or name.startswith(("openai/", "claude-cli/")):
                yield f"models.{name[:80]}: clients cannot ask for this name: use letters, digits, . _ : -"
            if name in MODELS:
                yield f"models.{name}: this name is the Claude CLI's: choose another"
            if self._is_this_proxy(model.api_base):
                yield (
                    f"models.{name}.api_base: {model.api_base} is this proxy itself, so a turn would wait for its own "
                    "end: give the address of the model's provider"
                )
        configured = {"fallbacks": self.fallbacks}
        configured |= {f"models.{name}.fallbacks": model.fallbacks for name, model in self.models.items()}
        configured |= {f"profiles.{name}.fallbacks": profile.fallbacks or () for name, profile in self.profiles.items()}
        for place, names in configured.items():
            for name in names:
                if name not in self.models and name not in MODELS:
                    meant = did_you_mean(name, [*self.models, *MODELS])
                    yield f"{place}: there is no model {name!r}{meant or f': add [models.{name[:40]}]'}"
                if place == f"models.{name}.fallbacks":
                    yield f"{place}: a model cannot be its own fallback"

    def _is_this_proxy(self, api_base: str | None) -> bool:
        """Whether this proxy listens on the address."""
        if api_base is None or self.uds is not None:
            return False
        parts = urlsplit(api_base)
        usual = 443 if parts.scheme == "https" else 80
        name = (parts.hostname or "").rstrip(".")
        here = {"localhost", "::1", "0.0.0.0", "::", self.host.strip("[]"), socket.gethostname().lower()}  # noqa: S104
        return (parts.port or usual) == self.port and (name in here or name.startswith("127."))

    @model_validator(mode="before")
    @classmethod
    def _over_environment_and_file(cls, given: Any) -> Any:
        return _over(given, _over(_environment(), _file.get())) if isinstance(given, dict) else given

    def system_prompt_for(self, profile: Profile, system: str | None) -> str | None:
        """The system prompt of a turn whose request has `system`; None: the CLI's own."""
        if system is not None:
            return system
        return profile.system_prompt or (None if profile.tools else self.system_prompt)

    def model_for(self, name: str, profile: Profile) -> str:
        """The model that runs: one of `models`, or a name for the CLI."""
        if name in self.models:
            return name
        fits = (model for pattern, model in self.aliases.items() if fnmatchcase(name, pattern))
        named = next(fits, ALIASES.get(name, name))
        return named if named != "default" else profile.model or self.default_model

    def knows_model(self, name: str) -> bool:
        """Whether a turn may ask for this name. The CLI may still refuse it."""
        known = (
            self.any_model
            or name in self.models
            or name == self.default_model
            or _CLI_MODELS.fullmatch(name) is not None
        )
        return known or any(fnmatchcase(name, pattern) for pattern in self.aliases)

    def fallbacks_for(self, model: str, profile: Profile) -> tuple[str, ...]:
        """The models that answer if this one cannot, in order.

        A profile with the CLI's tools falls back only to its own list, because other models do not have the tools.
        """
        if model in self.models:
            return self.models[model].fallbacks
        if profile.fallbacks is not None:
            return profile.fallbacks
        return () if profile.tools else self.fallbacks

    @property
    def logins(self) -> Mapping[str, str]:
        """The variables with further logins of the same person, by profile."""
        return {name: one.login_env for name, one in self.profiles.items() if one.login_env is not None}

    def key_of(self, model: str) -> str | None:
        """The key of one of `models`, from the environment; None: LiteLLM reads its provider's own variable.

        A configured `api_base` is only sent a configured key, never the provider's. Raises `ConfigError` if the
        configured variable is not set.
        """
        named = self.models[model]
        if named.api_key_env is None:
            return None if named.api_base is None else "none"
        key = os.environ.get(named.api_key_env)
        if not key:
            raise ConfigError(
                f"setting models.{model}.api_key_env: {named.api_key_env} is not set in the environment: "
                "export it, and start again"
            )
        return key

    @property
    def has_owners(self) -> bool:
        """Whether there can be several owners, by keys or by a gateway. Then limits per owner apply."""
        return bool(self.keys) or self.keys_file is not None or self.trusted_header is not None

    def cluster_secret(self) -> str | None:
        """The secret that the proxies of a cluster share; None: no cluster. Raises `ConfigError`."""
        if self.cluster_key is not None:
            secret = self.cluster_key.get_secret_value()
        elif self.cluster_key_file is None:
            return None
        else:
            try:
                secret = read_secret(self.cluster_key_file, "cluster_key_file").decode("ascii").strip()
            except UnicodeDecodeError:
                raise ConfigError(f"cluster_key_file {self.cluster_key_file} must hold one line of ASCII") from None
        if len(secret) < MIN_SECRET or not secret.isascii() or any(char.isspace() for char in secret):
            raise ConfigError(f"cluster_key must have at least {MIN_SECRET} characters, ASCII without spaces")
        return secret

    @property
    def is_audited(self) -> bool:
        """Whether there is an audit log: if owners have names, or `audit` names a file."""
        return self.has_owners or self.audit is not None

    def secret_files(self) -> dict[Path, str]:
        """Files and sockets that give access to more than one agent's data, and the setting that names each. They may
        be missing. No confined agent may read them."""
        files = {path: "a file of settings" for path in (self.config, Path.cwd() / CONFIG_FILE) if path is not None}
        for name in ("keys_file", "cluster_key_file", "uds", "audit", "archive_key_file"):
            if (path := getattr(self, name)) is not None:
                files[path] = name
        for name, url in (("store", self.store), ("registry", self.registry)):
            if url is not None:
                query = parse_qs(urlsplit(url.get_secret_value()).query)
                files |= {Path(path): name for option in _FILES_IN_URLS for path in query.get(option, ())}
        if self.store is not None:  # libpq reads these by itself
            files |= {Path(path): name for name in _FILES_OF_LIBPQ if (path := os.environ.get(name))}
            files |= {Path.home() / name: "store" for name in _HOME_OF_LIBPQ}
            files |= dict.fromkeys(_sockets_of(self.store.get_secret_value()), "store")
        if self.archive_to is not None and not self.archive_to.startswith(S3):
            files[Path(self.archive_to)] = "archive_to"
        elif self.archive_to is not None:  # boto3 reads these by itself
            files |= {Path(path): "archive_to" for name in _FILES_OF_AWS if (path := os.environ.get(name))}
            files |= {Path.home() / name: "archive_to" for name in _HOME_OF_AWS}
        for name, model in self.models.items():
            for value in model.params.values():
                if isinstance(value, str) and (value.startswith(("/", "~")) or os.path.isfile(value)):
                    files[Path(value)] = f"models.{name}"
        return {Path(os.path.abspath(path.expanduser())): name for path, name in files.items()}

    def servers(self) -> dict[str, str]:
        """The servers that get words, keys or passwords: by the name of each setting, the text with their URLs."""
        ollama = os.environ.get("OLLAMA_API_BASE", "http://localhost:11434")  # as LiteLLM does
        named = {
            f"models.{name}": model.api_base or (ollama if model.provider.startswith("ollama") else "")
            for name, model in self.models.items()
        }
        if self.registry is not None:
            named["registry"] = self.registry.get_secret_value()
        if self.store is not None:
            named["store"] = " ".join(f"postgresql://{one}" for one in _servers_of(self.store.get_secret_value()))
        for name, profile in self.profiles.items():
            with suppress(OSError):
                if profile.mcp_config is not None and profile.mcp_config.is_file():
                    named[f"mcp_config of profile {name}"] = profile.mcp_config.read_text("utf-8", "replace")
        return {**named, "otel.endpoint": self.otel.endpoint or ""}

    def written_inside(self) -> list[Path]:
        """The folders that confined agents may write, besides their own."""
        return [folder for one in self.profiles.values() if one.confined for folder in one.add_dirs]

    def named_programs(self) -> dict[Path, str]:
        """Paths that may be programs, each with the setting that names it: those in `claude_env`, each profile's MCP
        file, and those in the MCP files of unconfined profiles. Who writes an MCP file runs programs beside all agents
        of that profile."""
        paths = {path: "claude_env" for value in self.claude_env.values() for path in paths_in(value)}
        for name, profile in self.profiles.items():
            if (file := profile.mcp_config) is not None:
                paths[file] = what = f"mcp_config of profile {name}"
                if not profile.confined:
                    with suppress(OSError):
                        paths |= dict.fromkeys(paths_in(file.read_text("utf-8", "replace")), what)
        return paths

    def refuse_loop(self, model: str, base: str | None) -> None:
        """Raises `ConfigError` if LiteLLM would send requests for this one of `models` to this proxy: to `base`, the
        address that LiteLLM knows, or to the address in its provider's environment variable."""
        configured = self.models[model]
        provider = configured.provider.upper().replace("-", "_")
        names = (f"{provider}_API_BASE", f"{provider}_BASE_URL")
        given = {name: os.environ.get(name) for name in names} if configured.api_base is None else {}
        for place, address in {f"models.{model}": base, **given}.items():
            try:
                here = self._is_this_proxy(address)
            except ValueError as exc:
                raise ConfigError(f"setting models.{model}: {place} is no address ({exc})") from exc
            if here:
                raise ConfigError(
                    f"setting models.{model}: {place} leads to {address}, which is this proxy itself, so a turn would "
                    f"wait for its own end: set models.{model}.api_base to the address of the model's provider"
                )

    def window_for(self, model: str, profile: Profile, requested: Window | None) -> Window | None:
        """The request's own window, else the model's, else the profile's; None: the whole path."""
        of_model = self.models[model].window if model in self.models else None
        return requested or of_model or profile.window

    def profile_for(self, name: str | None) -> Profile:
        """The named profile, the default one, or one without tools. Raises `ConfigError` for an unknown name."""
        name = name or self.profile
        if name is None or name == NO_PROFILE:
            return WITHOUT_TOOLS
        if name not in self.profiles:
            raise ConfigError(self._no_profile(name))
        return self.profiles[name]

    def _no_profile(self, name: str) -> str:
        known = ", ".join(sorted(self.profiles)) or "none"
        meant = did_you_mean(name, self.profiles)
        return f"unknown profile {name!r}{meant or ':'} add [profiles.{name}] to {CONFIG_FILE} (known: {known})"


def _environment() -> dict[str, Any]:
    """The settings of this program's variables. Their library takes 0.1 s to import: only if a variable is set."""
    if not any(name.upper().startswith(PREFIX) for name in os.environ):
        return {}
    from pydantic_settings import EnvSettingsSource  # noqa: PLC0415

    source = EnvSettingsSource(Settings, env_prefix=PREFIX, env_nested_delimiter=DELIMITER)  # type: ignore[arg-type]
    try:
        return source()
    except ValueError as exc:  # a table or a list that is not JSON
        raise WrongSettings.of([f"a {PREFIX}* variable cannot be read: {exc}"]) from exc


def _over(above: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Both together: values of `above` count, and tables are merged key by key."""
    both = {name: below[name] for name in below.keys() & above.keys()}
    tables = {n: _over(above[n], v) for n, v in both.items() if isinstance(v, dict) and isinstance(above[n], dict)}
    return {**below, **above, **tables}


def paths_in(text: str) -> set[Path]:
    """The absolute paths in a text, also as quoted strings. A word that names a program in PATH stands for its path."""
    quoted = re.findall(r"\"((?:~|\$\{?HOME\}?)?/[^\"]*)\"", text)
    programs = filter(None, map(shutil.which, _in_path({*re.findall(r"[\w.+-]+", text)})))
    return {
        Path(os.path.abspath(os.path.expanduser(os.path.expandvars(word))))
        for word in (*quoted, *programs, *re.findall(r"(?:~|\$\{?HOME\}?)?/[^\s\"'`=:;,|&()<>\[\]]+", text))
    }


def _in_path(words: set[str]) -> set[str]:
    """The words that are names of files in PATH. Each folder is read once, because some are slow (WSL)."""
    found: set[str] = set()
    for folder in os.get_exec_path():
        try:
            found |= words.intersection(os.listdir(folder or os.curdir))
        except PermissionError:  # its programs may run all the same
            return words
        except OSError:  # no folder
            continue
    return found


def _servers_of(url: str) -> list[str]:
    """The PostgreSQL servers that a URL names, or libpq's variables if it names none: `host:port` each."""
    parsed = urlsplit(url)
    query = parse_qs(parsed.query)
    port = ",".join(query.get("port", [os.environ.get("PGPORT", "")])).partition(",")[0] or "5432"
    hosts = unquote(parsed.netloc.rpartition("@")[2]) or ",".join(query.get("host", [os.environ.get("PGHOST", "")]))
    return [host if ":" in host else f"{host}:{port}" for host in hosts.split(",") if host]


def _sockets_of(url: str) -> list[Path]:
    """The unix sockets of a PostgreSQL server. It may accept a user by the uid, which agents share."""
    parsed = urlsplit(url)
    query = parse_qs(parsed.query)
    named = [one.partition(":") for one in unquote(parsed.netloc.rpartition("@")[2]).split(",")]
    hosts = [*(host for host, _, _ in named), *query.get("host", ()), os.environ.get("PGHOST", "")]
    ports = [*(port for _, _, port in named), *query.get("port", ()), os.environ.get("PGPORT", ""), "5432"]
    every = [port for port in ",".join(ports).split(",") if port]
    return [Path(at, f".s.PGSQL.{port}") for at in ",".join(hosts).split(",") if at.startswith("/") for port in every]


def read_secret(path: Path, name: str) -> bytes:
    """The content of a file of secrets. Raises `ConfigError` if it is unreadable, or if others may read or write it.

    A file of root may be readable by a group, as services get their secrets that way.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            state = os.fstat(file.fileno())
            of_root = state.st_uid == 0 != os.geteuid()
            mine = of_root or state.st_uid == os.geteuid()
            if not mine or not stat.S_ISREG(state.st_mode) or state.st_mode & (0o037 if of_root else 0o077):
                raise ConfigError(f"{name} {path} can be read or written by others: make it a file of yours, chmod 600")
            return file.read(_LONGEST_SECRETS)
    except OSError as exc:
        raise ConfigError(f"{name} {path} cannot be read: {exc.strerror}") from exc


def load(**flags: Any) -> Settings:
    """Settings from the flags (None: not given), the environment and the file.

    Raises `WrongSettings` with all mistakes at once, each with its place.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    named = given.get("config") or os.environ.get(f"{PREFIX}CONFIG")
    file = _SettingsFile.read(Path(named or CONFIG_FILE).expanduser(), must=named is not None)
    mistakes = [*_unknown_variables(), *(_untrusted(file) if named is None else ())]
    token = _file.set(file.data)
    try:
        settings = Settings(**given)
    except ValidationError as exc:
        raise WrongSettings.of([*mistakes, *_mistakes(exc, given, file)]) from exc
    except WrongSettings as exc:
        raise WrongSettings.of([*mistakes, *exc.mistakes]) from exc
    finally:
        _file.reset(token)
    if mistakes:
        raise WrongSettings.of(mistakes)
    return settings


class WrongSettings(ConfigError):
    """`mistakes`: one line each."""

    mistakes: tuple[str, ...] = ()

    @classmethod
    def of(cls, mistakes: Sequence[str]) -> WrongSettings:
        made = cls("; ".join(mistakes))
        made.mistakes = tuple(" ".join(mistake.split()) for mistake in mistakes)
        return made


@dataclass(frozen=True, slots=True)
class _SettingsFile:
    """The file of settings; empty if it does not exist."""

    path: Path
    text: str
    data: dict[str, Any]

    @staticmethod
    def read(path: Path, *, must: bool) -> _SettingsFile:
        try:
            text = path.read_bytes().decode()
            return _SettingsFile(path, text, tomllib.loads(text))
        except FileNotFoundError as exc:
            if must:
                raise ConfigError(f"there is no {path}: give --config the file of your settings") from exc
            return _SettingsFile(path, "", {})
        except tomllib.TOMLDecodeError as exc:
            raise ConfigError(f"{path} is not valid TOML: {exc}; fix that line or move the file away") from exc
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path} cannot be read: {exc}; fix it or move the file away") from exc

    def place(self, setting: Sequence[str]) -> str:
        """The file and line of this setting, else the line of the nearest enclosing table."""
        table: list[str] = []
        found, longest = 0, 0
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[+([^\]]+)\]", line)
            key = None if header else re.match(r"\s*([^=#]+?)\s*=", line)
            if header:
                table = _keys(header[1])
            made = table + (_keys(key[1]) if key else [])
            shared = min(len(made), len(setting))
            if (header or key) and longest < shared and made[:shared] == list(setting[:shared]):
                found, longest = number, shared
        return f"{self.path} line {found}" if found else str(self.path)


def _keys(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[\w-]+", dotted)]


def _mistakes(exc: ValidationError, given: Mapping[str, Any], file: _SettingsFile) -> Iterator[str]:
    """A line for each wrong setting: the mistake, and where it was set."""
    wrong: dict[tuple[str, ...], list[str]] = {}
    for one in exc.errors():
        setting, kind = _setting_at(one["loc"])
        if one["type"] == "extra_forbidden":
            text = f"there is no such setting{did_you_mean(setting[-1], getattr(kind, 'model_fields', {}))}"
        elif one["type"] == "value_error":
            text = str(one["ctx"]["error"])
        else:  # pydantic's message, in words for the author of a settings file
            text = one["msg"].replace("Input should be", "must be").partition(", unable to parse")[0]
            text = text.replace("a valid integer", "a whole number").replace("a valid tuple", "a list")
        if setting:
            wrong.setdefault(setting, []).append(text)
        else:  # a check of several settings: each line of its text names one
            for line in text.splitlines():
                name, _, rest = line.partition(": ")
                if name.partition(".")[0] not in Settings.model_fields:
                    name, rest = line.split()[0], line
                wrong.setdefault(tuple(name.split(".")), []).append(rest)
    for setting, texts in wrong.items():
        yield f"setting {'.'.join(setting)}: {'; '.join(texts)} ({_place_of(setting, given, file)})"


def _place_of(setting: tuple[str, ...], given: Mapping[str, Any], file: _SettingsFile) -> str:
    """Where this setting was given: by which flag or variable, or in which line of the file."""
    if setting[0] in given:
        return f"from --{setting[0].replace('_', '-')}"
    for variable in os.environ if setting[0] in Settings.model_fields else ():
        name = tuple(variable.lower().removeprefix(PREFIX.lower()).split(DELIMITER))
        if variable.upper().startswith(PREFIX) and name == tuple(part.lower() for part in setting[: len(name)]):
            return f"from {variable}"
    return file.place(setting)


def _setting_at(location: Sequence[int | str]) -> tuple[tuple[str, ...], Any]:
    """The setting at pydantic's location, without the members of unions that it also has, and the type that has this
    setting."""
    kind: Any = Settings
    above: Any = None
    parts = []
    for part in location:
        inside = getattr(kind, "model_fields", None)
        if inside is None and get_origin(kind) not in (dict, tuple):
            break
        parts.append(str(part))
        above, kind = kind, (inside[part].annotation if part in inside else None) if inside else get_args(kind)[-1]
    return tuple(parts), above


def _untrusted(file: _SettingsFile) -> Iterator[str]:
    """A line for each setting that is refused, as the file was found in the working directory."""
    profiles = file.data.get("profiles")
    sandbox = file.data.get("sandbox")
    refused = [(name, what) for name, what in _REFUSED_IN_A_FOUND_FILE.items() if file.data.get(name)]
    for profile, values in profiles.items() if isinstance(profiles, dict) else ():
        for name, what in _PROFILE_REFUSED_IN_A_FOUND_FILE.items() if isinstance(values, dict) else ():
            if values.get(name):
                refused.append((f"profiles.{profile}.{name}", what))
    if isinstance(sandbox, dict) and sandbox.get("links"):
        refused.append(("sandbox.links", "links to other files"))
    for name, what in refused:
        yield (
            f"{file.place(name.split('.'))} sets {name} ({what}); for safety, a config file found in the working "
            f"directory cannot: if it is yours, say --config {CONFIG_FILE}, or set {PREFIX}CONFIG"
        )


def _unknown_variables() -> Iterator[str]:
    """Variables of this program that name no setting: pydantic-settings ignores them silently."""
    fields = Settings.model_fields
    tables = [
        name
        for name, field in fields.items()
        if field.default_factory in (dict, SandboxSettings, BudgetSettings, OtelSettings)
    ]
    for variable in os.environ:
        name, _, inner = variable.upper().removeprefix(PREFIX).lower().partition(DELIMITER)
        if not variable.upper().startswith(PREFIX) or name in (tables if inner else fields):
            continue
        table = next((table for table in tables if name.startswith(f"{table}_")), None)
        if table is not None:  # one underscore instead of two
            meant: str | None = f"{table}{DELIMITER}{name.removeprefix(f'{table}_')}"
        else:
            meant = likely(name, tables if inner else fields)
        advice = "unset it"
        if meant is not None:
            advice = f"did you mean `{PREFIX}{DELIMITER.join(filter(None, (meant, inner))).upper()}`?"
        yield f"{variable} is no setting of this program: {advice}"
