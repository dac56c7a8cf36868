"""A request at the gate that may be forwarded to another proxy, or was forwarded by one (see `relay`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope, Send

from ..wires.asgi import CLOSED, has_left

# The header of an answer if the hop was refused and nothing was done.
REFUSED = "x-cluster-refused"
# That of an answer to a request that came before, or may have: something between the proxies sends requests again.
REPEATED = "x-cluster-repeated"


@dataclass(slots=True)
class Incoming:
    """A request at the gate. `outer`: its original scope; `inner`: the scope for the routes."""

    outer: Scope
    inner: Scope
    receive: Receive
    send: Send
    # The received body, kept until an answer begins: a route may have read it before the request is forwarded.
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
        """Whether the client has disconnected, by the server or the kernel. Only after the body was read."""
        return has_left(self.outer, self.receive)

    def send_now(self) -> None:
        """Send what was written in this loop iteration. Sent later, it could come to a client that has left since."""
        connection = self.outer.get("extensions", {}).get(CLOSED)
        if connection is not None:
            connection["flush"]()

    def again(self) -> Receive:
        """Gives the received body again, then the rest."""
        pieces = iter(tuple(self.body))

        async def receive() -> Message:
            return next(pieces, None) or await self.receive()

        return receive
