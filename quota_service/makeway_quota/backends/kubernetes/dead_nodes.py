"""Distinguish nodes that are down from a cluster, or a service, that is out of reach as a whole.

Called by the backend at each observation. A node is dead once it was not ready for long enough, without a break, while
the cluster could be read and other nodes of the pools were ready. Where none is, the way to them is the likelier fault,
and nothing is concluded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

NODE_LOST_AFTER = 300.0
"""Seconds for which a node is not ready until it is dead: Kubernetes evicts its pods after as long."""
LONGEST_STEP = 15.0
"""Seconds that may pass between two observations and still count as observed"""


class DeadNodes:
    """Since when nodes are not ready, on a clock that counts observed time only."""

    def __init__(self, after: float = NODE_LOST_AFTER, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.after = after
        self._monotonic = monotonic
        self._observed = 0.0
        self._looked_at = monotonic()
        self._since: dict[str, float] = {}

    def observe(self, ready: Mapping[str, bool], followed: bool) -> None:
        """Note which nodes of pools are ready; `followed`: whether what the cluster says is up to date."""
        now = self._monotonic()
        passed, self._looked_at = now - self._looked_at, now
        if not followed:
            return
        if not any(ready.values()):
            self._since.clear()
            return
        self._observed += min(LONGEST_STEP, passed)
        self._since = {name: self._since.get(name, self._observed) for name, up in ready.items() if not up}

    def dead(self) -> frozenset[str]:
        """Return the nodes that are dead."""
        return frozenset(name for name, since in self._since.items() if self._observed - since >= self.after)
