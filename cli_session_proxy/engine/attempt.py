"""One attempt to run a turn, and the state that is handed to the next attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import Execution, Job, Remedy, Used
from ..domain import lineage
from ..domain.evidence import Evidence, StreamCut
from ..domain.forms import replace
from ..domain.limits import size_of
from ..domain.models import JSON, Agent, Block, Fallback, Started, Turn
from ..domain.stop_sequences import StopCutter
from ..errors import ProxyError, UpstreamError
from ..stores.base import Lease
from .live import LiveTurn, with_end

# Most tool entries and failures kept of one turn. A turn of 1,500 steps has 3,000 tool entries; a program that imitates
# the CLI could report millions.
MOST_TOOLS, MOST_FAILURES = 100_000, 1_000
# Most characters of one answer (a model's longest has 4 million), and of a turn's tool entries: entries beyond it are
# kept without their content. To store 200 MB took 4 s of the event loop, and each later read took 2 s.
MOST_ANSWER, MOST_TOOL_TEXT = 16 * 1024 * 1024, 48 * 1024 * 1024
# Characters that each JSON value counts: an import takes all values that such an answer and such entries can have
# (`limits.TURN_VALUES`). A model's longest answer has fewer tokens than 65,000 numbers.
A_VALUE = 256
_ENTRY_FIELDS = ("type", "id", "tool_use_id", "name", "parent_tool_use_id")


@dataclass(slots=True, eq=False)
class RetryState:
    """The state that each attempt of a turn hands to the next one."""

    number: int = 1  # of the attempt
    tries: int = 1  # of the model that is asked now
    fault: str | None = None  # why the last structured output was refused
    remedies: frozenset[Remedy] = frozenset()  # what the backend asks to do differently
    fallback: Fallback | None = None  # the model that is asked instead
    first_error: ProxyError | None = None  # of the model that the client named

    def repeat(self) -> None:
        """Try the same model again."""
        self.number, self.tries = self.number + 1, self.tries + 1

    def fall_back(self, fallback: Fallback) -> None:
        """Start over with another model."""
        self.number, self.tries, self.fault, self.remedies = self.number + 1, 1, None, frozenset()
        self.fallback = fallback


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of one turn."""

    live: LiveTurn
    lease: Lease
    agent: Agent
    retrying: RetryState
    at_head: bool  # the turn continues the agent's head
    evidence: Evidence
    parent: Turn | None = None
    left_off: list[str] = field(default_factory=list)  # turns left off the path: their answers never arrived
    takes: tuple[tuple[str, str], ...] | None = None  # items of a composed prompt, see `Store.begin`
    kept_system: str | None = None  # the parent's system prompt, if the request has none
    cutter: StopCutter | None = None  # if the request has stop sequences, or a token limit that the backend lacks
    fallback: Fallback | None = None  # decided before this attempt
    job: Job | None = None
    exchange: Execution | None = None
    output: list[Block] = field(default_factory=list)
    partial: set[int] = field(default_factory=set)  # indexes in `output` of blocks that the provider broke off
    tools: list[JSON] = field(default_factory=list)
    retries: list[JSON] = field(default_factory=list)
    output_size: int = 0  # characters and values of `output`
    tools_size: int = 0  # characters and values of `tools`
    used: Used | None = None  # so far, not counted in budgets yet
    answered_by: str | None = None  # the model, as the backend names it
    begun: bool = False  # `Store.begin` was called: the store may have this attempt, and its frame may be sent
    announced: bool = False  # clients were told session and model
    committed: bool = False
    end_recorded: bool = False  # the backend raised `Lost`, and `record_end` was called

    @staticmethod
    def of(live: LiveTurn, lease: Lease, agent: Agent, retrying: RetryState, *, at_head: bool) -> Attempt:
        """The next attempt of the turn."""
        evidence = live.evidence
        if live.attempts:  # `left_off` is set anew: a client may have fetched that answer since the last attempt
            refused = retrying.fault or evidence.output_refused
            evidence = replace(evidence, left_off=None, output_refused=refused, notes=(), recalled=None)
        return Attempt(live, lease, agent, retrying, at_head, evidence, fallback=retrying.fallback)

    @property
    def format(self) -> JSON | None:
        return self.live.turn.options.format

    @property
    def uses_tools(self) -> bool:
        """Whether the CLI's own tools may have run. Their effects cannot be undone."""
        return self.job is not None and bool(self.job.profile.tools)

    @property
    def uses_fallback(self) -> bool:
        """Whether a fallback model answers."""
        return self.fallback is not None and self.fallback.here

    def announce(self) -> None:
        """Tell the clients the turn's session and model, once, before the answer begins."""
        if not self.announced and self.exchange is not None:
            self.announced = True
            self.live.reached("first_block")
            exchange = self.exchange
            ids = self.agent.agent_id, self.live.turn.id, exchange.session_id
            model = self.fallback.model if self.fallback is not None and self.uses_fallback else self.live.turn.model
            ignored = self.evidence.unmet, self.evidence.header_notes
            self.live.publish(Started(*ids, exchange.continuity, *ignored, exchange.backend, model))

    def check(self) -> None:
        """Raises `UpstreamError` if the backend reported more tools or failures than a real turn has."""
        failures = len(self.retries) + len(self.evidence.cuts)
        if len(self.tools) > MOST_TOOLS or failures > MOST_FAILURES or self.tools_size > 2 * MOST_TOOL_TEXT:
            count = f"{len(self.tools)} calls of tools and {failures} failures of the provider"
            raise UpstreamError(f"the backend reported {count} in one turn: send it again")

    def add_output(self, blocks: Sequence[Block]) -> None:
        """Add these blocks to the answer. Raises `UpstreamError` if it exceeds `MOST_ANSWER`."""
        size = size_of(blocks, MOST_ANSWER - self.output_size, A_VALUE)
        if size is None:
            raise UpstreamError(
                f"the answer has more than {MOST_ANSWER:,} characters (each JSON value counts {A_VALUE}): send it again"
            )
        self.output_size += size
        self.output.extend(blocks)

    def add_tool_entry(self, entry: JSON) -> None:
        """Keep a tool's call or result. Raises as `check` does."""
        self.check()
        size = size_of([entry], MOST_TOOL_TEXT - self.tools_size, A_VALUE)
        if size is None:
            entry = {name: entry[name] for name in _ENTRY_FIELDS if name in entry}
            size = size_of([entry], MOST_TOOL_TEXT, A_VALUE) or 0
        self.tools_size += size
        self.tools.append({**entry, "at": self.live.now()})

    def cut(self, blocks: frozenset[int]) -> None:
        """The provider's stream was cut in these blocks. What a client was already sent stays in the answer."""
        self.check()
        sent = self.live.withdraw(blocks)
        self.partial |= set(range(len(self.output), len(self.output) + len(sent)))
        self.output += sent
        text, thinking = (sum(len(str(block.get(kind, ""))) for block in sent) for kind in ("text", "thinking"))
        self.evidence = replace(self.evidence, cuts=(*self.evidence.cuts, StreamCut(text, thinking)))

    def record_end(self, status: str, **how: Any) -> tuple[JSON, ...]:
        """Record the end of this attempt in the turn's list of attempts, and return the list."""
        if not self.begun:
            how = {"n": self.retrying.number, "asked": False, **how}
        self.live.attempts = with_end(self.live.attempts, {"ended_at": self.live.now(), "status": status, **how})
        return tuple(self.live.attempts)

    def answered(self, output: tuple[Block, ...], **how: Any) -> Turn:
        """The turn with this answer and the facts of the attempt, ready to be committed."""
        return lineage.answered(
            self.live.turn,
            self.parent,
            output,
            tools=tuple(self.tools),
            timings=self.live.timings,
            finished_at=self.live.now(),
            backend=None if self.exchange is None else self.exchange.backend,
            answered_by=self.answered_by or (None if self.job is None else self.job.model),
            fallback=self.fallback,
            **how,
        )
