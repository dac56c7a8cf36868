from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from turnfault import ports

FROM_ANOTHER_PROCESS = "from turnfault.ports import free_port; print(*(free_port() for _ in range(99)))"


def test_two_processes_never_get_the_same_port() -> None:
    ours = {ports.free_port() for _ in range(99)}
    other = subprocess.run([sys.executable, "-c", FROM_ANOTHER_PROCESS], capture_output=True, text=True, check=True)
    assert len(ours) > 90  # a server of another test may have one
    assert ours.isdisjoint(map(int, other.stdout.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the range from /proc")
def test_a_port_is_none_that_the_system_gives_to_outgoing_connections() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first, last = map(int, file.read().split())
    assert not first <= ports.free_port() <= last


def test_a_port_in_use_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        assert taken.getsockname()[1] not in {ports.free_port() for _ in range(98)}


def test_a_process_without_a_block_of_its_own_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    ports._own_block.cache_clear()
    monkeypatch.setattr(ports, "_LAST", ports._FIRST)
    try:
        with pytest.raises(OSError, match="every block of 100 ports"):
            ports.free_port()
    finally:
        ports._own_block.cache_clear()
