"""Notifies systemd as a service of `Type=notify`: ready, watchdog, stopping (sd_notify(3)).

It sends datagrams of NAME=value lines to the socket that NOTIFY_SOCKET names. The event loop sends a sign of life twice
in each WATCHDOG_USEC: if the loop is blocked, systemd restarts the service. Without these variables, nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .. import logs

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Systemd:
    """`address`: a path, or an abstract name that begins with @. `interval`: seconds between two signs of life."""

    address: str | None = None
    interval: float | None = None

    @staticmethod
    def of(environ: Mapping[str, str]) -> Systemd:
        address = environ.get("NOTIFY_SOCKET") or None
        every = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())  # not for a child that inherited it
        interval = int(every) / 2_000_000 if is_ours and every.isascii() and every.isdigit() and int(every) else None
        return Systemd(address, None if address is None else interval)

    def tell(self, **state: str) -> None:
        if self.address is None:
            return
        lines = "\n".join(f"{name}={value}" for name, value in state.items())
        name = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.setblocking(False)
                notify.sendto(lines.encode(), name)
        except OSError as exc:
            log.warning("systemd_not_told", state=list(state), error=str(exc))

    async def live(self, ready: asyncio.Event) -> None:
        """Notify READY, then WATCHDOG at each interval. Runs until it is cancelled."""
        await ready.wait()
        self.tell(READY="1", STATUS="listening")
        while self.interval is not None:
            self.tell(WATCHDOG="1")
            await asyncio.sleep(self.interval)
