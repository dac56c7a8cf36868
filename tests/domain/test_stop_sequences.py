"""Stop sequences: where the answer is cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop
from cli_session_proxy.domain.stop_sequences import StopCutter


def cut(pieces: list[str], sequences: list[str]) -> tuple[str, str | None]:
    """What comes out, and the sequence that ended it."""
    cutter = StopCutter(sequences)
    events = cutter.feed(BlockStart(0, {"type": "text", "text": ""}))
    for piece in pieces:
        events += cutter.feed(BlockDelta(0, {"type": "text_delta", "text": piece}))
    events += cutter.feed(BlockStop(0))
    return "".join(str(event.delta["text"]) for event in events if isinstance(event, BlockDelta)), cutter.hit


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), st.integers(1, 5))
@example("abca", ["abca", "bc"], 4)
def test_in_which_pieces_an_answer_comes_does_not_matter(text: str, sequences: list[str], size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert cut(pieces, sequences) == cut(list(text), sequences)


def test_of_two_that_overlap_the_one_that_is_complete_first_counts() -> None:
    assert cut(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert cut(["abc"], ["bc", "abc"]) == ("", "abc")
