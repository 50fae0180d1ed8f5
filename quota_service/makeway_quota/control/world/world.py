"""Keep the world as it is now: what the backend reported last, the active rows, and the policy in force.

The loop keeps it, the services read it. A change of a node or of a row touches only what belongs to it. Only
`snapshot` and `changes` turn rows and nodes into what the engine sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from ...backends.base import AttemptStatus, NodeStatus, Observation
from ...engine.snapshot import ADMITTED, Node, Snapshot, TeamQuota
from ...history.accounting import Accounting
from ...history.durations import Durations
from ...policy import Document
from ...quarantine import Quarantine
from ...store.records import Workload
from ...store.store import Store
from ..hub.people import People
from ..start_backoff import StartBackoff
from .active_rows import ActiveRows
from .checkpoint_failures import CheckpointFailures
from .clock_steps import ClockSteps
from .corrected_times import CorrectedTimes
from .engine_view import CYCLE, EngineChanges, EngineView
from .expectations import Expectations
from .followers import Follower, Followers
from .isolation import Faulty, changes_without, without
from .observation import Observed, backend_of
from .observed_requests import ObservedRequests
from .pending_changes import PendingChanges
from .pool_assignment import PoolAssignment, divide, sizes
from .workload_pods import WorkloadPods

COUNTING, DIVIDING = NODE_STEPS = ("counting its pods", "dividing it among the pools")
READING, TAKING = "reading its row", "following its row"
START_DEADLINE = 120.0
"""Seconds, by default, after which an attempt that was ordered to start and never seen counts as lost."""


class World:
    """The last observation, the active rows (read once, then followed from commit to commit) and the document."""

    failure: str | None = None
    booting: tuple[Node, ...] = ()

    def __init__(
        self,
        store: Store,
        document: Document,
        policy_version: int,
        clock: Callable[[], float] = time.time,
        start_deadline: float = START_DEADLINE,
        durable_checkpoints: Callable[[str], bool] = lambda backend: True,
        people: People | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """`durable_checkpoints`: as `Backend.has_durable_checkpoints`; `monotonic` never jumps."""
        self._store = store
        self._clock = clock
        self.document = document
        self.policy_version = policy_version
        self.cycled = False
        """whether the loop has been through a cycle, or through an observation as a follower"""
        self.quarantine = Quarantine()
        """what the steps of the cycle failed with"""
        self.observed = Observed()
        self._nodes: dict[str, NodeStatus] = {}
        """The nodes of `observed`, with what the pods of ended attempts hold."""
        self.unassigned: dict[str, tuple[tuple[str, int], ...]] = {}
        """Node to its GPUs that no pool takes, by resource."""
        self._steps = ClockSteps(clock, monotonic)
        self.times = CorrectedTimes(self._steps)
        self.requested = ObservedRequests(clock)
        self._recent: set[str] = set()
        """The rows that were taken in since the last observation."""
        self._pods = WorkloadPods(self._steps.now)
        self.assignment = PoolAssignment()
        """Which pool every GPU is in; the same object while nodes and document are."""
        self._seen_at: float | None = None
        self._active = ActiveRows()
        self.pending_changes = PendingChanges(self._active, self.observed, Expectations(start_deadline))
        self.durations = Durations()
        self.accounting = Accounting()
        self.backoff = StartBackoff()
        """How often the jobs that wait were refused, and by which nodes."""
        self.checkpoint_failures = CheckpointFailures()
        self.durable_checkpoints = durable_checkpoints
        self.has_durable_checkpoints: Callable[[Workload], bool] = lambda row: durable_checkpoints(backend_of(row))
        self.returned: set[str] = set()
        """Nodes that may take work again; the loop takes them."""
        self.people = people or People(store)
        """Who is in which team, as far as is known."""
        self._view = self._new_view()
        self._view.quarantine = self.pending_changes.quarantine = self.quarantine
        self._unfollowed: dict[str, tuple[Workload | None, Workload]] = {}
        """rows, before and after, that were committed and could not be followed"""
        self.excluded = Faulty()
        """what the last plan was made without"""
        self._followers = Followers()
        self._kept: tuple[Mapping[str, float], float] = {}, 0.0
        """The histories as they were read, and their age in seconds."""
        self._account()
        for committed in (self._active.committed, self.backoff.committed, self.checkpoint_failures.committed):
            store.on_change(committed)
        store.on_change(self._followers.committed, last=True)

    def follow(self, id: str) -> AbstractContextManager[Follower]:
        """Follow every commit that changes one workload, from now on."""
        return self._followers.follow(id)

    # What there is

    def observe(self, observation: Observation) -> None:
        """Take a new observation; only what belongs to the nodes that changed is looked at."""
        self._seen_at = time.monotonic()
        self._observe_clock()
        changes = self.observed.merge(observation)
        self.returned.update(changes.returned)
        self.pending_changes.expectations.note(observation.attempts)
        if self._active.rows is not None:
            self.requested.keep(self._active.rows)
        self._note_requests(observation.attempts, changes.changed)
        again = {
            name
            for step in NODE_STEPS
            for name in self.quarantine.names(step, "node")
            if name in self.observed.nodes and not self.quarantine.is_backing_off(step, "node", name)
        }
        self._nodes = {name: node for name, node in self._nodes.items() if name not in again} if again else self._nodes
        self._show(sorted(again.union(node.name for node in changes.changed)), changes.gone)

    def _note_requests(self, attempts: Iterable[AttemptStatus], nodes: Iterable[NodeStatus]) -> None:
        """Remember what the pods of attempts, and of sessions on nodes, request."""
        requests = [(attempt.workload, attempt.cpu, attempt.memory) for attempt in attempts]
        requests += [(pod.workload, pod.cpu, pod.memory) for node in nodes for pod in node.pods if pod.attempt is None]
        for workload, cpu, memory in requests:
            if self.requested.note(workload, cpu, memory):
                self._view.stale.add(workload)

    def _observe_clock(self) -> None:
        """Convert what was timed before the clock was set, if it was since the last observation."""
        if step := self._steps.observe():
            self._take_commits()
            rows = self._active.rows or {}
            self.times.stepped(rows.values(), step, self._recent)
            self._view.stale |= rows.keys()
            self._pods.stepped(step)
            self._show([name for name, node in self.observed.nodes.items() if node.pods or node.down_since is not None])
        self._recent.clear()

    def _show(self, names: Iterable[str], gone: Sequence[str] = ()) -> None:
        """Take these nodes as they are now, and drop those that are gone."""
        changed = []
        for name in names:
            node = self._shown_or_closed(self.observed.nodes[name])
            if self._nodes.get(name) != node:
                self._nodes[name] = node
                changed.append(node)
                self.unassigned.pop(name, None)
                if node.unassigned:
                    self.unassigned[name] = node.unassigned
        for name in gone:
            self._nodes.pop(name, None)
            self.unassigned.pop(name, None)
            self._pods.forget(name)
        names = {*gone, *(node.name for node in changed)}
        if not names:
            return
        before = self.assignment
        self._assign({node.name: node for node in changed}, gone)
        self._view.stale_hosts |= names
        moved = [name for name in names if before.pools_of(name) != self.assignment.pools_of(name)]
        rows = self._active.rows or {}
        self._follow_use({id: rows[id] for id in sorted(self._active.placed_on(moved))})

    def _divisible(self) -> tuple[NodeStatus, ...]:
        """Return the nodes without those that cannot be divided among pools at the moment."""
        excluded = self.quarantine.names(DIVIDING, "node")
        return tuple(node for name, node in self._nodes.items() if name not in excluded)

    def _assign(self, changed: Mapping[str, NodeStatus], gone: Sequence[str]) -> None:
        """Divide changed nodes among the pools; one that cannot be divided is in none."""

        def assign(names: Sequence[str]) -> None:
            self.assignment = self.assignment.changed([changed[name] for name in names], (), self.document)

        if gone:
            self.assignment = self.assignment.changed([], gone, self.document)
        self.quarantine.sort_out(DIVIDING, "node", list(changed), assign)
        for name in self.quarantine.names(DIVIDING, "node") & changed.keys():
            self.assignment = self.assignment.changed([], [name], self.document)

    def _follow_use(self, rows: Mapping[str, Workload]) -> None:
        """Count the past use of rows that changed."""

        def follow(ids: Sequence[str]) -> None:
            self.accounting.follow([rows[id] for id in ids])

        self.quarantine.sort_out("counting its use", "workload", list(rows), follow)

    def _shown_or_closed(self, status: NodeStatus) -> NodeStatus:
        """Return a node with what ended attempts hold there; where that cannot be told, nothing new starts on it."""
        with self.quarantine.guard(COUNTING, "node", status.name):
            return self._shown(status)
        return replace(status, cordoned=True)

    def _shown(self, status: NodeStatus) -> NodeStatus:
        """Return a node with what the pods of ended attempts hold there."""
        rows, active = self._active.rows, self._active
        here = [rows[id] for id in sorted(active.on_node.get(status.name, ()))] if rows and status.pods else ()
        return self._pods.shown(status, rows, here, active.nominated.values)

    def use(self, document: Document, version: int) -> None:
        """Use a policy document from now on; an older version than the one in force is ignored."""
        if version < self.policy_version:
            return
        self.document = document
        self.policy_version = version
        self.requested.clear()
        self._note_requests(self.observed.attempts.values(), self.observed.nodes.values())
        self.assignment = PoolAssignment()
        self._assign(self._nodes, ())
        self._account()
        self._follow_use(self._active.rows or {})

    def _account(self) -> None:
        """Count past over-quota use by the document in force, from no workload on."""
        document = self.document

        def held(row: Workload) -> Iterator[tuple[str, int]]:
            profile = document.profile(row.profile)
            for place in row.placement:
                pool = self.assignment.pool_of(place, profile.pools if profile else ())
                if pool is not None:
                    yield pool, row.gpus

        half_life = document.settings.history_half_life
        self.accounting.use(document.policies, [p.name for p in document.pools], half_life, held, ())

    @property
    def observation(self) -> Observation:
        """The nodes by pool; a host that is divided among pools is there once for each of them."""
        return Observation(self.assignment.nodes)

    @property
    def problem(self) -> str | None:
        """The sentence about a backend that cannot be observed at the moment; None while it can."""
        if not self.observed.synced:
            why = self.observed.problem or "they have not been read yet"
            return f"Nodes and jobs are not known, and nothing is decided: {why}."
        if self.observed.problem:
            return f"Nodes and jobs are shown as they were seen last, and nothing starts: {self.observed.problem}."
        return None

    @property
    def warnings(self) -> list[str]:
        """What is wrong with some of several backends, in sentences; all of them are `problem`."""
        return [] if self.problem else self.observed.backends.sentences(self._active.holding)

    def problem_of(self, row: Workload) -> str | None:
        """Why a workload is as it is, whatever it was told: its backend, or all of them, cannot be observed."""
        if row.state == "pending":
            return self.problem
        if row.state in ADMITTED and row.kind == "job":
            return self.observed.backends.problem_of(backend_of(row))
        return None

    def backend_of_node(self, node: str) -> str:
        """Return which of several backends has a node; "" where there is one only."""
        status = self.observed.nodes.get(node)
        return status.backend if status is not None else ""

    def backend_of_attempt(self, id: str, attempt: int) -> str:
        """Return which of several backends the present attempt of a workload was placed on; "" where not known."""
        row = (self._active.rows or {}).get(id)
        return backend_of(row) if row is not None and row.attempt == attempt else ""

    @property
    def since(self) -> int | None:
        """The version of the last observation: ask the backend for what changed after it."""
        return self.observed.version

    def age(self) -> float | None:
        """Return the seconds since the last observation; None before the first."""
        return None if self._seen_at is None else time.monotonic() - self._seen_at

    @property
    def virtual(self) -> bool:
        """Whether the GPUs are virtual."""
        return self.assignment.virtual

    def sizes(self, document: Document) -> dict[str, int]:
        """Return the GPUs (whole devices) of every pool, were this document in force."""
        return sizes(self._nodes.values(), document)

    # What was submitted

    async def rows(self) -> dict[str, Workload]:
        """Return every workload that has not ended, by id, with all commits so far: a copy that stays as it is.

        All readers share it until something changes; none may change it.
        """
        await self._follow()
        return self._active.copy()

    async def rows_as_of_now(self) -> Mapping[str, Workload]:
        """Return `rows` without a copy; for the loop alone, because the next call makes what it returned void."""
        await self._follow()
        return self._active.as_of_now()

    async def rows_of(self, teams: Sequence[str] | None, owner: str) -> list[Workload]:
        """Return those of `rows` that belong to some teams (None: all) or to `owner` ("": no one), in no order."""
        await self._follow()
        return (
            list((self._active.rows or {}).values()) if teams is None else self._active.of_teams_or_owner(teams, owner)
        )

    async def owners(self) -> set[str]:
        """Return the names that workloads which have not ended are filed under."""
        await self._follow()
        return self._active.owners()

    def held(self) -> frozenset[str]:
        """Return the pending workloads that the engine is not shown, as their owners are in their teams no more."""
        return frozenset(self._view.held)

    async def row(self, id: str) -> Workload | None:
        """Return one workload that has not ended, as it is now, or None."""
        await self._follow()
        return (self._active.rows or {}).get(id)

    async def holding(self) -> dict[str, Workload]:
        """Return those of `rows` that may hold something or have a lease, not the thousands of jobs that wait."""
        await self._follow()
        return dict(self._active.holding)

    async def placed(self) -> dict[str, Workload]:
        """Return those of `rows` that may hold something, and those that have a nomination."""
        await self._follow()
        return {**self._active.holding, **self._active.nominated}

    async def _follow(self) -> None:
        """Read the rows once, and take in what was committed since."""
        if await self._active.read(self._read):
            self._account()
            self._follow_use(self._active.rows or {})
            self.accounting.recall(*self._kept)
            self._show([node.name for node in self.observed.nodes.values() if node.pods])
        await self._read_damaged()
        self._take_commits()

    def _take_commits(self) -> None:
        """Apply what was committed since the last time."""
        taken = self._active.follow()
        self._recent.update(row.id for _, row in taken)
        for known, row in taken:
            self._view.stale.add(row.id)
            self._take(known, row)
        for known, row in [
            pair for id, pair in self._unfollowed.items() if not self.quarantine.is_backing_off(TAKING, "workload", id)
        ]:
            self._take(known, row)
        for name in self.people.take_changed():
            self._view.stale.update(row.id for row in self._active.of_teams_or_owner((), name))
        self._follow_use({row.id: row for _, row in taken})
        places = [place for pair in taken for row in pair if row for place in row.placement]
        self._show({place.node for place in places if self._has_pods(place.node)})

    def _take(self, known: Workload | None, row: Workload) -> None:
        """Apply a row that was committed; what fails is tried again."""
        self._unfollowed.pop(row.id, None)
        try:
            self._pods.note(known, row)
            if known is not None and not row.live and self.durations.learn(row):
                team = self._active.of_teams_or_owner((row.team or "",), "")
                self._view.stale.update(w.id for w in team if w.profile == row.profile)
        except Exception as error:
            self.quarantine.failed(TAKING, "workload", row.id, error)
            self._unfollowed[row.id] = known, row
        else:
            self.quarantine.passed(TAKING, "workload", row.id)

    def _has_pods(self, node: str) -> bool:
        status = self.observed.nodes.get(node)
        return status is not None and bool(status.pods)

    async def _read(self) -> list[Workload]:
        self.durations.add(await asyncio.to_thread(self._store.past_runs))
        kept, at = await asyncio.to_thread(self._store.histories)
        self._kept = kept, self._clock() - at
        rows = await asyncio.to_thread(self._store.active)
        self._note_damaged(self._store.damaged)
        self.backoff.committed(rows)
        self.checkpoint_failures.committed(rows)
        return rows

    def _note_damaged(self, damaged: Mapping[str, Sequence[str]]) -> None:
        for id, fields in damaged.items():
            self.quarantine.failed(READING, "workload", id, ValueError(f"damaged: {', '.join(fields)}"))

    async def _read_damaged(self) -> None:
        """Read rows again that could not be read as a whole, less and less often."""
        names = self.quarantine.names(READING, "workload")
        due = [id for id in sorted(names) if not self.quarantine.is_backing_off(READING, "workload", id)]
        if due:
            still = await asyncio.to_thread(self._store.read_again, due)
            self._note_damaged(still)
            for id in set(due) - still.keys():
                self.quarantine.passed(READING, "workload", id)

    # What the engine sees

    def changes(
        self, rows: Mapping[str, Workload], now: float, whole: bool = False, reader: str = CYCLE
    ) -> EngineChanges:
        """Return what changed since the reader's last call; everything, if `whole` or if that is not known."""
        if not self._active.are_current(rows):
            changes = EngineChanges(self._whole(rows, now), True)
        else:
            changes = self._view.take_changes(self._snapshot(rows, now, self._view), reader)
            if whole or changes.whole:
                changes = EngineChanges(_with(changes.snapshot, self._view), True)
        return changes if reader == CYCLE else changes_without(changes, self.excluded)

    def snapshot(self, rows: Mapping[str, Workload], now: float) -> Snapshot:
        """Return the world as the engine plans it: without what is left out."""
        return without(self._whole(rows, now), self.excluded)

    def _whole(self, rows: Mapping[str, Workload], now: float) -> Snapshot:
        known = self._view if self._active.are_current(rows) else self._new_view()
        return _with(self._snapshot(rows, now, known), known)

    def leave_out(self, faulty: Faulty) -> None:
        """Show what plans are made without to no reader but the cycle, which tries it again."""
        if faulty.reasons or self.excluded.reasons:
            self._view.reset_readers(except_for=CYCLE)
        self.excluded = faulty

    def go_on_without(self, faulty: Faulty) -> None:
        """Show what is left out now to the other readers, too, where it is less than before."""
        if faulty.taken is not self.excluded.taken:
            self.leave_out(faulty)
        self.excluded = faulty

    def proposed(
        self, rows: Mapping[str, Workload], now: float, document: Document
    ) -> Callable[[], tuple[Snapshot, PoolAssignment]]:
        """Return a function that makes the snapshot and the pools of a document that is not in force, in any thread.

        The function looks at every row and node, so it must not run on the event loop.
        """
        nodes, view = self._divisible(), self._new_view()
        policies = self.accounting.applied(document.policies, document.settings.history_half_life)

        excluded = Faulty({item: why for item, why in self.excluded.reasons.items() if item[0] in ("node", "workload")})
        excluded.stand_ins, excluded.taken = self.excluded.stand_ins, self.excluded.taken

        def make() -> tuple[Snapshot, PoolAssignment]:
            assignment = divide(nodes, document)
            view.show(rows, assignment, document, now)
            return without(_with(_plain(document, policies, now), view), excluded), assignment

        return make

    def _snapshot(self, rows: Mapping[str, Workload], now: float, view: EngineView) -> Snapshot:
        """Return everything but the workloads and nodes, which the view then has."""
        view.show(rows, self.assignment, self.document, now, self._placed_on if view is self._view else None)
        policies = self.document.policies
        with self.quarantine.step("averaging what teams borrowed"):
            policies = self.accounting.policies()
        return _plain(self.document, policies, now)

    def _new_view(self) -> EngineView:
        people, times = self.people, self.times
        view = EngineView(self.durations, self.backoff, self.has_durable_checkpoints, people, times, self.requested)
        view.show_booting(self.booting)
        return view

    def show_booting(self, nodes: Sequence[Node]) -> None:
        """Show the machines that boot to the engine, as nodes."""
        self.booting = tuple(nodes)
        self._view.show_booting(self.booting)

    def _placed_on(self, host: str) -> list[Workload]:
        rows = self._active.rows or {}
        return [rows[id] for id in sorted(self._active.on_node.get(host, ()))]


def _plain(document: Document, policies: tuple[TeamQuota, ...], now: float) -> Snapshot:
    doc = document
    return Snapshot(now=now, settings=doc.settings, pools=doc.pools, profiles=doc.profiles, policies=policies)


def _with(snapshot: Snapshot, view: EngineView) -> Snapshot:
    return replace(snapshot, nodes=view.nodes(), workloads=view.workloads())
