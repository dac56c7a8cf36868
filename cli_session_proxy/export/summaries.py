"""One row of the list of chains, for programs."""

from __future__ import annotations

from ..domain.models import JSON, ChainSummary

# Rows of a list by default: 5,000 are 1.6 MB.
LISTED = 1000
# Seconds for which a one-shot has its own row: its client may still continue it.
ONE_SHOT_SHOWN = 600.0
DAY = 86_400.0


def summary_json(row: ChainSummary) -> JSON:
    """`bytes`: its size in the store; `last_at`: UTC seconds; `state`: the last turn's status.

    `side`: it has only suspected side calls. `host`, `address`: of the proxy that holds the agent now.
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
