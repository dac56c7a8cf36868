"""A request at the gate that may be passed on to another proxy, or that another proxy has passed on (see `relay`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope, Send

from ..wires.asgi import has_left

# Of an answer: the hop was refused, and nothing was done.
REFUSED = "x-cluster-refused"


@dataclass(slots=True)
class Incoming:
    """A request at the gate: `outer` is its scope as it came, `inner` as the routes see it."""

    outer: Scope
    inner: Scope
    receive: Receive
    send: Send
    # What has come of its body, kept until an answer begins: a route that is passed on has read all of it.
    body: list[Message] = field(default_factory=list)
    begun: bool = False

    async def recorded(self) -> Message:
        message = await self.receive()
        if not self.begun and message["type"] == "http.request":
            self.body.append(message)
        return message

    async def answer(self, message: Message) -> None:
        self.begun = True
        self.body.clear()
        await self.send(message)

    async def left(self) -> None:
        """Wait until the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def has_left(self) -> bool:
        """The client has disconnected, as far as the server or the kernel knows. Of a request whose body was read."""
        return has_left(self.outer, self.receive)

    def again(self) -> Receive:
        """Brings what has come once more, then the rest."""
        said = iter(tuple(self.body))

        async def receive() -> Message:
            return next(said, None) or await self.receive()

        return receive
