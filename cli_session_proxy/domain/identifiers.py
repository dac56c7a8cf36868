"""Names in addresses: machines and pages as HTTP writes them, and agents as OpenAI's Conversations name them. Pure."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

# --- machines and pages

_NAME = r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::(?P<port>[0-9]{1,5}))?"
_HOST = re.compile(_NAME)
_ORIGIN = re.compile(rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://{_NAME}")
# A server is called by the same few names again and again.
SAME_NAMES = 16
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@lru_cache(SAME_NAMES)
def host_and_port(netloc: str) -> tuple[str, int | None] | None:
    """What a Host header names, in lower case and without an address's brackets; None where it is not well-formed."""
    found = _HOST.fullmatch(netloc)
    return None if found is None else _named(found)


def origin(text: str) -> tuple[str, str, int | None] | None:
    """Scheme, name and port of an Origin header; a scheme's usual port counts as named. None: none, or not one."""
    found = _ORIGIN.fullmatch(text)
    named = None if found is None else _named(found)
    if found is None or named is None:
        return None
    scheme = found["scheme"].lower()
    return scheme, named[0], _PORTS.get(scheme) if named[1] is None else named[1]


def _named(found: re.Match[str]) -> tuple[str, int | None] | None:
    name, port = found["name"].lower(), None if found["port"] is None else int(found["port"])
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
# "x" is no hexadecimal digit: no name can look like an id that was made here.
_OF_NAME = re.compile(r"conv_x((?:[0-9a-f]{2})+)")


def conversation_id(agent_id: str) -> str:
    """The conversation that is this agent's chain. An agent that was made as a conversation has that name."""
    if _MADE_HERE.fullmatch(agent_id):
        return agent_id
    return f"conv_x{agent_id.encode('utf-8', 'surrogatepass').hex()}"


def agent_id_of(conversation: str) -> str | None:
    """The agent that a conversation's id names; None where it cannot be one of ours."""
    if _MADE_HERE.fullmatch(conversation):
        return conversation
    named = _OF_NAME.fullmatch(conversation)
    if named is None:
        return None
    try:
        return bytes.fromhex(named[1]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
