"""The calls of the client's tools within one turn's frames: which come out, and under which names. Pure."""

from __future__ import annotations

from ....domain.client_tools import Judge
from ....domain.models import JSON, Block
from .events import Refused


class CallReader:
    """Decides each call once, when its arguments are known. The judge has examined a call before it is decided here."""

    def __init__(self, judge: Judge | None) -> None:
        self._judge = judge
        self._message: str | None = None
        self._decided: dict[str, Block | Refused | None] = {}
        self.accepted: list[Block] = []  # of the present message
        self.ours: set[str] = set()  # every call that came out

    def judge(self, judge: Judge) -> None:
        """The rules from here on."""
        self._judge = judge

    def message(self, message_id: str | None) -> None:
        """What follows belongs to this message of the model."""
        if message_id != self._message:
            self._message = message_id
            self.accepted = []

    def decide(self, block: Block) -> Block | Refused | None:
        """The call under the client's name, or why it is refused; None for a tool that is not the client's."""
        call = str(block.get("id"))
        if call not in self._decided:
            verdict = self._decided[call] = self._verdict(block, call)
            if isinstance(verdict, dict):
                self.accepted.append(verdict)
                self.ours.add(call)
        return self._decided[call]

    def decided(self, call: str) -> Block | None:
        verdict = self._decided.get(call)
        return verdict if isinstance(verdict, dict) else None

    def take(self) -> tuple[Block, ...]:
        """The calls of the present message, once."""
        taken, self.accepted = tuple(self.accepted), []
        return taken

    def _verdict(self, block: Block, call: str) -> Block | Refused | None:
        tool = self._judge.tool(str(block.get("name"))) if self._judge else None
        if self._judge is None or tool is None:
            return None
        why = self._judge.refusal(tool, len(self.accepted)) or self._judge.fault(tool, call)
        if why is not None:
            return Refused(call, why)
        return {**block, "name": tool.name}


def is_call(frame: JSON) -> bool:
    """A request of the CLI's to make a call of the client's tool."""
    request = frame.get("request")
    message = request.get("message") if isinstance(request, dict) else None
    return isinstance(message, dict) and message.get("method") == "tools/call"
