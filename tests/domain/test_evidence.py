"""What a turn has to show: two forms of it, and what is put together."""

from __future__ import annotations

from cli_session_proxy.domain.evidence import Evidence, Repair, StreamCut


def test_what_is_not_set_is_left_out() -> None:
    assert Evidence().as_json() == {}
    assert Evidence(exit_code=0, compacted={}).as_json() == {"exit_code": 0, "compacted": {}}
    assert Repair("moved", records=0).as_json() == {"code": "moved", "records": 0}


def test_it_comes_back_as_it_was_and_fields_of_a_newer_version_are_no_trouble() -> None:
    evidence = Evidence(repaired=Repair("rewritten", also_at=("/x",)), cuts=(StreamCut(1, 2),), reloaded=("touched",))
    assert Evidence.from_json(evidence.as_json() | {"newer": 1}) == evidence
    assert Repair.from_json({"code": "moved", "newer": 1}) == Repair("moved")


def test_a_later_attempt_adds_and_replaces() -> None:
    first = Evidence(verified="equal", exit_code=-9, retries=({"error": "x"},))
    assert first.plus(Evidence(verified="again", settled=True)) == Evidence(
        verified="again", exit_code=-9, retries=({"error": "x"},), settled=True
    )
    assert first.plus(Evidence()) == first
