"""An answer in the terminal is drawn block by block, and none of its words is lost however it comes in pieces."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli_session_proxy.commands.rendering import AnswerView, blocks

ANSWER = """\
# Title

Some **bold** words
on two lines.

- one

  of two paragraphs
- two

1. first

2. second

```python
x = 1

y = [2]  # not a link
```

Done."""


def drawn(text: str, pieces: list[int]) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=20, color_system=None, highlight=False)
    view = AnswerView(console)
    for begin, end in zip([0, *pieces], [*pieces, len(text)], strict=True):
        view.add(text[begin:end])
    view.end()
    return file.getvalue()


def test_a_block_is_whole_when_the_next_one_has_begun() -> None:
    whole, rest = blocks(ANSWER)
    assert [block.split("\n")[0] for block in whole] == ["# Title", "Some **bold** words", "- one"]
    assert whole[2].endswith("2. second"), "a list goes on behind an empty line"
    assert rest.startswith("```python")
    assert blocks(f"{rest}\n\nAnd more words.")[0] == [rest.removesuffix("\n\nDone."), "Done."]
    assert blocks("a\n\n") == ([], "a\n\n")
    assert blocks("```\na\n\nb") == ([], "```\na\n\nb"), "code goes on behind an empty line"


def test_markdown_is_drawn_and_nothing_of_the_answer_steers_the_terminal_by_a_link() -> None:
    out = drawn(ANSWER + "\n\n[here](http://evil.example)", [])
    assert "bold" in out
    assert "**" not in out.rpartition("\x1b[2K")[2]
    assert "y = [2]  # not a link" in out
    assert "\x1b]8" not in out


@given(st.sets(st.integers(1, len(ANSWER) - 1)).map(sorted))
def test_the_same_is_left_on_the_screen_in_whatever_pieces_it_comes(pieces: list[int]) -> None:
    whole, rest = blocks(ANSWER)
    said, left = [], ""
    for begin, end in zip([0, *pieces], [*pieces, len(ANSWER)], strict=True):
        more, left = blocks(left + ANSWER[begin:end])
        said += more
    assert (said, left) == (whole, rest)


@pytest.mark.parametrize("length", [10, 5_000])
def test_of_a_block_that_is_higher_than_the_screen_the_end_is_shown_while_it_grows(length: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=10, color_system=None)
    view = AnswerView(console)
    view.add("```\n" + "\n".join(f"line {n}" for n in range(length)))
    assert f"line {length - 1}" in file.getvalue()
    view.end()
    assert "line 0" in file.getvalue()
