"""The tables, as the newest schema has them. Older files reach it by `migrations`.

Content is JSON as text; record lines are bytes, because a line is stored unchanged, valid or not. Every column
that refers to a turn has an index that starts with it: without one, deleting n turns costs n scans.
`agents.head` and the sessions of a link carry no foreign key: an agent and its turns would refer to each
other, and a link may name a session of which nothing else is known.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

# An id that ascends and is never used again. SQLite generates one only for a column whose type is exactly INTEGER.
_Serial = BigInteger().with_variant(Integer, "sqlite")

meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

# The row of `meta` that `probe` writes.
PROBE = "probe"

# The row of `meta` with the key of a deleted agent. It was the highest key, and is not given again.
LAST_DELETED = "last_deleted_agent"

# Rows of `meta` that keep proxies away (see `moving`): this store was moved, and the value is its new place; a move
# into this store is unfinished.
MOVED_TO = "moved_to"
COMING_IN = "coming_in"
# Rows of `meta` with this prefix and a proxy's id have the facts of that proxy's host.
FACTS = "facts of "

# An incomplete import belongs to an agent of this owner, which readers do not show.
COMING = "~importing"

# Every write updates the totals, so that a list of agents reads no turns. `side` counts suspected side calls,
# `failures` failed and refused turns; `bytes` includes images.
agents = Table(
    "agents",
    metadata,
    Column("key", _Serial, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("agent_id", Text, nullable=False),
    Column("dir", Text, nullable=False, unique=True),
    Column("named", Boolean, nullable=False),
    Column("head", Text),
    Column("created_at", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    Column("turns", BigInteger, nullable=False, server_default="0"),
    Column("side", BigInteger, nullable=False, server_default="0"),
    Column("failures", BigInteger, nullable=False, server_default="0"),
    Column("cost_usd", Double, nullable=False, server_default="0"),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Column("sessions", BigInteger, nullable=False, server_default="0"),
    Column("repairs", BigInteger, nullable=False, server_default="0"),
    UniqueConstraint("owner", "agent_id"),
    Index("agents_last_at", "last_at", "key"),
    sqlite_autoincrement=True,
)

# `bytes` is before the long texts, so that summing it reads no overflow pages.
turns = Table(
    "turns",
    metadata,
    Column("seq", _Serial, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("agent_key", ForeignKey("agents.key"), nullable=False),
    Column("parent_id", ForeignKey("turns.id")),
    Column("status", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("cost_usd", Double),
    Column("delivery", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("effort", Text),
    Column("profile", Text),
    Column("stop_reason", Text),
    Column("session_id", Text),
    Column("continuity", Text),
    Column("origin", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("frame_uuid", Text),
    Column("path_hash", Text),
    Column("instance", Text),
    Column("usage", Text, nullable=False),
    Column("timings", Text, nullable=False),
    Column("stop_sequence", Text),
    Column("backend", Text),
    Column("answered_by", Text),
    Column("fallback", Text),
    Column("limit_wait", Text),
    Column("placed", Text, nullable=False, server_default="{}"),
    Column("evidence", Text, nullable=False),
    Column("error", Text),
    Column("attempts", Text, nullable=False),
    Column("images", Text),
    Column("system", Text),
    Column("options", Text, nullable=False, server_default="{}"),
    Column("call", Text),
    Column("input", Text, nullable=False),
    Column("output", Text, nullable=False),
    Column("tools", Text, nullable=False),
    Index("turns_agent", "agent_key", "seq"),
    Index("turns_parent", "parent_id"),
    Index("turns_status", "status", "seq"),
    Index("turns_delivery", "delivery", "seq"),
    Index("turns_fingerprint", "fingerprint", "seq"),
    Index("turns_path_hash", "path_hash", "seq"),
    sqlite_autoincrement=True,
)

# Proxies on this store. One responds until `until`, by the store's clock.
proxies = Table(
    "proxies",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("until", Double, nullable=False),
    Column("address", Text),
)

# Who may write an agent. `holder` NULL: released. `wanted`: a proxy that asks the holder to hand over.
# `home`: where the files of its tools are, as JSON.
leases = Table(
    "leases",
    metadata,
    Column("agent_key", ForeignKey("agents.key"), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text),
    Column("wanted", Text),
    Column("home", Text),
    Index("leases_holder", "holder"),
)

# Requests to another proxy to end one of its turns.
cancels = Table(
    "cancels",
    metadata,
    Column("turn_id", ForeignKey("turns.id"), primary_key=True),
    Column("proxy", Text, nullable=False),
    Column("by", Text, nullable=False),
    Index("cancels_proxy", "proxy"),
)

# Proxies whose clients wait for the answer of a turn that another proxy runs.
followers = Table(
    "followers",
    metadata,
    Column("turn_id", ForeignKey("turns.id"), primary_key=True),
    Column("proxy", Text, primary_key=True),
)

sessions = Table(
    "sessions",
    metadata,
    Column("n", _Serial, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("agent_key", ForeignKey("agents.key"), nullable=False),
    Column("tip_turn_id", ForeignKey("turns.id")),
    Column("transcript", Text, nullable=False),
    Column("cli_version", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("mark", Text),
    Index("sessions_agent", "agent_key", "tip_turn_id"),
    Index("sessions_tip", "tip_turn_id"),
    sqlite_autoincrement=True,
)

links = Table(
    "links",
    metadata,
    Column("n", _Serial, primary_key=True),
    Column("agent_key", ForeignKey("agents.key"), nullable=False),
    Column("from_session", Text),
    Column("to_session", Text, nullable=False),
    Column("turn_id", ForeignKey("turns.id")),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("at", Double, nullable=False),
    Index("links_agent", "agent_key", "n"),
    Index("links_turn", "turn_id"),
    sqlite_autoincrement=True,
)

records = Table(
    "records",
    metadata,
    Column("turn_id", ForeignKey("turns.id"), primary_key=True),
    Column("n", Integer, primary_key=True),
    Column("uuid", Text),
    Column("synthetic", Boolean, nullable=False),
    Column("images", Text),
    Column("line", LargeBinary, nullable=False),
)

# Lines of an application's transcripts (Claude Agent SDK) that have not become turns.
mirrored = Table(
    "mirrored",
    metadata,
    Column("agent_key", ForeignKey("agents.key"), primary_key=True),
    Column("project", Text, primary_key=True),
    Column("session_id", Text, primary_key=True),
    Column("subpath", Text, primary_key=True),
    Column("n", Integer, primary_key=True),
    Column("at", Double, nullable=False),
    Column("uuid", Text),
    Column("line", LargeBinary, nullable=False),
)

# Findings about subjects, by name, as JSON. With `until` one is only claimed until then.
findings = Table(
    "findings",
    metadata,
    Column("subject", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("found", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("until", Double),
)

# Deleted one-shots by hour, which began `at`: how many, and their cost.
forgotten = Table(
    "forgotten",
    metadata,
    Column("at", Double, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("turns", BigInteger, nullable=False),
    Column("cost_usd", Double, nullable=False),
)

# What accounts with a budget spent in a period that began at `begins`; `most_…`: the most that one turn used.
spent = Table(
    "spent",
    metadata,
    Column("account", Text, primary_key=True),
    Column("per", Text, primary_key=True),
    Column("begins", Double, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("usd", Double, nullable=False),
    Column("most_tokens", BigInteger, nullable=False),
    Column("most_usd", Double, nullable=False),
    Index("spent_begins", "per", "begins"),
)

# Every frame that was sent, of every attempt: `turns.frame_uuid` knows only the latest.
frames = Table(
    "frames",
    metadata,
    Column("agent_key", ForeignKey("agents.key"), primary_key=True),
    Column("uuid", Text, primary_key=True),
)

images = Table(
    "images",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("data", Text, nullable=False),
)

image_refs = Table(
    "image_refs",
    metadata,
    Column("agent_key", ForeignKey("agents.key"), primary_key=True),
    Column("sha256", ForeignKey("images.sha256"), primary_key=True),
    Index("image_refs_sha256", "sha256"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("turn_id", ForeignKey("turns.id"), nullable=False),
    Column("until", Double),
    Index("idempotency_keys_turn", "turn_id"),
    Index("idempotency_keys_until", "until"),
)

# Data of OpenAI's Conversations.
conversations = Table(
    "conversations",
    metadata,
    Column("agent_key", ForeignKey("agents.key"), primary_key=True),
    Column("metadata", Text, nullable=False),
    Column("removed", Text, nullable=False),
)

# Items that a client wrote itself; `turn_id` is the latest turn that was accepted with them.
items = Table(
    "items",
    metadata,
    Column("n", _Serial, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("agent_key", ForeignKey("agents.key"), nullable=False),
    Column("turn_id", ForeignKey("turns.id")),
    Column("data", Text, nullable=False),
    Index("items_agent", "agent_key", "n"),
    Index("items_turn", "turn_id"),
    sqlite_autoincrement=True,
)
