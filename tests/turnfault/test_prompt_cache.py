"""The prompt cache as documented: what is read back is bounded by breakpoints and by how far is looked back."""

from __future__ import annotations

from typing import Any

import pytest

from turnfault.provider.prompt_cache import LOOK_BACK, PromptCache, share_read
from turnfault.provider.seen import Seen

MARK = {"cache_control": {"type": "ephemeral"}}


def request(texts: int, *marked: int, words: str = "word") -> dict[str, Any]:
    """A prompt of so many texts, with breakpoints on these."""
    blocks = [{"type": "text", "text": f"{words} {at}", **(MARK if at in marked else {})} for at in range(texts)]
    return {"messages": [{"role": "user", "content": blocks}]}


def seen(body: dict[str, Any]) -> Seen:
    return Seen("POST", "/v1/messages", {}, b"", body)


def test_a_request_reads_what_the_one_before_it_wrote() -> None:
    cache = PromptCache()
    first = cache.use(request(3, 2))
    assert (first.read, first.written) == (0, first.size)
    assert cache.use(request(5, 4)).read == first.written


def test_nothing_is_written_without_a_breakpoint() -> None:
    cache = PromptCache()
    assert cache.use(request(3)).written == 0
    assert cache.use(request(3, 2)).read == 0


@pytest.mark.parametrize(("new", "share"), [(LOOK_BACK - 1, 1.0), (LOOK_BACK, 0.0)])
def test_an_entry_is_found_only_within_the_blocks_that_are_looked_back_over(new: int, share: float) -> None:
    assert share_read(seen(request(3 + new, 2 + new)), seen(request(3, 2))) == share


def test_another_word_before_the_entry_reads_nothing() -> None:
    assert share_read(seen(request(4, 3, words="other")), seen(request(3, 2))) == 0.0


def test_the_form_tells_strings_from_lists_and_where_breakpoints_are() -> None:
    as_list, marked = seen(request(1)), seen(request(1, 0))
    as_string = seen({"messages": [{"role": "user", "content": "word 0"}]})
    assert as_string.lines() == as_list.lines() == marked.lines()
    assert len({str(one.form()) for one in (as_string, as_list, marked)}) == 3
