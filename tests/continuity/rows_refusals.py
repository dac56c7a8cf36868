"""Rows of the poison section: what the model refuses or cannot read ends with its turn, or with a rewind."""

from __future__ import annotations

import pytest

from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.errors import ProxyError
from turnfault.provider.script import Fail, Refusal

from ..media import document, paper
from ..talking import request
from .row import BOTH, Row
from .talk import EngineTalk, Talk

POISON = "poison"

# "" in `says`: the turn after a refusal may say that it took away what the CLI had written of it before it was stopped.


async def refused(talk: Talk) -> None:
    fact = talk.new_fact()
    talk.upstream.when(fact.key, Refusal("cyber", "It is about exploits."), times=None)
    assert isinstance(talk, EngineTalk)
    await talk.tell(fact)
    assert talk.turn.status == "refused"
    talk.facts.pop()
    talk.before = talk.sound


async def refused_until_rewound(talk: Talk) -> None:
    """The last acknowledged turn makes the model refuse whatever follows."""
    assert isinstance(talk, EngineTalk)
    for _ in range(2):
        await refused(talk)
    assert talk.turn.evidence.refusal is not None
    assert "rewind" in talk.turn.evidence.refusal.words
    await talk.engine.rewind("local", talk.agent, "-1")
    talk.facts.pop()


async def a_pdf_that_cannot_be_read(talk: Talk) -> None:
    assert isinstance(talk, EngineTalk)
    talk.upstream.when("unreadable", Fail(400, message="Could not process PDF"), times=None)
    blocks: tuple[Block, ...] = (document(paper()), {"type": "text", "text": "unreadable"})
    answer = await talk.engine.submit(request(Message("user", blocks), agent=talk.agent))
    with pytest.raises(ProxyError) as failed:
        await answer.turn()
    answer.leave()
    assert failed.value.status == 400


ROWS = (
    Row(POISON, "a refused prompt", refused, bare=False, calls=2, says={4: "The model refused to answer", 5: ""}),
    Row(
        POISON,
        "a history that is refused, rewound",
        refused_until_rewound,
        clis=BOTH,
        bare=False,
        calls=2,
        prefix=False,
        says={4: "The model refused to answer", 5: "2 requests in a row", 6: ""},
    ),
    Row(
        POISON,
        "a PDF that only the provider cannot read",
        a_pdf_that_cannot_be_read,
        bare=False,
        calls=2,
        says=({4: "invalid_request", 5: ""}, {4: "invalid_request"}),
    ),
)
