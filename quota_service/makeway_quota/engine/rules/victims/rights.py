"""Find the rights by which a workload may evict others in a pool (rules 5.1, 5.7 and 5.9).

Called for a pending workload (cycle/admission.py), and for a victim that could return at once (returning.py).
"""

from __future__ import annotations

from ...index.cluster import Cluster
from ...index.ledger import Account
from ...index.nodes import PoolState
from ...snapshot import Workload
from ..fair_share import within_fair_share
from .preemptor import BORROWERS_FIRST, Rights


def rights_of(cluster: Cluster, workload: Workload, account: Account, pool: PoolState, in_quota: bool) -> list[Rights]:
    """Return the rights of a workload in a pool, those first that are tried first (rule 5.4).

    In quota, borrowers leave before lower priorities of its own team; over quota, all rights are compared together.
    """
    settings = cluster.settings
    own = workload.kind == "job" and settings.in_team_preemption and not workload.non_preemptible
    if in_quota:
        return [("reservation",), BORROWERS_FIRST] if own else [("reservation",)]
    rights: Rights = ("own_team",) if own else ()
    if settings.fair_share == "reclaim":
        amount = cluster.need(workload).total
        limited = cluster.ledger.over_limit(account, pool.pool.name, amount, True) is not None
        if not limited and within_fair_share(cluster.ledger, account, pool, amount):
            rights = (*rights, "fair_share")
    return [rights] if rights else []
