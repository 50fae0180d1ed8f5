"""Whether what a plan starts or nominates uses GPUs that a static quota of another team keeps free.

Called while victims are spared (cycle/sparing.py): for each victim and each way to place the nominations beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..index.cluster import Cluster
from ..index.ledger import Account
from ..index.nodes import Allocation, PoolState
from .fit import static_quota

_Use = tuple[str, frozenset[Account]]
"""A pool, and those accounts with static quotas that an account is or is below: accounts equal in it have one answer"""


class StaticQuotas:
    """What a plan starts and nominates, by pool and by the static quotas that are its own.

    What a victim that stays uses of a static quota does not count: nothing is evicted to keep GPUs free. An answer
    stands until the next `read` where no static quota covers its pool and one in which something changed.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        lines, pools = cluster.ledger.unlent_lines, cluster.pools
        self._beside = {
            name: {other for ln in lines if ln.quota.covers(name) for other in pools if ln.quota.covers(other)}
            for name in pools
        }
        """Pool to the pools that a static quota covers together with it."""
        self._keeping = frozenset(line.account for line in lines)
        self._own: dict[Account, frozenset[Account]] = {}
        self._nominations: dict[str, Allocation] = {}
        self._uses: Counter[_Use] = Counter()
        self._of: dict[_Use, tuple[Account, PoolState]] = {}
        """One account and the pool of each."""
        self._known: dict[_Use, bool] = {}

    def read(self, started: Iterable[str]) -> None:
        """Read what the plan starts and nominates."""
        cluster = self._cluster
        starts = [cluster.allocations[name] for name in started if name in cluster.allocations]
        self._nominations, self._known = dict(cluster.nominations), {}
        self._uses = Counter(self._use(one) for one in (*starts, *self._nominations.values()) if one.milli_gpus)

    def are_used(self, victim: Allocation, placed: Iterable[str]) -> bool:
        """Whether any static quota of others is used while a victim stays.

        `placed`: the workloads whose nominations may have another place than when they were read.
        """
        uses, changed = self._uses.copy(), {pool.pool.name for pool in victim.pools}
        for name in {victim.workload.id, *placed}:
            before, now = self._nominations.get(name), self._cluster.nominations.get(name)
            if before is not None and now is not None and before.parts == now.parts:
                continue
            for planned, more in ((before, -1), (now, 1)):
                if planned is not None and planned.milli_gpus:
                    uses[self._use(planned)] += more
                    changed.update(pool.pool.name for pool in planned.pools)
        return any(self._is_used(use, changed) for use, many in uses.items() if many)

    def _use(self, planned: Allocation) -> _Use:
        account = self._cluster.account(planned.workload)
        if account not in self._own:
            self._own[account] = self._keeping.intersection(account.chain)
        use = planned.pool.pool.name, self._own[account]
        self._of.setdefault(use, (account, planned.pool))
        return use

    def _is_used(self, use: _Use, changed: set[str]) -> bool:
        beside = self._beside.get(use[0])
        if beside is None or not changed <= self._beside.keys() or not changed.isdisjoint(beside):
            return self._ask(use)
        if use not in self._known:
            self._known[use] = self._ask(use)
        return self._known[use]

    def _ask(self, use: _Use) -> bool:
        account, pool = self._of[use]
        return static_quota(self._cluster, account, pool, 0, True) is not None
