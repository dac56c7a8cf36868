"""A client's history as records: ids of calls that are no ids, or used again."""

from __future__ import annotations

import pytest

from cli_session_proxy.backends.claude.sessions.history import NO_RESULT, Mender
from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.domain.notes import Note


def call(given: str) -> Block:
    return {"type": "tool_use", "id": given, "name": "f", "input": {}}


def result(given: str, said: str) -> Block:
    return {"type": "tool_result", "tool_use_id": given, "content": said}


def ids(message: Message) -> list[str]:
    return [block["id"] for block in message.content]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("given", ["call_1", "x" * 64, "no id!", ""])
def test_an_id_that_is_used_again_gets_a_number_however_long_it_is(given: str) -> None:
    mender = Mender()
    made = [ids(mender.said([call(given)]))[0] for _ in range(3)]
    assert len(set(made)) == 3
    assert all(0 < len(one) <= 64 for one in made)
    assert made[1:] == [f"{made[0][:56]}-n2", f"{made[0][:56]}-n3"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ending", [False, True])
def test_ids_that_are_used_very_often_are_numbered_in_linear_time(ending: bool) -> None:
    """Alike from the first letter, or up to the last few."""
    mender = Mender()
    given = [f"{'x' * 58}{n % 10_000 if ending else 0:06d}" for n in range(20_000)]
    made = [one for name in given for one in ids(mender.said([call(name)]))]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("results", [2, 1])
def test_calls_that_share_an_id_each_have_a_result_of_their_own(results: int) -> None:
    mender = Mender()
    made = ids(mender.said([call("x|1"), call("y"), call("x|1")]))
    brought = [result("x|1", "first"), result("y", "other"), result("x|1", "second")][: results + 1]
    asked = mender.asked([Message("user", tuple(brought))])
    assert [(block["tool_use_id"], block["content"]) for block in asked.content] == [
        (made[0], "first"), (made[1], "other"), (made[2], "second" if results == 2 else NO_RESULT),
    ]  # fmt: skip
    lost = [Note("calls_without_result", 1)] if results == 1 else []
    assert mender.notes() == [Note("ids_rewritten", 2), *lost]


@pytest.mark.timeout(30)
def test_very_many_results_of_one_id_are_paired_in_linear_time() -> None:
    mender = Mender()
    mender.said([call("x")] * 50_000)
    assert len(mender.asked([Message("user", (result("x", "seen"),) * 50_000)]).content) == 50_000
