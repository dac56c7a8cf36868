"""Parses hosts and origins in HTTP headers, and converts agent ids to ids of OpenAI's Conversations and back. Pure."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

# --- hosts and origins

_NAME = r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::(?P<port>[0-9]{1,5}))?"
_HOST = re.compile(_NAME)
_ORIGIN = re.compile(rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://{_NAME}")
# How many host names are cached: clients use the same few again and again.
CACHED_NAMES = 16
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@lru_cache(CACHED_NAMES)
def host_and_port(netloc: str) -> tuple[str, int | None] | None:
    """Host and port of a Host header, in lower case and without brackets; None if it is malformed."""
    match = _HOST.fullmatch(netloc)
    return None if match is None else _parts(match)


def origin(text: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port of an Origin header, with the scheme's default port. None: missing or malformed."""
    match = _ORIGIN.fullmatch(text)
    parts = None if match is None else _parts(match)
    if match is None or parts is None:
        return None
    scheme, (host, port) = match["scheme"].lower(), parts
    return scheme, host, _PORTS.get(scheme) if port is None else port


def _parts(match: re.Match[str]) -> tuple[str, int | None] | None:
    """(host, port); None if the port or the IPv6 address is invalid."""
    name, port = match["name"].lower(), None if match["port"] is None else int(match["port"])
    if port is not None and port > 65535:
        return None
    if not name.startswith("["):
        return name, port
    try:
        return str(ipaddress.IPv6Address(name[1:-1])), port
    except ValueError:
        return None


# --- conversations, whose ids name agents

_MADE_HERE = re.compile(r"conv_[0-9a-f]{32}")
# "x" is no hexadecimal digit, so an encoded name never looks like a generated id.
_OF_NAME = re.compile(r"conv_x((?:[0-9a-f]{2})+)")


def conversation_id(agent_id: str) -> str:
    """The conversation id of this agent. An agent that was created as a conversation has it as its name."""
    if _MADE_HERE.fullmatch(agent_id):
        return agent_id
    return f"conv_x{agent_id.encode('utf-8', 'surrogatepass').hex()}"


def agent_id_of(conversation: str) -> str | None:
    """The agent id of a conversation id; None if it is not one of ours."""
    if _MADE_HERE.fullmatch(conversation):
        return conversation
    match = _OF_NAME.fullmatch(conversation)
    if match is None:
        return None
    try:
        return bytes.fromhex(match[1]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
