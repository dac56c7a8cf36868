"""Redis servers of the tests' own: on a free port of loopback, never the machine's."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnfault.ports import free_port

from .postgres import PATIENCE, needed


class Redis:
    """A server that keeps nothing. `options`: more of its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *, tls: bool = False) -> None:
        """Returns when it takes connections."""
        program = shutil.which("redis-server")
        needed(program, "Redis")
        assert program is not None
        port = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        quiet = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, *port, *quiet, *self._options], stdout=log, stderr=log, env={"TMPDIR": tempfile.gettempdir()}
            )
        until = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self._process.poll() is None, (self._folder / "redis.log").read_text()[-3000:]
                assert time.monotonic() < until
                time.sleep(0.02)  # another program's start: nothing to wait on but its socket

    def stop(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE)
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis(folder: Path, *options: str, tls: bool = False) -> Iterator[Redis]:
    made = Redis(folder, *options)
    made.start(tls=tls)
    try:
        yield made
    finally:
        made.stop()
