"""The last moment of an answer: what counts as handed over."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from cli_session_proxy.wires.answers import Client, ClientGoneError
from cli_session_proxy.wires.asgi import CLOSED, at_once


def nothing() -> None:
    """Nobody is told that the client leaves."""


class Wire:
    """The two ends of an ASGI connection. `gone` is the disconnect."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


async def test_an_end_sent_in_the_moment_of_the_disconnect_is_not_taken_for_delivered() -> None:
    wire = Wire()
    client = Client({}, wire.receive, wire.send, nothing)
    delivered = False

    async def work() -> None:
        nonlocal delivered
        await asyncio.sleep(0)  # the watcher waits for the disconnect by now
        wire.gone.set()
        await client.write(b"the end", {}, last=True)
        delivered = True

    with pytest.raises(ClientGoneError):
        await client.while_there(work())
    assert not delivered
    assert not client.finished


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
async def test_the_work_ends_when_the_client_leaves_and_a_cancellation_stays_one(leaves: bool, stopped: bool) -> None:
    wire = Wire()
    client = Client({}, wire.receive, wire.send, nothing)
    under_way, cut = asyncio.Event(), []

    async def work() -> None:
        under_way.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut.append(True)
            raise

    serving = asyncio.create_task(client.while_there(work()))
    await under_way.wait()
    if leaves:
        wire.gone.set()
    if stopped:
        serving.cancel()
    if leaves or stopped:
        with pytest.raises(asyncio.CancelledError if stopped else ClientGoneError):
            await asyncio.wait_for(serving, 60)
        assert cut == [True]
    else:
        await asyncio.sleep(0)
        assert not serving.done()
        serving.cancel()
        await asyncio.wait([serving])


async def test_a_cancellation_stays_one_while_work_ends_whose_write_came_too_late() -> None:
    wire, ending = Wire(), asyncio.Event()
    client = Client({}, wire.receive, wire.send, nothing)

    async def work() -> None:
        wire.gone.set()
        try:
            await client.write(b"the end", {}, last=True)
        finally:
            wire.gone.clear()
            ending.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(client.while_there(work()))
    await ending.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(serving, 60)


async def test_a_disconnect_that_the_server_knows_of_is_known_before_the_watcher_has_run() -> None:
    wire = Wire()
    client = Client({}, wire.receive, wire.send, nothing)
    wire.gone.set()
    with pytest.raises(ClientGoneError):
        await client.write(b"the end", {}, last=True)
    assert wire.sent == []


async def test_an_end_is_sent_without_a_turn_of_the_loop() -> None:
    wire = Wire()
    turns: list[None] = []
    asyncio.get_running_loop().call_soon(turns.append, None)
    await Client({}, wire.receive, wire.send, nothing).write(b"the end", {}, last=True)
    assert (len(wire.sent), turns) == (2, [])


async def test_a_look_for_a_message_takes_what_is_there_and_leaves_what_is_to_come() -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    assert at_once(messages.get) is None
    waiting = asyncio.create_task(messages.get())
    await asyncio.sleep(0)
    assert at_once(messages.get) is None
    messages.put_nowait({"type": "http.disconnect"})
    assert await waiting == {"type": "http.disconnect"}
    messages.put_nowait({"type": "http.request"})
    assert at_once(messages.get) == {"type": "http.request"}
    assert messages.empty()


async def test_a_whole_answer_leaves_as_one_piece() -> None:
    """Head and body in one turn of the loop: a send for each would wake the client twice."""
    wire = Wire()
    sent_by_then: list[int] = []

    async def send(message: Message) -> None:
        await wire.send(message)
        asyncio.get_running_loop().call_soon(lambda: sent_by_then.append(len(wire.sent)))

    await Client({}, wire.receive, send, nothing).write(b"all", {}, last=True)
    await asyncio.sleep(0)
    assert sent_by_then == [2, 2]


async def test_a_disconnect_after_the_end_is_the_normal_course() -> None:
    wire = Wire()
    client = Client({}, wire.receive, wire.send, nothing)

    async def work() -> None:
        await client.write(b"the end", {}, last=True)
        wire.gone.set()  # as uvicorn does when the answer is complete
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    await client.while_there(work())
    assert client.finished
    assert [message["type"] for message in wire.sent] == ["http.response.start", "http.response.body"]


async def test_nothing_follows_the_end() -> None:
    wire = Wire()
    client = Client({}, wire.receive, wire.send, nothing)
    await client.write(b"the end", {}, last=True)
    await client.write(b": keep-alive\n\n", {})
    assert len(wire.sent) == 2


async def test_a_connection_that_reports_its_end_by_an_error_counts_as_gone() -> None:
    wire = Wire()

    async def broken(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise OSError("closed")

    client = Client({}, wire.receive, broken, nothing)
    with pytest.raises(ClientGoneError):
        await client.write(b"the end", {}, last=True)
    assert not client.finished


async def test_who_has_closed_the_connection_is_not_given_the_end_although_the_server_has_not_seen_it() -> None:
    wire, left = Wire(), []
    scope = {"extensions": {CLOSED: {"is_closed": lambda: True}}}
    client = Client(scope, wire.receive, wire.send, lambda: left.append(True))
    await client.write(b"a piece", {})
    with pytest.raises(ClientGoneError):
        await client.write(b"the end", {}, last=True)
    assert left
    assert [message.get("body") for message in wire.sent] == [None, b"a piece"]


async def test_a_client_is_known_to_have_left_before_its_work_has_ended() -> None:
    wire, steps = Wire(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("the work ends")

    client = Client({}, wire.receive, wire.send, lambda: steps.append("it has left"))
    asyncio.get_running_loop().call_soon(wire.gone.set)
    with pytest.raises(ClientGoneError):
        await client.while_there(work())
    assert steps == ["it has left", "the work ends"]


async def test_a_cancellation_is_not_the_clients_leaving_where_its_watcher_broke() -> None:
    ended = asyncio.Event()
    coming: list[Message] = [{"type": "http.request"}]

    async def receive() -> Message:
        if coming:
            return coming.pop()
        raise RuntimeError("the host's receive broke")

    async def work() -> None:
        with pytest.raises(ClientGoneError):
            await client.write(b"the end", {}, last=True)
        ended.set()
        await asyncio.Event().wait()

    client = Client({"extensions": {CLOSED: {"is_closed": lambda: True}}}, receive, Wire().send, nothing)
    there = asyncio.create_task(client.while_there(work()))
    await ended.wait()
    there.cancel()
    with pytest.raises(asyncio.CancelledError):
        await there
