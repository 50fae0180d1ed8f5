"""Convert rows and nodes to the engine's types, again only where they changed."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...engine.snapshot import ADMITTED, PRIORITIES, Node, Placement, Snapshot
from ...engine.snapshot import Workload as EngineWorkload
from ...history.durations import Durations
from ...policy import Document
from ...quarantine import Quarantine
from ...store.records import Workload
from ...values import Place, host_of
from ..hub.people import People
from ..start_backoff import CLOCKS_DIFFER, StartBackoff, backoff_until
from .corrected_times import CorrectedTimes
from .observed_requests import ObservedRequests
from .pool_assignment import PoolAssignment

CYCLE = "cycle"
"""The reader of changes that plans"""
SHOWING = "reading it for a plan"
UNWRITTEN = ("writing what was decided", "writing its changes")
"""Steps that carry out a plan; a workload that is in quarantine for one of them is left out of plans"""
MAX_UNREAD = 50_000
"""Changes that are kept for one reader; beyond, it reads everything again."""
PlacedOn = Callable[[str], Iterable[Workload]]
"""The rows that are placed on a host."""


@dataclass(frozen=True, slots=True)
class EngineChanges:
    """What changed since a reader's last call; with `whole`, the complete snapshot instead.

    Without `whole`, the snapshot has neither workloads nor nodes.
    """

    snapshot: Snapshot
    whole: bool
    changed: Sequence[EngineWorkload] = ()
    gone: Sequence[str] = ()
    nodes: Sequence[Node] = ()
    gone_nodes: Sequence[str] = ()


@dataclass(slots=True)
class Unread:
    """What changed since the last read of one reader; `known`: whether it has read before."""

    known: bool = False
    workloads: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)


class EngineView:
    """The workloads and nodes as the engine has them; `show` converts `stale` rows and `stale_hosts` again."""

    def __init__(
        self,
        durations: Durations,
        backoff: StartBackoff | None = None,
        durable_checkpoints: Callable[[Workload], bool] = lambda row: True,
        people: People | None = None,
        times: CorrectedTimes | None = None,
        requested: ObservedRequests | None = None,
    ) -> None:
        """`durable_checkpoints`: whether the attempt of a row, when it ends, leaves them to the next one."""
        self.durations = durations
        self._times = times or CorrectedTimes()
        self._requested = ObservedRequests(time.time) if requested is None else requested
        self._backoff = backoff or StartBackoff()
        self._people = people
        self.held: set[str] = set()
        """Pending workloads that are not shown, because their owners are no longer in their teams."""
        self._durable_checkpoints = durable_checkpoints
        self.quarantine = Quarantine()
        """The loop's quarantine, for the view that it plans with"""
        self._quarantined: set[str] = set()
        """Pending workloads that are not shown, because a plan that starts them cannot be carried out."""
        self.stale: set[str] = set()
        self.stale_hosts: set[str] = set()
        self._document: Document | None = None
        self._workloads: dict[str, EngineWorkload] = {}
        self._nodes: dict[str, Node] = {}
        self._hosts: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {}
        """Machine to its pools and devices, as they were shown."""
        self._booting: dict[str, Node] = {}
        """The nodes that are not observed yet, as their machines boot."""
        self._unread: dict[str, Unread] = {}
        self._shown_at = 0.0
        self._ends: list[tuple[float, str]] = []
        """A heap of the times at which rows become stale by themselves, such as the end of an expected run time; an
        entry that differs from `_end_of` is void."""
        self._end_of: dict[str, float] = {}

    def take_changes(self, snapshot: Snapshot, reader: str = CYCLE) -> EngineChanges:
        """Return what changed since the reader's last call, and count it as read; the first call returns everything."""
        unread = self._unread.get(reader, Unread())
        self._unread[reader] = Unread(known=True)
        return EngineChanges(
            snapshot,
            not unread.known,
            [self._workloads[id] for id in unread.workloads if id in self._workloads],
            [id for id in unread.workloads if id not in self._workloads],
            [self._nodes[name] for name in unread.nodes if name in self._nodes],
            [name for name in unread.nodes if name not in self._nodes],
        )

    def reset_readers(self, except_for: str) -> None:
        """Make every reader except one read everything again with its next call."""
        self._unread = {reader: unread for reader, unread in self._unread.items() if reader == except_for}

    def _note(self, *, workload: str | None = None, node: str | None = None) -> None:
        """Note a change for every reader; one with too many unread changes reads everything again."""
        for reader, unread in tuple(self._unread.items()):
            if workload is not None:
                unread.workloads.add(workload)
            if node is not None:
                unread.nodes.add(node)
            if len(unread.workloads) + len(unread.nodes) > MAX_UNREAD:
                del self._unread[reader]

    def show(
        self,
        rows: Mapping[str, Workload],
        assignment: PoolAssignment,
        document: Document,
        now: float,
        placed_on: PlacedOn | None = None,
    ) -> None:
        """Convert stale rows and hosts, and work beyond its expected run time; everything after a new document."""
        if now < self._shown_at - CLOCKS_DIFFER:  # the clock was set back: the times in `_ends` may come too late
            self.stale |= self._end_of.keys()
        if now < self._shown_at:
            future = (w.id for w in self._workloads.values() if w.started_at is not None and w.started_at > now)
            self.stale.update(future)
        self._shown_at = now
        while self._ends and self._ends[0][0] <= now:
            end, id = heapq.heappop(self._ends)
            if self._end_of.get(id) == end:
                del self._end_of[id]
                self.stale.add(id)
        quarantined = self.quarantine.backing_off(UNWRITTEN, "workload")
        self.stale |= quarantined ^ self._quarantined
        self._quarantined = quarantined
        if self._document is not document:
            self._document = document
            self.stale = rows.keys() | self._workloads.keys()
            self.stale_hosts = assignment.parts.keys() | self._hosts.keys()
        placed_on = placed_on or _placed_on(rows, assignment)
        for host in self.stale_hosts:
            pools = assignment.pools_of(host)
            if pools != self._hosts.get(host, ()):
                is_divided = max(len(pools), len(self._hosts.get(host, ()))) > 1
                self.stale.update(row.id for row in placed_on(host) if is_divided)
        failed_ids = {id for id in self.stale if not self._try_row(id, rows.get(id), assignment, document, now)}
        failed_hosts = {name for name in self.stale_hosts if not self._try_host(name, assignment, placed_on)}
        self.stale, self.stale_hosts = failed_ids, failed_hosts

    def _try_row(
        self, id: str, row: Workload | None, assignment: PoolAssignment, document: Document, now: float
    ) -> bool:
        """Show one row; False where that fails: it is tried again, and only what it holds is shown meanwhile."""
        if self.quarantine.is_backing_off(SHOWING, "workload", id) and (row is None or row.state not in ADMITTED):
            self._hide(id)
            return row is None
        try:
            self._show_row(id, row, assignment, document, now)
        except Exception as error:
            self.quarantine.failed(SHOWING, "workload", id, error)
            self._hide(id)
            if row is not None and row.state in ADMITTED:
                self._workloads[id] = holder(row, assignment.placement(row.placement))
                self._note(workload=id)
            return False
        self.quarantine.passed(SHOWING, "workload", id)
        return True

    def _hide(self, id: str) -> None:
        self._end_of.pop(id, None)
        if self._workloads.pop(id, None) is not None:
            self._note(workload=id)

    def _try_host(self, name: str, assignment: PoolAssignment, placed_on: PlacedOn) -> bool:
        """Show one host; False where that fails: it stays as it was shown last, and is tried again."""
        with self.quarantine.guard(SHOWING, "node", name):
            self._show_host(name, assignment, placed_on)
            return True
        return False

    def _show_row(
        self, id: str, row: Workload | None, assignment: PoolAssignment, document: Document, now: float
    ) -> None:
        known = self._workloads.get(id)
        if row is None:
            self._times.forget(id)
            self._requested.forget(id)
        if assignment.divided:
            host_names = [host_of(item.node) for item in (known.placement if known else ())]
            host_names += [place.node for place in (row.placement if row else ())]
            self.stale_hosts.update(assignment.divided.intersection(host_names))
        until = backoff_until(row, now) if row is not None else None
        held = row is not None and self._is_excluded(row, document)
        quarantined = row is not None and row.state == "pending" and id in self._quarantined
        (self.held.add if held else self.held.discard)(id)
        if row is None or row.team is None or until is not None or held or quarantined:
            self._workloads.pop(id, None)
            self._end_of.pop(id, None)
            if until is not None:
                self._end_of[id] = until
                heapq.heappush(self._ends, (until, id))
            self._note(workload=id)
            return
        pools: tuple[str, ...] = ()
        if assignment.divided and (profile := document.profile(row.profile)) is not None:
            pools = profile.pools  # on a divided host work without GPUs is in the pool that its profile prefers
        row = self._requested.of(self._times.of(row))
        shown = as_workload(row, lambda places: assignment.placement(places, pools), self.durations.remaining(row, now))
        if not self._durable_checkpoints(row):
            shown = replace(shown, last_checkpoint_at=None)
        avoided = self._backoff.avoided_nodes(id, now)
        if shown.avoid or avoided:
            avoid = sorted({*shown.avoid, *(node for node, _ in avoided)})
            shown = replace(shown, avoid=_in_any_pool(avoid, document))
        ends = [*(until for _, until in avoided), self._requested.until(id)]
        self._expect(shown, min((until for until in ends if until is not None), default=None))
        if known != shown:  # a change of other fields of the row is none for the engine
            self._workloads[id] = shown
            self._note(workload=id)

    def _is_excluded(self, row: Workload, document: Document) -> bool:
        return row.state == "pending" and self._people is not None and self._people.excludes(row, document)

    def _expect(self, shown: EngineWorkload, waits_until: float | None) -> None:
        """Note when a workload becomes stale by itself: at its expected end, else at `waits_until`."""
        end = waits_until
        if shown.expected is not None and shown.started_at is not None:
            end = shown.started_at + shown.expected
        if end is None:
            self._end_of.pop(shown.id, None)
            return
        if self._end_of.get(shown.id) != end:
            self._end_of[shown.id] = end
            heapq.heappush(self._ends, (end, shown.id))
            if len(self._ends) > 2 * len(self._end_of) + 64:  # most of them are void
                self._ends = sorted((end, id) for id, end in self._end_of.items())

    def _show_host(self, host: str, assignment: PoolAssignment, placed_on: PlacedOn) -> None:
        before = self._hosts.get(host, ())
        names = [f"{host}/{pool}" if len(before) > 1 else host for pool, _ in before]
        nodes = assignment.as_nodes(host, placed_on(host) if host in assignment.divided else ())
        for node in nodes:
            if self._nodes.get(node.name) != node:
                self._nodes[node.name] = node
                self._note(node=node.name)
        for name in set(names) - {node.name for node in nodes}:
            del self._nodes[name]
            self._note(node=name)
        if nodes:
            self._hosts[host] = assignment.pools_of(host)
        else:
            self._hosts.pop(host, None)

    def show_booting(self, nodes: Iterable[Node]) -> None:
        """Show the machines that boot as nodes; an observed node of the same name goes before."""
        booting = {node.name: node for node in nodes if node.name not in self._hosts}
        for name, node in booting.items():
            if self._nodes.get(name) != node:
                self._nodes[name] = node
                self._note(node=name)
        for name in self._booting.keys() - booting.keys():
            if self._nodes.get(name) == self._booting[name]:  # else it is an observed node by now
                del self._nodes[name]
                self._note(node=name)
        self._booting = booting

    def workloads(self) -> tuple[EngineWorkload, ...]:
        """Return all workloads that are shown."""
        return tuple(self._workloads.values())

    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes that are shown."""
        return tuple(self._nodes.values())


def _placed_on(rows: Mapping[str, Workload], assignment: PoolAssignment) -> PlacedOn:
    """Return a function from a divided host to its rows: the nodes of no other host depend on what is placed there."""
    result: dict[str, list[Workload]] = {}
    for row in rows.values() if assignment.divided else ():
        for name in assignment.divided.intersection(place.node for place in row.placement):
            result.setdefault(name, []).append(row)
    return lambda host: result.get(host, ())


def to_avoid(lost_on: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes on which a job was lost twice or more, sorted."""
    return tuple(sorted({node for node in lost_on if lost_on.count(node) > 1}))


def _in_any_pool(hosts: Sequence[str], document: Document) -> tuple[str, ...]:
    """Return all names that nodes of these hosts can have in the engine: the host's, and one with each pool."""
    return tuple(name for host in hosts for name in (host, *(f"{host}/{p.name}" for p in document.pools)))


def holder(row: Workload, placement: Placement) -> EngineWorkload:
    """Return a row that cannot be converted as one that only holds its devices: non-preemptible, and running."""
    return EngineWorkload(
        id=row.id,
        team=row.team or "",
        profile=row.profile,
        owner=row.owner,
        preemptible=False,
        state="running",
        placement=placement,
        gpus=row.gpus,
        workers=row.workers,
        cpu=row.cpu,
        memory=row.memory,
    )


def as_workload(
    row: Workload, placed: Callable[[Sequence[Place]], Placement], expected: float | None
) -> EngineWorkload:
    """Return one row as the engine sees it.

    `placed` turns places of the store into a placement; `expected` is how many seconds the attempt takes.
    """
    return EngineWorkload(
        id=row.id,
        team=row.team or "",
        profile=row.profile,
        owner=row.owner,
        kind=row.kind,
        priority=PRIORITIES[row.priority],
        preemptible=row.preemptible,
        submitted_at=row.submitted_at,
        state=row.state,
        started_at=row.started_at if row.state in ADMITTED else None,
        placement=placed(row.placement),
        attempt=max(1, row.attempt),
        last_checkpoint_at=row.checkpoint_at,
        evicted_for=row.evicted_for,
        deadline=row.notice.deadline if row.notice else None,
        nomination=placed(row.nomination),
        failed_node=row.failed_node,
        gpus=row.gpus,
        workers=row.workers,
        min_workers=row.min_workers,
        cpu=row.cpu,
        memory=row.memory,
        time_limit=row.time_limit,
        expected=expected,
        earlier_runtime=row.ran,
        avoid=to_avoid(row.lost_on),
    )
