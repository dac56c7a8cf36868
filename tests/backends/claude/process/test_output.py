"""What a process prints, on its way to who listens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends.claude.process import frames
from cli_session_proxy.backends.claude.process.frames import End, Output
from cli_session_proxy.domain.models import JSON


class Pipe(asyncio.ReadTransport):
    """A transport that says whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        assert self.read
        self.read = False

    def resume_reading(self) -> None:
        assert not self.read
        self.read = True


class Heard:
    """An output that has begun, on such a transport, and what it told."""

    def __init__(self, output: Output | None = None) -> None:
        self.asked: list[JSON] = []
        self.broken = self.ended = 0
        self.pipe = Pipe()
        self.output = Output() if output is None else output
        if output is None:
            self.output.connection_made(self.pipe)

    def begin(self, asked: Callable[[JSON], None] | None = None, stderr: asyncio.StreamReader | None = None) -> Output:
        if stderr is None:
            stderr = asyncio.StreamReader()
            stderr.feed_eof()
        self.output.begin(stderr, asked=asked or self.asked.append, broken=self._break, ended=self._end)
        return self.output

    def _break(self) -> None:
        self.broken += 1

    def _end(self) -> None:
        self.ended += 1


def line(number: int, kind: str = "said") -> bytes:
    return json.dumps({"type": kind, "n": number}).encode() + b"\n"


async def rest(output: Output) -> list[int]:
    found = []
    while not isinstance(frame := await output.next(), End):
        assert frame is not None
        found.append(frame["n"])
    return found


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_a_listener_gets_every_frame_in_order_and_one_that_is_slow_stops_the_pipe(steps: list[tuple[int, int]]) -> None:
    async def run() -> None:
        heard = Heard()
        output, printed, got = heard.begin(), 0, 0
        output.listening = True
        for prints, takes in steps:
            output.data_received(b"".join(line(printed + n) for n in range(prints)))
            printed += prints
            assert heard.pipe.read == (printed - got <= most)
            for _ in range(min(takes, printed - got)):
                assert await output.next() == {"type": "said", "n": got}
                got += 1
            assert heard.pipe.read or printed - got > most // 2
        output.connection_lost(None)
        assert output.ended == (printed - got <= most)  # else it is at its end when the listener is
        assert await rest(output) == list(range(got, printed))
        assert heard.ended == 1
        await output.close()

    most = 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "INBOX", most)
        asyncio.run(run())


async def test_what_a_process_says_before_it_is_known_waits() -> None:
    heard = Heard()
    heard.output.data_received(line(1, "control_request"))
    assert (heard.asked, heard.pipe.read) == ([], False)
    heard.begin()
    assert (heard.asked, heard.pipe.read) == ([{"type": "control_request", "n": 1}], True)
    await heard.output.close()


async def test_one_that_ends_before_it_is_known_tells_its_end() -> None:
    heard = Heard()
    heard.output.data_received(line(1))
    heard.output.connection_lost(None)
    assert not heard.output.ended
    heard.begin()
    assert (heard.output.ended, heard.ended) == (True, 1)
    await heard.output.close()


async def test_what_cannot_be_read_before_it_is_known_is_told_then() -> None:
    heard = Heard()
    heard.output.data_received(b"x" * (frames.MAX_LINE + 1))
    assert heard.broken == 0
    heard.begin()
    assert heard.broken == 1
    await heard.output.close()


async def test_without_a_listener_it_is_read_and_dropped() -> None:
    heard = Heard()
    output = heard.begin()
    output.listening = True
    output.data_received(b"".join(map(line, range(frames.INBOX * 2))))
    assert not heard.pipe.read
    assert output.leave()
    assert heard.pipe.read
    output.data_received(b"".join(map(line, range(frames.INBOX * 2))))
    assert heard.pipe.read
    assert isinstance(await output.next(), End)
    output.listening = True
    output.data_received(line(7))
    assert await output.next() == {"type": "said", "n": 7}
    await output.close()


@pytest.mark.parametrize("when", ["in a turn", "between turns"])
async def test_a_process_that_says_more_than_any_turn_is_heard_no_further(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is heard is kept until the turn ends, and more for each line. Each turn counts by itself, and so does
    what comes between."""
    monkeypatch.setattr(frames, "MOST_OF_A_TURN", 10 * (len(line(0)) + frames.A_LINE))
    heard = Heard()
    output = heard.begin()
    for _ in range(3):
        output.listen()
        output.data_received(b"".join(line(0) for _ in range(10)))
        output.leave()
        output.data_received(b"".join(line(0) for _ in range(10)))
    if when == "in a turn":
        output.listen()
    else:
        output.leave()
    assert heard.broken == 0
    for number in range(10):
        output.data_received(line(number))
    output.data_received(line(0))
    assert heard.broken == 1
    assert "in one turn" in str(output.failure)
    output.connection_lost(None)
    assert await rest(output) == (list(range(10)) if when == "in a turn" else [])
    await output.close()


async def test_what_becomes_many_objects_counts_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All frames of a turn may be kept: 77 MB of such took the proxy 2 GB. In a text the same is one value."""
    monkeypatch.setattr(frames, "MOST_OF_A_TURN", 1_000_000)
    many = "[" + ",".join(['{"a":0}'] * 2_000) + "]"
    said, text = (f'{{"type":"user","message":{of}}}\n'.encode() for of in (many, json.dumps(many)))
    for what, most in ((said, 2), (text, 20)):
        heard = Heard()
        output = heard.begin()
        output.listen()
        for _ in range(most):
            assert heard.broken == 0
            output.data_received(what)
            assert len(output._heard) <= most
        assert heard.broken == (what is said)
        await output.close()


@pytest.mark.parametrize(
    ("letter", "most"), [("a", 10), ("\N{LATIN SMALL LETTER E WITH ACUTE}", 10), ("\N{GRINNING FACE}", 2)]
)
@pytest.mark.parametrize("escaped", [False, True])
async def test_a_text_counts_with_the_memory_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, letter: str, most: int, escaped: bool
) -> None:
    """One emoji makes each of its characters four bytes: four frames of 55 MB took the proxy 1.2 GB."""
    monkeypatch.setattr(frames, "MOST_OF_A_TURN", 1_050_000)
    said = json.dumps({"type": "user", "message": letter + "a" * 100_000}, ensure_ascii=escaped).encode() + b"\n"
    heard = Heard()
    output = heard.begin()
    output.listen()
    for _ in range(most):
        output.data_received(said)
        assert heard.broken == 0
    output.data_received(said)
    assert heard.broken == 1
    assert len(output._heard) == most
    await output.close()


async def test_what_it_says_on_stderr_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_OF_A_TURN", 1000)
    heard = Heard()
    stderr = asyncio.StreamReader()
    output = heard.begin(stderr=stderr)
    stderr.feed_data(b"x" * 1000)
    await asyncio.sleep(0)
    assert heard.broken == 0
    stderr.feed_data(b"x")
    stderr.feed_eof()
    await output.last_words()
    assert heard.broken == 1
    await output.close()


@pytest.mark.parametrize("end", ["leave", "close", "connection_lost"])
async def test_a_listener_that_waits_learns_that_nothing_comes_any_more(end: str) -> None:
    output = Heard().begin()
    output.listening = True

    async def ends() -> None:
        match end:
            case "leave":
                output.leave()
            case "close":
                await output.close()
            case _:
                output.connection_lost(None)

    frame, _ = await asyncio.gather(output.next(), ends())
    assert isinstance(frame, End)
    await output.close()


async def test_what_cannot_be_read_is_told_once_and_the_rest_is_drained() -> None:
    heard = Heard()
    output = heard.begin()
    output.listening = True
    output.data_received(line(1) + b'{"a":' * 500 + b"1" + b"}" * 500 + b"\n" + line(2))
    output.data_received(line(3))
    assert heard.broken == 1
    assert "deeper than" in str(output.failure)
    output.connection_lost(None)
    assert await rest(output) == [1]
    await output.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_fault_while_it_is_read_is_its_end(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    ours, theirs = socket.socketpair()
    told: list[object] = []

    def fault(_asked: JSON) -> None:
        raise RuntimeError("a fault of ours")

    async def run() -> list[int]:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
        output = Output()
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: output, sock=ours)
        Heard(output).begin(fault).listening = True
        theirs.sendall(line(1) + line(2, "control_request") + line(3))
        try:
            return await asyncio.wait_for(rest(output), 60)
        finally:
            transport.close()
            await output.close()

    with theirs, asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == [1]
    assert [str(one) for one in told] == ["a fault of ours"]


async def test_replies_that_never_come_are_none() -> None:
    output = Heard().begin()
    before = output.reply("a")
    output.connection_lost(None)
    assert await before is None
    assert await output.reply("b") is None
    await output.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_real_socket_waits_for_its_listener(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    ours, theirs = socket.socketpair()
    count = 20_000

    def print_all() -> None:
        with theirs:
            for n in range(count):
                theirs.sendall(line(n))

    async def run() -> list[int]:
        output = Output()
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: output, sock=ours)
        Heard(output).begin().listening = True
        writer.start()
        try:
            return await rest(output)
        finally:
            transport.close()
            await output.close()

    writer = threading.Thread(target=print_all)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == list(range(count))
    writer.join()
