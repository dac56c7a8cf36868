"""Ids of calls on a path: each stands once, and no result goes to another call."""

from __future__ import annotations

import pytest

from cli_session_proxy.domain.client_tools import CallIds, calls_of, in_our_ids, with_unique_ids
from cli_session_proxy.domain.evidence import Note
from cli_session_proxy.domain.lineage import Past
from cli_session_proxy.domain.models import Block, Message


def call(given: str) -> Block:
    return {"type": "tool_use", "id": given, "name": "f", "input": {}}


def result(given: str, said: str) -> Block:
    return {"type": "tool_result", "tool_use_id": given, "content": said}


def user(*blocks: Block) -> tuple[Message, ...]:
    return (Message("user", blocks),)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("given", ["call_1", "x" * 64, "no id!", ""])
def test_an_id_that_is_used_again_gets_a_number_however_long_it_is(given: str) -> None:
    made = [calls_of(past.output)[0] for past in with_unique_ids([Past((), (call(given),))] * 3)]
    assert len(set(made)) == 3
    assert all(0 < len(one) <= 64 for one in made)
    assert made[1:] == [f"{made[0][:56]}-r2", f"{made[0][:56]}-r3"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ending", [False, True])
def test_ids_that_are_used_very_often_are_numbered_in_linear_time(ending: bool) -> None:
    """Alike from the first letter, or up to the last few."""
    given = [f"{'x' * 58}{n % 10_000 if ending else 0:06d}" for n in range(20_000)]
    made = [
        one for past in with_unique_ids([Past((), (call(name),)) for name in given]) for one in calls_of(past.output)
    ]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(("taken", "wanted"), [("a", "a_1"), ("a_1", "a"), ("a_b", "a_b_12"), ("a_b_12", "a_b")])
def test_an_id_and_the_same_with_a_number_do_not_stand_beside_each_other(taken: str, wanted: str) -> None:
    """CLI 2.1.330 loses the result of the one with the number."""
    ids = CallIds()
    ids.add(taken)
    assert wanted in ids
    assert ids.reserve(wanted) == f"{wanted}-r2"
    assert "a_2" not in ids or taken == "a"
    assert "a_x" not in ids


def test_calls_that_share_an_id_each_have_a_result_of_their_own() -> None:
    results = user(result("x|1", "first"), result("y", "other"), result("x|1", "second"))
    calls = (call("x|1"), call("y"), call("x|1"))
    first, second = with_unique_ids([Past((), calls), Past(results, ())])
    made = calls_of(first.output)
    assert [(block["tool_use_id"], block["content"]) for block in second.input[0].content] == [
        (made[0], "first"), (made[1], "other"), (made[2], "second"),
    ]  # fmt: skip
    assert first.notes == (Note("ids_rewritten", 2),)
    assert second.notes == ()


@pytest.mark.timeout(30)
def test_very_many_results_of_one_id_are_paired_in_linear_time() -> None:
    history = [Past((), (call("x"),) * 50_000), Past(user(*(result("x", "seen"),) * 50_000), ())]
    first, second = with_unique_ids(history)
    assert calls_of(first.output) == [block["tool_use_id"] for block in second.input[0].content]


def test_a_client_may_give_the_calls_ids_of_its_own() -> None:
    theirs, ours = [call("call_1"), call("call_1")], [call("toolu_1"), call("toolu_2")]
    new = user(result("call_1", "one"), result("call_1", "two"), result("call_1", "two"), result("else", "three"))
    ((mended),) = in_our_ids(new, theirs, ours)
    assert [block["tool_use_id"] for block in mended.content] == ["toolu_1", "toolu_2", "toolu_2", "else"]
