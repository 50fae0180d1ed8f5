"""The world as it is now: what the machines showed last, what the store say, and the policy in force.

The loop keeps it, the services read it. Only `snapshot` turns rows and nodes into what the engine sees.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ..backends.base import Seen
from ..engine.state import Node, Snapshot
from ..engine.state import Workload as EngineWorkload
from ..history.accounting import Accounting
from ..history.durations import Durations
from ..policy import Document
from ..store.records import Workload
from ..store.store import Store
from .engine_view import as_workload
from .pool_assignment import PoolAssignment, divide, sizes

NOTHING = Seen((), ())


@dataclass(slots=True)
class Follower:
    """Somebody who waits for news of one workload; `row` is the newest that was told."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Event = field(default_factory=asyncio.Event)
    row: Workload | None = None

    async def heard(self, timeout: float) -> bool:
        """Wait for news since the last time; False when time is up."""
        try:
            async with asyncio.timeout(timeout):
                await self.news.wait()
        except TimeoutError:
            return False
        self.news.clear()
        return True


@dataclass(frozen=True, slots=True)
class News:
    """What the engine is told: the snapshot if it is to see the `whole`, else what changed and who is gone.

    Unless it is to see the whole, the snapshot is without its workloads.
    """

    snapshot: Snapshot
    whole: bool
    changed: Sequence[EngineWorkload] = ()
    gone: Sequence[str] = ()


class World:
    """The last observation, the active rows (read once, then followed from commit to commit) and the document."""

    def __init__(
        self, store: Store, document: Document, policy_version: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._clock = clock
        self.document = document
        self.policy_version = policy_version
        self.seen = NOTHING
        self._raw = NOTHING
        self._machines = PoolAssignment()
        self._divided = (self._raw.nodes, document)
        self.failure: str | None = None
        self._seen_at: float | None = None
        self._rows: dict[str, Workload] | None = None
        self._given: dict[str, Workload] | None = None
        """A copy of the rows, for others to hold; made anew when somebody asks after a change."""
        self._attended: dict[str, Workload] = {}
        self._news: deque[Sequence[Workload]] = deque()
        self._reading = asyncio.Lock()
        self.durations = Durations()
        self.accounting = Accounting()
        self._view = EngineView(self.durations)
        self._followers: dict[str, list[Follower]] = {}
        self._guard = threading.Lock()
        self._account(())
        store.on_change(self._committed)

    def _committed(self, changed: Sequence[Workload]) -> None:
        """Take what a commit changed, in the thread that wrote."""
        if not changed:
            return
        self._news.append(changed)
        waking: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        with self._guard:
            for row in changed:
                for follower in self._followers.get(row.id, ()):
                    follower.row = row
                    waking.setdefault(follower.loop, []).append(follower.news)
        for loop, events in waking.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, events)

    @contextmanager
    def follow(self, id: str) -> Iterator[Follower]:
        """Hear of every commit that changes one workload, from now on."""
        follower = Follower(asyncio.get_running_loop())
        with self._guard:
            self._followers.setdefault(id, []).append(follower)
        try:
            yield follower
        finally:
            with self._guard:
                self._followers[id].remove(follower)
                if not self._followers[id]:
                    del self._followers[id]

    def see(self, seen: Seen) -> None:
        """Take a new observation."""
        self._raw = seen
        self._seen_at = time.monotonic()
        self._divide()

    def use(self, document: Document, version: int) -> None:
        """Put a policy document into force; an older version than the one in force is ignored."""
        if version < self.policy_version:
            return  # two replicas applied one each, and this one hears of the older last
        self.document = document
        self.policy_version = version
        self._divide()

    def _divide(self) -> None:
        """Put the machines into the pools of the document in force, if either is new."""
        nodes, document = self._divided
        if self._raw.nodes != nodes or self.document is not document:
            self._divided = (self._raw.nodes, self.document)
            self._machines = divide(self._raw.nodes, self.document)
            self._account((self._rows or {}).values())
        self.seen = replace(self._raw, nodes=self._machines.nodes)

    def _account(self, rows: Iterable[Workload]) -> None:
        """Count past over-quota use by the document and the machines as they are now."""
        document, machines = self.document, self._machines

        def held(row: Workload) -> Iterator[tuple[str, int]]:
            profile = document.profile(row.profile)
            for place in row.placement:
                pool = machines.pool_of(place, profile.pools if profile else ())
                if pool is not None:
                    yield pool, row.gpus

        half_life = document.settings.history_half_life
        self.accounting.use(document.policies, [p.name for p in document.pools], half_life, held, rows)

    def age(self) -> float | None:
        """Seconds since the last observation; None before the first."""
        return None if self._seen_at is None else time.monotonic() - self._seen_at

    @property
    def virtual(self) -> bool:
        """True where the GPUs are virtual."""
        return any(node.virtual for node in self.seen.nodes)

    async def rows(self) -> dict[str, Workload]:
        """Every workload that has not ended, by id; do not change it. What was committed before is in it."""
        await self._follow()
        if self._given is None:
            self._given = dict(self._rows or {})
        return self._given

    async def attended(self) -> dict[str, Workload]:
        """Those of `rows` that every cycle looks at: who may hold something, not the thousands of jobs that wait."""
        await self._follow()
        return dict(self._attended)

    async def _follow(self) -> None:
        """Read the rows once, and take in what was committed since the last time."""
        if self._rows is None:
            async with self._reading:
                if self._rows is None:
                    self.durations.add(await asyncio.to_thread(self._store.past_runs))
                    kept, at = await asyncio.to_thread(self._store.histories)
                    rows = {row.id: row for row in await asyncio.to_thread(self._store.active)}
                    self._account(rows.values())
                    self.accounting.recall(kept, self._clock() - at)
                    self._rows = rows
                    self._attended = {id: row for id, row in rows.items() if is_attended(row)}
        if self._news:
            self._given = None
            self._take(self._rows)

    def _take(self, found: dict[str, Workload]) -> None:
        """Bring the rows up to the commits that were told since."""
        taken: list[Workload] = []
        while self._news:
            for row in self._news.popleft():
                known = found.get(row.id)
                if known is not None and known.version >= row.version:
                    continue
                if row.live:
                    found[row.id] = row
                elif found.pop(row.id, None) is not None and self.durations.learn(row):
                    alike = (row.team, row.profile)
                    self._view.stale.update(w.id for w in found.values() if (w.team, w.profile) == alike)
                if is_attended(row):
                    self._attended[row.id] = row
                else:
                    self._attended.pop(row.id, None)
                taken.append(row)
                self._view.stale.add(row.id)
        self.accounting.follow(taken)

    def news(self, rows: Mapping[str, Workload], now: float, whole: bool = False) -> News:
        """Tell what changed since this was asked last; everything (`whole`), if asked for or if that is not known."""
        if rows is not self._given:
            return News(self.snapshot(rows, now), True)
        snapshot = self._snapshot(rows, now, self._view)
        changed, gone, known = self._view.news()
        if whole or not known:
            return News(replace(snapshot, workloads=self._view.workloads()), True)
        return News(snapshot, False, changed, gone)

    def snapshot(self, rows: Mapping[str, Workload], now: float, document: Document | None = None) -> Snapshot:
        """Show the engine the world; `document` other than the one in force asks what if."""
        known = self._view if document is None and rows is self._given else EngineView(self.durations)
        return replace(self._snapshot(rows, now, known, document), workloads=known.workloads())

    def _snapshot(
        self, rows: Mapping[str, Workload], now: float, known: EngineView, document: Document | None = None
    ) -> Snapshot:
        """Show everything but the workloads, which `known` then has."""
        doc = document or self.document
        machines = self._machines if document is None else divide(self._raw.nodes, document)
        known.show(rows, machines, doc, now)
        if document is None:
            policies = self.accounting.policies()
        else:
            policies = self.accounting.applied(doc.policies, doc.settings.history_half_life)
        return Snapshot(
            now=now,
            settings=doc.settings,
            pools=doc.pools,
            nodes=known.nodes_of(rows, machines),
            profiles=doc.profiles,
            policies=policies,
            workloads=(),
        )

    def sizes(self, document: Document) -> dict[str, int]:
        """GPUs (whole devices) of every pool, were this document in force."""
        return sizes(self._raw.nodes, document)


class EngineView:
    """What the engine was shown last, made anew only where it changed: `stale` are the rows that did."""

    def __init__(self, durations: Durations) -> None:
        self.durations = durations
        self.stale: set[str] = set()
        self._of: tuple[PoolAssignment, Document] | None = None
        self._workloads: dict[str, EngineWorkload] = {}
        self._nodes: tuple[PoolAssignment, tuple[Node, ...]] | None = None
        self._news: set[str] = set()
        self._known = False
        self._ends: list[tuple[float, str]] = []
        """When those who run would have ended by what is known of such work."""

    def news(self) -> tuple[list[EngineWorkload], list[str], bool]:
        """Give what changed since the last time, who is gone, and whether that is known: not the first time."""
        changed = [self._workloads[id] for id in self._news if id in self._workloads]
        gone = [id for id in self._news if id not in self._workloads]
        known, self._known = self._known, True
        self._news.clear()
        return changed, gone, known

    def show(self, rows: Mapping[str, Workload], machines: PoolAssignment, document: Document, now: float) -> None:
        """Show the rows that the engine decides about; those anew who run longer than was expected of them."""
        while self._ends and self._ends[0][0] <= now:
            self.stale.add(heapq.heappop(self._ends)[1])
        fresh = self._of is None or self._of[0] is not machines or self._of[1] is not document
        if fresh:
            self._of = (machines, document)
        for id in rows.keys() | self._workloads.keys() if fresh else self.stale:
            row = rows.get(id)
            if row is None or row.team is None:
                self._workloads.pop(id, None)
                self._news.add(id)
                continue
            shown = self._workload(row, machines, document, now)
            if shown.expected is not None and shown.started_at is not None:
                heapq.heappush(self._ends, (shown.started_at + shown.expected, id))
            if self._workloads.get(id) != shown:  # what the engine cannot see does not concern it
                self._workloads[id] = shown
                self._news.add(id)
        self.stale.clear()

    def workloads(self) -> tuple[EngineWorkload, ...]:
        """Give all that is shown."""
        return tuple(self._workloads.values())

    def _workload(self, row: Workload, machines: PoolAssignment, document: Document, now: float) -> EngineWorkload:
        """Show one row; on a divided machine it is in the pool that its profile would choose."""
        pools: tuple[str, ...] = ()
        if machines.divided and (profile := document.profile(row.profile)) is not None:
            pools = profile.pools
        return as_workload(row, lambda places: machines.placement(places, pools), self.durations.left(row, now))

    def nodes_of(self, rows: Mapping[str, Workload], machines: PoolAssignment) -> tuple[Node, ...]:
        """Show the nodes; where machines are divided among pools, they depend on what runs."""
        if machines.divided:
            return machines.as_nodes(rows.values())
        if self._nodes is None or self._nodes[0] is not machines:
            self._nodes = (machines, machines.as_nodes(()))
        return self._nodes[1]


def is_attended(row: Workload) -> bool:
    """Say whether a row holds GPUs or has a lease."""
    return row.live and (row.kind == "session" or row.state != "pending")


def _set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()
