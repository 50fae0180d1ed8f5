"""Read the machines that are not over: again only those whose version has changed since they were read last.

Every commit of a machine writes a higher version. A row that is damaged is read each time, until it is written anew.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, select

from ...autoscale.machine import Machine
from ..statements import MAX_KEYS
from ..tables import LIVE_MACHINE, machine_requests
from ..tables import machines as table
from .rows import COLUMNS, machines

M = table.c
MACHINES = select(*(M[name] for name in COLUMNS), M.over_at, machine_requests.c.request).select_from(
    table.outerjoin(machine_requests)
)
VERSIONS = select(M.id, M.version).where(LIVE_MACHINE).order_by(M.deployment, M.id)
LIVE = MACHINES.where(LIVE_MACHINE).order_by(M.deployment, M.id)
MAX_SHARE = 0.25
"""Share of the rows above which all are read by one statement"""

Damaged = dict[str, Sequence[str]]
"""The fields that could not be read, by machine"""


class LiveMachines:
    """The machines as they were read last. For all threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._known: Mapping[object, Machine] = {}
        """Those that are not damaged; replaced as a whole"""

    def read(self, connection: Connection, deployment: object = None, damaged: Damaged | None = None) -> list[Machine]:
        """Return the machines of a deployment, or of all, by deployment and id; `damaged` gets what is."""
        versions, results = VERSIONS, LIVE
        if deployment is not None:
            versions, results = (query.where(M.deployment == deployment) for query in (VERSIONS, LIVE))
        known = self._known
        now = [(id, version) for id, version in connection.execute(versions)]
        old = [id for id, version in now if (one := known.get(id)) is None or one.version != version]
        broken: Damaged = {}
        if len(old) > MAX_SHARE * len(now):
            result = machines(connection.execute(results), broken)
        else:
            new = {one.id: one for one in _some(connection, old, broken)}
            changed = set(old)
            result = [one for id, _ in now if (one := new.get(id) if id in changed else known[id]) is not None]
        self._keep(result, deployment, broken)
        if damaged is not None:
            damaged.update(broken)
        return result

    def _keep(self, read: Sequence[Machine], deployment: object, broken: Damaged) -> None:
        with self._guard:
            kept: dict[object, Machine] = {}
            if deployment is not None:
                kept = {id: one for id, one in self._known.items() if one.deployment != deployment}
            kept.update((one.id, one) for one in read if one.id not in broken)
            self._known = kept


def _some(connection: Connection, ids: Sequence[Any], broken: Damaged) -> list[Machine]:
    """Return the machines of some ids that are still not over."""
    result: list[Machine] = []
    for begin in range(0, len(ids), MAX_KEYS):
        query: Select[Any] = MACHINES.where(LIVE_MACHINE, M.id.in_(ids[begin : begin + MAX_KEYS]))
        result += machines(connection.execute(query), broken)
    return result
