"""A path that is too long for one request, summarised in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.sessions import summaries
from cli_session_proxy.backends.claude.transcript import Scribe, mending
from cli_session_proxy.domain.models import Message, Record
from cli_session_proxy.errors import ContextTooLong

SESSION = "11111111-1111-4111-8111-111111111111"


def path(count: int, size: int) -> list[Record]:
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.330", 1_700_000_000.0)
    out = []
    for number in range(count):
        out.append(scribe.record(Message.user(f"fact-{number} " + "x" * size), "sonnet"))
        out.append(scribe.record(Message.assistant(f"noted-{number}"), "sonnet"))
    return out


class Model:
    """Takes so many characters, and answers with the facts that it was shown."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.asked: list[int] = []

    async def __call__(self, said: str) -> str:
        self.asked.append(len(said))
        if len(said) > self.takes:
            raise ContextTooLong("too long")
        return " ".join(word for word in said.split() if word.startswith("fact-"))


async def test_every_exchange_is_in_the_summary_or_kept_as_it_was() -> None:
    records = path(20, 1000)
    model = Model(takes=12_000)
    made = await summaries.summarised(records, model, open_calls=False)
    assert made is not None
    assert made.text.split() == [f"fact-{n}" for n in range(made.exchanges)]
    assert made.kept_from == records[2 * made.exchanges].uuid
    assert 0 < made.exchanges < 20
    assert made.left_out == 0


async def test_a_piece_that_is_too_long_is_made_shorter() -> None:
    model = Model(takes=3500)
    made = await summaries.summarised(path(20, 1000), model, open_calls=False)
    assert made is not None
    assert made.left_out == 0
    assert made.text.split() == [f"fact-{n}" for n in range(made.exchanges)]
    assert max(model.asked) > model.takes >= model.asked[-1]


async def test_the_model_is_asked_a_bounded_number_of_times_and_what_is_left_out_is_counted() -> None:
    model = Model(takes=3000)
    made = await summaries.summarised(path(100, 1000), model, open_calls=False)
    assert made is not None
    assert len(model.asked) <= summaries.MOST_CALLS
    assert made.left_out > 0
    said = [int(fact.removeprefix("fact-")) for fact in made.text.split()]
    assert min(said) >= made.left_out
    assert max(said) == made.exchanges - 1


async def test_what_no_piece_is_short_enough_for_is_told() -> None:
    model = Model(takes=10)
    with pytest.raises(ContextTooLong, match="so are its summaries"):
        await summaries.summarised(path(20, 1000), model, open_calls=False)
    assert len(model.asked) == summaries.MOST_CALLS


async def test_an_exchange_whose_calls_wait_for_results_is_kept_however_long_it_is() -> None:
    records = path(3, 5000)
    made = await summaries.summarised(records, Model(takes=100_000), open_calls=True)
    assert made is not None
    assert made.kept_from == records[4].uuid
    assert await summaries.summarised(records[:2], Model(takes=100_000), open_calls=True) is None


async def test_a_long_exchange_is_summarised_up_to_the_calls_that_wait_for_results() -> None:
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.330", 1_700_000_000.0)
    records = [scribe.record(Message.user("fact-0 " + "x" * 3000), "sonnet")]
    for number in range(1, 4):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "look", "input": {"for": f" fact-{number} "}}
        records.append(scribe.record(Message("assistant", (call,)), "sonnet"))
        if number < 3:
            said = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "x" * 3000}
            records.append(scribe.record(Message("user", (said,)), "sonnet"))
    made = await summaries.summarised(records, Model(takes=100_000), open_calls=True)
    assert made is not None
    assert (made.text, made.kept_from, made.exchanges) == ("fact-0 fact-1 fact-2", records[-1].uuid, 1)


async def test_an_exchange_whose_calls_are_left_out_is_still_one() -> None:
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.330", 1_700_000_000.0)
    records = []
    for number in range(4):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "look", "input": {}}
        said = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"fact-{number} " + "x" * 1000}
        told = [
            Message.user("look"),
            Message("assistant", (call,)),
            Message("user", (said,)),
            Message.assistant("Yes."),
        ]
        records += [scribe.record(message, "sonnet") for message in told]
    shown = mending.shown([*records, mending.leave_out("calls")])
    made = await summaries.summarised(shown, Model(takes=100_000), open_calls=False)
    assert made is not None
    assert (made.text, made.kept_from, made.exchanges) == ("fact-0 fact-1 fact-2 fact-3", None, 4)
