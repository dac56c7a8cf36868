"""What is suspected to be a side call, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from cli_session_proxy.domain.lineage import is_side_call
from cli_session_proxy.domain.models import Message, Placed, Rule, Tool, Turn, TurnOptions, TurnRequest
from cli_session_proxy.domain.options import Parameters

CODER = "You are a coding agent. Use the tools that you have, and answer in few words. Never guess."
TOOLS = (Tool("read"), Tool("edit"))
PARENT = Turn(
    id="turn_1", seq=1, agent_key=1, parent_id=None, status="completed", model="sonnet", created_at=1.0,
    input=(Message.user("hello"),), system=CODER, options=TurnOptions(tools=TOOLS),
)  # fmt: skip
TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Guidelines:"


def asked(text: str = "go on", **more: Any) -> TurnRequest:
    given: dict[str, Any] = {"model": "sonnet", "fingerprint": "f", "system": CODER}
    options = {"tools": TOOLS} | {name: more.pop(name) for name in TurnOptions.__slots__ if name in more}
    return TurnRequest(messages=(Message.user(text),), options=TurnOptions(**options), **(given | more))


def on_history(text: str = "go on", parent: Turn = PARENT, **more: Any) -> bool:
    return is_side_call(asked(text, **more), "history", parent)


@pytest.mark.parametrize(
    ("expected", "more"),
    [
        (False, {}),
        (False, {"system": f"{CODER} It is 12:01."}),
        (False, {"system": f"{CODER}\n\nYou are in plan mode: change nothing."}),
        (False, {"system": CODER.replace("few", "many")}),
        (True, {"system": "You name conversations. Answer with a title of five words."}),
        (True, {"system": None}),
        (False, {"tools": (*TOOLS, Tool("late"))}),
        (False, {"tools": TOOLS[:1]}),
        (True, {"tools": ()}),
        (True, {"tools": (Tool("say_who_is_next"),)}),
        (False, {"parameters": Parameters(max_tokens=1)}),
    ],
)
def test_another_system_prompt_or_other_tools_on_the_same_history_are_suspected(
    expected: bool, more: dict[str, Any]
) -> None:
    assert on_history(**more) is expected
    assert on_history(**more, agent_id="ada") is expected


def test_what_continues_a_suspected_turn_is_not_suspected_for_another_prompt_again() -> None:
    hand_off = Turn(**{name: getattr(PARENT, name) for name in PARENT.__slots__} | {"placed": Placed(side=True)})
    assert not on_history(parent=hand_off, system="You are another agent.", tools=())
    assert on_history(TITLE, parent=hand_off)


@pytest.mark.parametrize(
    "text",
    [
        TITLE,
        "### Task:\nSuggest 3-5 relevant follow-up questions or prompts",
        "### Task:\nGenerate 1-3 broad tags categorizing the main themes",
        "Provide a concise, 5-word-or-less title for the conversation, using title case conventions.",
        "Please write a 5-10 word title for the following conversation:\n\nhello",
        "[SUGGESTION MODE: Suggest what the user might naturally type next into Claude Code.]\n\nFIRST:",
        "Analyze *only* the content and structure of your immediately preceding response (your last turn)",
        "Generate a title for this conversation:",
        "Your task: Create a 2-4 word title for this conversation.\n\nRules:\n- Respond with ONLY the title",
    ],
)
def test_prompts_of_programs_are_known(text: str) -> None:
    assert on_history(text)
    assert is_side_call(asked(text), "new", None)
    assert is_side_call(asked(text), "unknown", None)
    assert not on_history(f"What does this mean? {text}")


@pytest.mark.parametrize(
    "system",
    [
        "You are Claude Code.\n\nAnalyze if this message indicates a new conversation topic. If it does, extract",
        "You are a title generator. You output ONLY a thread title. Nothing else.",
        "You are a specialized Task Routing AI. Your sole function is to analyze the user's request",
    ],
)
def test_system_prompts_of_programs_are_known(system: str) -> None:
    assert is_side_call(asked(system=system), "new", None)


def test_a_ping_is_suspected_where_nothing_was_said_before() -> None:
    ping = asked("quota", parameters=Parameters(max_tokens=1))
    assert is_side_call(ping, "new", None)
    assert not is_side_call(ping, "unknown", None)
    assert not is_side_call(asked("quota", parameters=Parameters(max_tokens=2)), "new", None)


@pytest.mark.parametrize("rule", ["head", "id", "fresh"])
def test_what_goes_on_at_the_head_or_by_an_id_is_never_suspected(rule: Rule) -> None:
    assert not is_side_call(asked(TITLE, system="Other.", parameters=Parameters(max_tokens=1)), rule, PARENT)


def test_a_named_agent_begins_with_no_side_call() -> None:
    """Whatever comes next for this name goes on from it."""
    assert not is_side_call(asked(TITLE, agent_id="ada"), "new", None)
    assert not is_side_call(asked(TITLE, agent_id="ada"), "unknown", None)


def test_the_result_of_a_call_belongs_to_the_call() -> None:
    result = Message("user", ({"type": "tool_result", "tool_use_id": "c", "content": "21"},))
    request = TurnRequest(model="sonnet", messages=(result,), fingerprint="f", system="Another one, by far.")
    assert not is_side_call(request, "history", PARENT)
