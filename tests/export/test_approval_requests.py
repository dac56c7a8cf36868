"""What a person reads of a tool that waits for them: all of it, as a command or a diff, with nothing that hides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.domain.approvals import Approval, PendingApproval
from cli_session_proxy.export.feed import COMPARED, action, request_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
EDIT = {"file_path": "/f", "old_string": "a\nb\nc", "new_string": "a\nB\nc"}


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"command": "ls"}, "command", "ls"),
        ({"command": "ls", "timeout": 9}, "command", 'ls\n\n{"timeout": 9}'),
        (EDIT, "diff", "in /f\n a\n-b\n+B\n c"),
        ({**EDIT, "replace_all": True}, "diff", 'in /f\n a\n-b\n+B\n c\n\n{"replace_all": true}'),
        ({"file_path": "/f", "old_string": "a", "new_string": "a"}, "diff", "in /f\n a"),
        ({"file_path": "/f", "edits": [{"old_string": "a", "new_string": "b"}]}, "diff", "in /f\n-a\n+b"),
        ({"file_path": "/f", "content": "a\nb"}, "diff", "the whole of /f becomes\n+a\n+b\n"),
        ({**EDIT, "file_path": "/f\n c/../../g"}, "diff", 'in "/f\\n c/../../g"\n a\n-b\n+B\n c'),
        ({"file_path": "/f\n+", "content": ""}, "diff", 'the whole of "/f\\n+" becomes\n+\n'),
        ({"file_path": "/f", "edits": ["?"]}, "arguments", '{\n "file_path": "/f",\n "edits": [\n  "?"\n ]\n}'),
        ({"command": 7}, "arguments", '{\n "command": 7\n}'),
        ({}, "arguments", "{}"),
    ],
)
def test_a_tool_is_shown_as_what_it_would_do(arguments: dict[str, Any], kind: str, text: str) -> None:
    assert action(arguments) == (kind, text)


def test_a_long_edit_is_not_compared_line_by_line_and_is_shown_whole() -> None:
    old, new = ("\n".join(f"{word} {n}" for n in range(COMPARED + 1)) for word in ("old", "new"))
    _, text = action({"file_path": "/f", "old_string": old, "new_string": new})
    assert text.split("\n") == [
        "in /f",
        *(f"-{one}" for one in old.split("\n")),
        *(f"+{one}" for one in new.split("\n")),
    ]


@given(old=TEXT, new=TEXT)
def test_both_sides_of_an_edit_can_be_read_off_its_diff(old: str, new: str) -> None:
    _, text = action({"file_path": "/f", "old_string": old, "new_string": new})
    lines = text.removeprefix("in /f\n").split("\n")
    assert "\n".join(line[1:] for line in lines if line[:1] in (" ", "-")) == old
    assert "\n".join(line[1:] for line in lines if line[:1] in (" ", "+")) == new


def test_what_would_steer_the_reader_or_give_a_secret_away_is_not_shown_as_it_is() -> None:
    secret = "sk-ant-api03-" + "a" * 40
    approval = Approval("appr_1", "Bash", f"echo {secret} \u202e", 1.0)
    told = request_json(PendingApproval(approval, {"command": f"echo {secret} \u202e\x1b[2J"}, 2.0, agent="sub"))
    assert told["text"] == "echo [redacted] \ufffd\ufffd[2J"
    assert told["asked"] == "echo [redacted] \ufffd"
    assert told["sub_agent"] == "sub"


@pytest.mark.parametrize(
    "command",
    [
        "git status # -----BEGIN PRIVATE KEY-----\nrm -rf ~",
        "echo password=1|reboot",
        "curl http://a:;reboot;@localhost",
        "curl localhost/?key=1234567;reboot",
        "echo authorization: bearer a1/../../bin/reboot",
    ],
)
def test_what_would_run_is_shown_where_it_looks_like_a_secret(command: str) -> None:
    approval = Approval("appr_1", "Bash", command, 1.0)
    told = request_json(PendingApproval(approval, {"command": command}, 2.0))
    assert (told["text"], told["asked"]) == (command, command)


def test_nothing_is_moved_out_of_sight() -> None:
    approval = Approval("appr_1", "Bash", "ls", 1.0)
    for blank in "\n\u2003\u2800\u3164":
        told = request_json(PendingApproval(approval, {"command": "ls" + blank * 5000 + "rm -rf ~"}, 2.0))
        assert told["text"] == "ls\n[5,000 blank characters]\nrm -rf ~"
    file = {"file_path": "/f", "content": "ls" + "\n" * 5000 + "rm -rf ~"}
    told = request_json(PendingApproval(approval, file, 2.0))
    assert told["text"] == "the whole of /f becomes\n+ls\n[9,999 blank characters]\n+rm -rf ~\n"
