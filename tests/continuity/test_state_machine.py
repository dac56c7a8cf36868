"""Random sequences of send, break, restart, retry and branch, against a model of the chain: a tree of facts."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cli_session_proxy.engine.placement import RETRY_WINDOW
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Fail
from turnfault.provider.upstream import Upstream

from ..conftest import CLI_ENV
from . import rows_cli, rows_files
from .score import Fact
from .talk import EngineTalk, RequestRefused

T = TypeVar("T")

BREAKS = (
    rows_files.delete, rows_files.remove_a_middle_line, rows_files.cut_the_last_line, rows_files.empty,
    rows_files.swap_for_another, rows_files.wipe_projects, rows_files.append_garbage, rows_files.make_unreadable,
    rows_files.put_under_another_cwd,
)  # fmt: skip


class Conversation(RuleBasedStateMachine):
    """`paths`: for each acknowledged turn, the facts on the way to it. `head` names the turn that goes on."""

    binary: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory(prefix="csp-")
        self.paths: dict[str, list[Fact]] = {}
        self.head: str | None = None
        self.failed: Fact | None = None
        self.extends = False  # the next request must extend the last one byte for byte

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def start(self) -> None:
        async def start() -> None:
            self.upstream = await Upstream().__aenter__()
            folder = Path(self.folder.name)
            environment = CLI_ENV | {"ANTHROPIC_BASE_URL": self.upstream.url, "HOME": str(folder / "home")}
            options = Settings(
                var=folder / "var", claude_config_dir=folder / "config", claude_env=environment, port=0,
                claude_bin=self.binary, turn_timeout=60.0, idle_timeout=30.0, cli_retries=0, stop_grace=2.0,
            )  # fmt: skip
            self.talk = EngineTalk(options, self.upstream)
            await self.talk.up()

        self.run(start())
        self.send()

    def teardown(self) -> None:
        async def stop() -> None:
            await self.talk.down()
            await self.upstream.__aexit__(None, None, None)

        if hasattr(self, "talk"):
            self.run(stop())
        self.runner.close()
        self.folder.cleanup()

    def _send(self, parent: str | None, fact: Fact | None = None) -> None:
        """One turn, which must tell the model the path and nothing else."""
        self.talk.facts = list(self.paths[parent]) if parent else []
        score = self.run(self.talk.probe(fact))
        assert score.whole, score
        assert not self.extends or score.prefix == 1.0, (score, self.talk.turn.evidence)
        self.head = self.talk.turn.id
        self.paths[self.head] = list(self.talk.facts)
        self.extends = True

    @rule()
    def send(self) -> None:
        self._send(self.head)

    @rule(status=st.sampled_from((400, 500)))
    def fail(self, status: int) -> None:
        """The provider refuses; the chain is as before."""
        fact = self.talk.new_fact()
        self.upstream.when(fact.key, Fail(status), times=None)
        with pytest.raises(RequestRefused):
            self.run(self.talk.tell(fact))
        self.upstream.heal()
        self.failed = fact

    @precondition(lambda self: self.failed is not None)
    @rule()
    def retry(self) -> None:
        """The client sends what failed once more."""
        fact, self.failed = self.failed, None
        self._send(self.head, fact)

    @precondition(lambda self: self.head is not None)
    @rule()
    def ask_for_the_same_answer_again(self) -> None:
        """A client's own retry of an acknowledged turn is no turn."""
        turn, count = self.talk.turn, len(self.upstream.requests)
        if time.time() - (turn.finished_at or 0.0) > RETRY_WINDOW / 2:
            return  # so late it would be said anew
        self.talk.extra["is_retry"] = True
        self.run(self.talk.say_again(turn))
        del self.talk.extra["is_retry"]
        assert (self.talk.turn.id, len(self.upstream.requests)) == (turn.id, count)

    @precondition(lambda self: self.head is not None)
    @rule(breaks=st.sampled_from(BREAKS), warm=st.booleans())
    def break_the_file(self, breaks: Any, warm: bool) -> None:
        if not self.talk.transcript.is_file():
            return
        if not warm:
            self.run(self.talk.down())
        with suppress(IndexError, ValueError):  # too short to lose a line, or broken already
            breaks(self.talk)
        if not warm:
            self.run(self.talk.up())

    @rule()
    def kill(self) -> None:
        self.run(rows_cli.kill_while_idle(self.talk))

    @rule()
    def kill_in_the_middle(self) -> None:
        self.talk.facts = list(self.paths[self.head]) if self.head else []
        self.run(rows_cli.kill_after_the_prompt_is_on_disk(self.talk))
        self.head = self.talk.turn.id
        self.paths[self.head] = list(self.talk.facts)

    @rule()
    def restart(self) -> None:
        self.run(self.talk.restart())

    @precondition(lambda self: len(self.paths) > 1)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """The client goes on from an earlier answer: a branch, and the head from now on."""
        parent = data.draw(st.sampled_from(sorted(self.paths)), label="parent")
        self.talk.extra["continues"], self.extends = parent, False
        self._send(parent)
        del self.talk.extra["continues"]

    @rule(model=st.sampled_from(("haiku", "sonnet", "opus")))
    def change_the_model(self, model: str) -> None:
        self.talk.model = model


def _run(examples: int, steps: int) -> None:
    options = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(Conversation, settings=options)


@pytest.fixture(autouse=True)
def binary(claude_2: Path) -> None:
    Conversation.binary = claude_2


def test_the_model_hears_exactly_the_chain() -> None:
    _run(examples=3, steps=8)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_model_hears_exactly_the_chain_at_length() -> None:
    _run(examples=30, steps=25)
