"""What the model of a history holds back."""

from __future__ import annotations

from cli_session_proxy.testing.seen import Seen

from .model import Model, Plan


def test_a_request_whose_cli_has_ended_holds_nothing_up() -> None:
    model = Model(lambda _: None)
    plan = model.plans[7] = Plan(hold="end")
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Turn #7# of ada"}]}]}
    seen = Seen("POST", "/v1/messages", {}, b"", body)
    model.behave(seen)
    plan.reached.set()
    assert plan.held
    seen.outcome = "left"
    assert not plan.held
