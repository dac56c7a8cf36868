"""One row of the list of chains, for programs."""

from __future__ import annotations

from ..domain.models import JSON, ChainSummary

# Rows that a list has unless it is asked for more: 5,000 are 1.6 MB.
LISTED = 1000
# Seconds for which an unnamed agent of one turn is listed by itself: somebody may be about to go on from it.
ONE_SHOT_SHOWN = 600.0
DAY = 86_400.0


def summary_json(row: ChainSummary) -> JSON:
    """`bytes` is what the store keeps for it, `last_at` UTC seconds, `state` the last turn's status.

    `side`: there is nothing in it but what is suspected to be side calls. `host`: the one whose proxy holds the agent
    now, `address` where other proxies reach that one.
    """
    return {
        "agent_id": row.agent.agent_id,
        "owner": row.agent.owner,
        "head": row.agent.head,
        "turns": row.turns,
        "sessions": row.sessions,
        "repairs": row.repairs,
        "failures": row.failures,
        "state": row.state,
        "cost_usd": row.cost_usd,
        "bytes": row.bytes,
        "created_at": row.agent.created_at,
        "last_at": row.last_at,
        "side": row.side,
        "host": row.host,
        "address": row.address,
    }
