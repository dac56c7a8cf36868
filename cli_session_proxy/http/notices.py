"""What `serve` prints at its start: where it listens, who has access, and what its settings mean for others."""

from __future__ import annotations

from collections.abc import Iterator

from ..settings import Settings
from .keys import MADE_KEY, Keys
from .served import Served


def banner(place: Served, *, needs_key: bool) -> Iterator[str]:
    """Where it listens, the page, and a line to paste. What the CLI lacks is said after them, by `login.report`."""
    key = " -H 'Authorization: Bearer YOUR-KEY'" if needs_key else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'
    over = ""
    if place.uds is None:
        yield f"listening on {place.url}  (OpenAI clients: base_url={place.url}/v1)"
        yield f"page: {place.url}/ui"
    else:
        yield f"listening on {place}"
        over = f"--unix-socket {place.uds} "
    yield f"try: curl -s {over}{place.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def notices(settings: Settings, keys: Keys) -> Iterator[str]:
    """A line for each thing that the person who starts it should know. Reads no credential, only names."""
    if not keys and settings.uds is None:
        yield (
            "no key: every user and every program of this machine can use this proxy and read its chains; start it "
            "with --make-key to ask for a key, or with --uds PATH to be alone"
        )
    elif (made := settings.var / MADE_KEY).exists():
        yield f"the key is in {made}: send it as Authorization: Bearer; our own commands use it by themselves"
    for name, profile in sorted(settings.profiles.items()):
        if profile.tools and not profile.confined:
            yield (
                f"profile {name}: the CLI's tools run with all of your rights; an agent's sandbox is a directory, "
                "not a boundary (confined = true makes one, with bubblewrap)"
            )
