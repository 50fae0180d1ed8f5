"""Compute the fair share of each team in a pool (rule 5.9)."""

from __future__ import annotations

from ..index.ledger import Account, Ledger
from ..index.nodes import PoolState
from ..snapshot import WEIGHTS


def within_fair_share(ledger: Ledger, account: Account, pool: PoolState, request: int) -> bool:
    """Whether a team stays within its fair share with a request, which may straddle its reservation (rule 5.9)."""
    over = account.over_quota_use(pool.pool.name, request, account)
    return over <= fair_over(ledger, account, pool, account, request)


def fair_over(ledger: Ledger, account: Account, pool: PoolState, preemptor: Account, request: int) -> int:
    """Return by how much a team's usage may fairly exceed its reservation, with the preemptor's request counted.

    That is its weight's part of the GPUs that are not used within a reservation.
    """
    name = pool.pool.name
    overs = {team: team.over_quota_use(name, request, preemptor) for team in ledger.teams}
    weights = sum(WEIGHTS[a.team.weight] for a, over in overs.items() if over > 0 or a is account or a is preemptor)
    if not weights:
        return 0
    within = sum(a.used_in_pool.get(name, 0) + (request if a is preemptor else 0) - over for a, over in overs.items())
    return max(0, pool.total - within) * WEIGHTS[account.team.weight] // weights
