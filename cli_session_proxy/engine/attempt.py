"""One attempt of one turn: what is known of it while it is under way, and how it ends."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from ..backends.claude.events import Called, Result
from ..backends.claude.sessions.capture import Ready, Said
from ..backends.claude.sessions.manager import Plan
from ..backends.claude.sessions.stopping import Cutter
from ..domain.client_tools import calls_of
from ..domain.models import JSON, Agent, Block, Started, Status, Turn
from ..stores.base import Lease
from .live import LiveTurn


class Run:
    """One attempt of one turn, while it is under way."""

    def __init__(self, live: LiveTurn, lease: Lease, agent: Agent, number: int, fault: str | None = None) -> None:
        self.live = live
        self.lease = lease
        self.left_off: list[str] = []  # turns whose answers never arrived
        self.format: JSON | None = live.turn.reason.get("format")
        self.fault = fault  # why the structured output of the attempt before was refused
        self.agent = agent
        self.number = number
        self.frame_uuid = str(uuid.uuid4())
        self.parent: Turn | None = None
        self.kept_system: str | None = None
        self.plan: Plan
        self.cutter = Cutter(())
        self.ready: Ready | None = None
        self.session_id: str | None = None
        self.output: list[Block] = []
        self.tools: list[JSON] = []
        self.retries: list[JSON] = []
        self.reason: JSON = {} if fault is None else {"output_refused": fault}
        self.committed = False
        self._entry: JSON | None = None
        self._started = False

    def start(self, ready: Ready) -> None:
        """Tell the clients where the turn runs, once, before the first piece of the answer."""
        if not self._started:
            self._started = True
            self.live.at("first_block")
            session_id = self.session_id or ready.session.id
            self.live.publish(Started(self.agent.agent_id, self.live.turn.id, session_id, ready.continuity))

    def begun(self, session_id: str, now: float, repaired: JSON | None) -> JSON:
        """The journal's entry of this attempt. The links of one that fails are not stored: its repair stands here."""
        self._entry = {"n": self.number, "session_id": session_id, "frame_uuid": self.frame_uuid, "started_at": now}
        self._entry |= {"repaired": repaired} if repaired else {}
        self.live.attempts.append(self._entry)
        return dict(self._entry)

    def ended(self, status: str, **how: Any) -> tuple[JSON, ...]:
        """All attempts of the turn, this one with its end."""
        if self._entry is None:  # its process died before it was asked
            how = {"n": self.number, "asked": False, **how}
        self.live.attempt_ended({"ended_at": time.time(), "status": status, **how})
        return tuple(self.live.attempts)


@dataclass(frozen=True, slots=True)
class End:
    """How a turn ends: with the model's last word, at a stop sequence, or at calls of the client's tools.

    `cost_usd` is the turn's own.
    """

    status: Status
    stop_reason: str | None
    said: Said
    cost_usd: float | None

    @staticmethod
    def of(run: Run, ready: Ready, result: Result | Called) -> End:
        stopped = run.cutter.hit is not None
        called = isinstance(result, Called) and not stopped
        calls = frozenset(calls_of(result.calls)) if isinstance(result, Called) and called else frozenset()
        # A message that the provider cut and the CLI asked for again may have left calls that were never made.
        output = tuple(block for block in run.output if block.get("type") != "tool_use" or block.get("id") in calls)
        session_id = result.session_id if isinstance(result, Result) else run.session_id or ready.session.id
        total = result.cost_total_usd if isinstance(result, Result) else None
        reason = "stop_sequence" if stopped else result.stop_reason if isinstance(result, Result) else "tool_use"
        said = Said(run.frame_uuid, output, session_id, total, calls, stopped)
        cost = _cost(ready.session.cost_total_usd, total)
        return End("requires_action" if called else "completed", reason, said, cost)


def _cost(before: float, total: float | None) -> float | None:
    """This turn's share of the CLI's running total, which starts anew where the CLI did not restore it."""
    if total is None:
        return None
    return total - before if total >= before else total
