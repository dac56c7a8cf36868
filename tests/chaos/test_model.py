"""What the model of a history holds back, and refuses."""

from __future__ import annotations

from turnfault.provider.script import Reply
from turnfault.provider.seen import Seen

from .model import Model, Plan


def asking() -> Seen:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Turn #7# of ada"}]}]}
    return Seen("POST", "/v1/messages", {}, b"", body)


def test_a_request_whose_cli_has_ended_holds_nothing_up() -> None:
    model = Model(lambda _: None)
    plan = model.plans[7] = Plan(hold="end")
    seen = asking()
    model.behave(seen)
    plan.reached.set()
    assert plan.held
    seen.outcome = "left"
    assert not plan.held


def test_whoever_waits_sees_that_a_turn_is_held_again_after_the_cli_that_asked_first_has_died() -> None:
    model = Model(lambda _: None)
    plan = model.plans[7] = Plan(hold="start")
    first = asking()
    model.behave(first)
    plan.reached.set()
    first.outcome = "left"
    waits = model.next_request
    model.behave(asking())
    assert waits.is_set()
    assert not model.next_request.is_set()
    assert plan.held


def test_a_turn_that_the_model_refuses_is_refused_each_time_with_words_of_its_own() -> None:
    model = Model(lambda _: None)
    model.plans[7] = Plan(fault="refusal")
    refused = [model.behave(asking()) for _ in range(2)]
    assert all(isinstance(one, Reply) and one.stop_reason == "refusal" for one in refused)
    assert refused[0] != refused[1]
