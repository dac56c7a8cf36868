"""The output of a confined CLI, into which its programs can write, too."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import threading
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process.pipes import ThreadReader

from ....until import until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confined agents are Linux's")

# Writes a page, and a second one that nobody ever provides: until it ends, the kernel holds the lock on the pipe.
HOLDS = """
import ctypes, mmap, os, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p]
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
faults = libc.syscall(323, os.O_CLOEXEC)  # userfaultfd
if faults < 0 or libc.ioctl(faults, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0)) < 0:
    sys.exit("refused")
at = libc.mmap(None, 8192, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0))
ctypes.memset(at, 120, 4096)
assert libc.ioctl(faults, 0xC020AA00, struct.pack("QQQQ", at + 4096, 4096, 1, 0)) == 0, ctypes.get_errno()
threading.Thread(target=libc.write, args=(int(sys.argv[1]), at, 8192), daemon=True).start()
os.read(faults, 32)
print("held", flush=True)
sys.stdin.read()
os._exit(0)
"""


class Heard(asyncio.Protocol):
    def __init__(self, *, pauses: bool = False, fails: bool = False) -> None:
        self.data, self.pieces, self.ended = b"", 0, False
        self.pauses, self.fails = pauses, fails
        self.lost: Exception | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.pieces += 1
        if self.pauses:
            self.transport.pause_reading()
        if self.fails:
            raise ValueError(data)

    def connection_lost(self, exc: Exception | None) -> None:
        assert not self.ended
        self.ended, self.lost = True, exc


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the call is not known here")
async def test_the_event_loop_does_not_wait_for_a_program_that_writes() -> None:
    """A read blocked although the pipe was opened not to. One program held all agents up for 15 s."""
    heard, says = os.pipe()
    holding = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", HOLDS, str(says), pass_fds=(says,), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    os.close(says)
    assert holding.stdout is not None
    if not await holding.stdout.readline():
        os.close(heard)
        pytest.skip(f"nobody may hold up a write here: {(await holding.communicate())[1].decode()}")
    stood_still = threading.Event()

    def give_up() -> None:
        stood_still.set()
        holding.kill()

    clock = threading.Timer(20, give_up)
    clock.start()
    protocol = Heard()
    ThreadReader(os.fdopen(heard, "rb", 0), protocol)
    for _ in range(20):
        await asyncio.to_thread(int)
    assert not stood_still.is_set()
    clock.cancel()
    holding.kill()
    await holding.communicate()
    await until(lambda: protocol.ended)
    assert protocol.data == b"x" * 4096
    assert protocol.lost is None


async def test_all_that_was_written_arrives_in_order_before_the_end() -> None:
    heard, says = os.pipe()
    protocol = Heard()
    ThreadReader(os.fdopen(heard, "rb", 0), protocol)
    written = b"".join(b"%07d\n" % number for number in range(100_000))

    def write() -> None:
        with os.fdopen(says, "wb") as file:
            file.write(written)

    await asyncio.to_thread(write)
    await until(lambda: protocol.ended)
    assert protocol.data == written


async def test_a_pause_holds_back_what_is_written() -> None:
    heard, says = os.pipe()
    protocol = Heard(pauses=True)
    transport = ThreadReader(os.fdopen(heard, "rb", 0), protocol)
    os.write(says, b"one")
    await until(lambda: protocol.pieces == 1)
    os.write(says, b"two")
    os.close(says)
    for _ in range(20):
        await asyncio.to_thread(int)
    assert protocol.data == b"one"
    transport.resume_reading()
    await until(lambda: protocol.pieces == 2)
    transport.resume_reading()
    await until(lambda: protocol.ended)
    assert protocol.data == b"onetwo"


@pytest.mark.parametrize("waits", ["for output", "to go on"])
async def test_a_reader_that_is_closed_says_nothing_more_and_its_thread_ends(waits: str) -> None:
    heard, says = os.pipe()
    protocol = Heard(pauses=True)
    transport = ThreadReader(os.fdopen(heard, "rb", 0), protocol)
    [thread] = [one for one in threading.enumerate() if one.name == f"output-{heard}"]
    if waits == "to go on":
        os.write(says, b"one")
        await until(lambda: protocol.pieces == 1)
    else:
        assert thread.ident is not None
        await until(lambda: sys._current_frames()[thread.ident or 0].f_code.co_name == "_read")
    transport.close()
    transport.close()
    assert transport.is_closing()
    await until(lambda: protocol.ended)
    await asyncio.to_thread(thread.join)  # although another program may have the other end
    os.close(says)
    assert protocol.data in (b"", b"one")


async def test_a_reader_whose_protocol_fails_says_so() -> None:
    heard, says = os.pipe()
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    protocol = Heard(fails=True)
    ThreadReader(os.fdopen(heard, "rb", 0), protocol)
    os.write(says, b"one")
    await until(lambda: protocol.ended)
    os.close(says)
    assert isinstance(protocol.lost, ValueError)
    assert failures == [protocol.lost]


async def test_without_a_thread_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    heard, says = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refused)
    with os.fdopen(heard, "rb", 0) as pipe, pytest.raises(RuntimeError, match="new thread"):
        ThreadReader(pipe, Heard())
    os.close(says)
    assert len(os.listdir("/proc/self/fd")) == before - 2
