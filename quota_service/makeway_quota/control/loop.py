"""Observe, reconcile, plan, apply, actuate, and again: the one writer of decisions.

A cycle is level-triggered: any number of wake-ups collapse into one, and a cycle over an unchanged world changes
nothing. Every decision is in the store before it is actuated, and orders follow from the stored change sets
alone, so that a service killed between any two lines converges when it is started again. Only the leader runs cycles;
a follower observes, so that its pages show the nodes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from ..backends.base import BackendError, Observation, Phase
from ..engine.plan import Demand
from ..metrics import CYCLE_SECONDS, LEADER, count_decisions
from ..quarantine import concerns_all
from ..store.errors import LeadershipLost, NotLeading, StoreError
from ..store.records import NewDecision, Workload
from ..wording import Names
from .actuate import Actuator, StartResults
from .change_set import ChangeSet
from .components import Components
from .decisions import change_set_of, excluded, explain_excluded
from .garbage import collect_less
from .hub.membership import holds, is_new
from .machines.machine_loop import MachineLoop
from .planner import Planner
from .reason_throttle import CATCH_UP, Explaining, ReasonThrottle
from .reconcile import note_launched, reconcile
from .restarting_tasks import is_cancelled
from .time_limits import TimeLimits
from .world.names import names_of

log = logging.getLogger("makeway.loop")

WRITING = "writing its changes"

MIN_CYCLE_SECONDS = 0.01
"""Seconds from one cycle to the next: what happens within them is decided together."""

MAX_REST_SECONDS = 0.25
"""Seconds between two cycles, at most. A cycle is followed by a rest as long as itself, in which requests have the
processor for themselves: on a busy machine fewer cycles decide more each. A person who waits for a session ends it."""

CHANGES_PER_COMMIT = 200
"""Changes of a plan that are written and actuated together: where hundreds start at once, the first need not wait for
the last to be written."""

DRAIN_SECONDS = 30.0
"""Seconds after which a follower drops what was collected for a cycle."""

MAX_ROUNDS = 5
"""Cycles in a row without a pause, while each one changes something."""


class Loop:
    """The control loop: woken by requests, by the backend and by other replicas, at least every `tick` seconds."""

    def __init__(self, parts: Components) -> None:
        self.store = parts.store
        self.backend = parts.backend
        self.world = parts.world
        self.leases = parts.leases
        self.leader = parts.leader
        self.servers = parts.servers
        self.feed = parts.feed
        self.gate = parts.gate
        self.progress = parts.progress
        self.actuator = Actuator(parts.store, parts.backend, parts.leader, parts.servers, parts.world.backoff)
        self.leases.quarantine = parts.world.quarantine
        self.actuator.quarantine = parts.world.quarantine
        parts.channel.quarantine = parts.world.quarantine
        if parts.machines is not None:
            parts.machines.quarantine = parts.world.quarantine
        if parts.servers is not None:
            parts.servers.quarantine = parts.world.quarantine
        parts.backend.quarantine_in(parts.world.quarantine)
        self.machine_loop: MachineLoop | None = None
        """takes what each cycle knows of the work, where there are deployments"""
        self._demand: tuple[Demand, ...] | None = None
        """of the plan of this cycle; None where there was none"""
        self.tick = parts.settings.tick_seconds
        self.max_infra_failures = parts.settings.max_failures_lost
        self.clock = parts.clock
        self._threads = parts.threads
        self.term: int | None = None
        """the term that the last cycle was run in, None while this replica follows"""
        self.cycles = 0
        self.last_cycle_at: float | None = None
        self._not_before = 0.0
        self.limits = self._new_limits()
        self._planner = Planner(parts.world, parts.threads)
        self._reasons = ReasonThrottle(quarantine=parts.world.quarantine)
        self._explaining = Explaining()
        self._wake = asyncio.Event()
        self._at_once = asyncio.Event()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._drained_at = 0.0

    def wake(self) -> None:
        """Request a cycle soon; may be called from any thread, any number of times."""
        loop = self._loop
        if loop is not None and not loop.is_closed() and not self._woken:
            self._woken = True  # until the next cycle begins to observe
            loop.call_soon_threadsafe(self._wake.set)

    def wake_at_once(self) -> None:
        """Request a cycle without the rest before it: a person waits for what it decides."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._at_once.set)
        self.wake()

    def stop(self) -> None:
        """End `run` after the cycle under way."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run cycles until stopped. A cycle that fails is logged, shown by `/readyz`, and repeated a second later."""
        self._loop = asyncio.get_running_loop()
        collect_less()
        self.backend.on_change(self.wake)
        self._wake.set()
        while not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            await self._rest()
            if self._stopping:
                break
            self._woken = False
            self._wake.clear()
            try:
                await self._once()
                self.world.failure, self.world.cycled = None, True
            except LeadershipLost as error:
                self.leader.step_down(str(error), error.term)
            except NotLeading as error:
                log.warning("A cycle was broken off: %s", error)
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise
                log.exception("A cycle failed; it is repeated")
                self.world.failure = f"{type(error).__name__}: {error}"
                await asyncio.sleep(1.0)
                self._wake.set()

    def _pause(self) -> float:
        """Return the seconds until the next cycle, if nothing wakes the loop before."""
        due = (
            CATCH_UP if self._reasons.behind else None,
            self._explaining.wait(),
            self.actuator.retries.due(),
            self.limits.wait(),
            self.world.quarantine.due(),
        )
        return min(self.tick, *(self.tick if seconds is None else seconds for seconds in due))

    async def _once(self) -> None:
        """Run cycles as the leader, else observe as a follower."""
        term = self.leader.term
        if term is None or self.leader.hand_over():
            await self.follow()
            return
        if term != self.term:
            await self.take_over(term)
        await self.converge()

    async def take_over(self, term: int) -> None:
        """Begin a term: read everything that was committed before, and forget what an earlier term had in memory."""
        if self.feed is not None:
            await self.feed.catch_up()
        await self.world.people.load()
        self._planner.restart()
        self._reasons, self._explaining = ReasonThrottle(quarantine=self.world.quarantine), Explaining()
        self.world.pending_changes.resync()
        self.actuator.begin_term(term)
        self.limits = self._new_limits()
        self.leases.restart()
        self.term = term
        LEADER.set(1)

    async def follow(self) -> None:
        """Observe without acting, where observing changes nothing, and drop what only a cycle would use."""
        self.term = None
        self.world.show_booting(())  # which machines boot is known to the leader only
        LEADER.set(0)
        self._reasons.behind, self._explaining = False, Explaining()
        self.actuator.retries.keep(())
        if self.servers is not None:
            self.servers.stop({})
        if self.backend.shared:
            self.world.observe(await self.backend.observe(self.world.since))
        rows = await self.world.rows_as_of_now()
        if time.monotonic() - self._drained_at > DRAIN_SECONDS:
            self._drained_at = time.monotonic()
            self.world.changes(rows, self.clock())
            self.world.pending_changes.resync()
            self.world.pending_changes.rows()
            self.world.pending_changes.end_cycle()
        self.cycles += 1
        self.last_cycle_at = time.monotonic()

    async def converge(self) -> None:
        """Run cycles until nothing changes any more (at most MAX_ROUNDS times)."""
        for _ in range(MAX_ROUNDS):
            with self.gate.closed():
                changed = await self.cycle(self._explaining.due())
            if not changed:
                return
            await self._rest()
        self._wake.set()

    async def _rest(self) -> None:
        """Wait until the next cycle may begin, or is requested at once."""
        remaining = self._not_before - time.monotonic()
        if remaining > 0 and not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._at_once.wait()

    async def cycle(self, explain: bool = True) -> bool:
        """Observe, reconcile, plan, apply, actuate and record once; return whether the store changed.

        Without `explain` the reasons of workloads that wait stay as they are, for a later cycle.
        """
        began_at, observed_at = time.perf_counter(), time.monotonic()
        self._demand = None
        self._at_once.clear()
        started = StartResults()
        now = await self._observe()
        changed = await self._reconcile(now)
        change_set, plan_error = await self._plan(now, explain)
        changed |= await self._apply(change_set, started, now)
        changed |= await self._actuate(started, now)
        await self._report_demand(observed_at)
        await self._record(now)
        if plan_error is not None:
            raise plan_error
        self._end_cycle(time.perf_counter() - began_at)
        return changed

    async def _observe(self) -> float:
        """Read nodes and attempts back from the backend; return the time that this cycle decides at."""
        self.world.observe(await self.backend.observe(self.world.since))
        return self.clock()

    async def _reconcile(self, now: float) -> bool:
        """Write what became of attempts, time limits and leases; return whether the store changed."""
        pending_changes, quarantine = self.world.pending_changes, self.world.quarantine
        rows = await self.world.rows_as_of_now()
        observation = pending_changes.observation(now)
        if ended := [status.workload for status in observation.attempts if status.phase in (Phase.EXITED, Phase.LOST)]:
            await self._write_progress(ended)
        reconciled, overdue, expired = self._reconciled(rows, observation, now), ChangeSet(), ChangeSet()
        note_launched(reconciled, pending_changes.launch_times_to_store(now))
        with quarantine.step("keeping to time limits"):
            overdue = self.limits.overdue(rows, observation.attempts, self.world.observed.attempts, now)
        with quarantine.step("ending leases"):
            expired = self.leases.reconcile((await self.world.holding()).values(), now)
        changed = False
        for change_set in (reconciled, overdue, expired):
            changed |= await self._commit(change_set, now)
        with quarantine.step("trying jobs again where nodes came back"):
            changed |= await self._retry_on_returned(now)
        return changed

    async def _write_progress(self, ended: Sequence[str]) -> None:
        """Write how far jobs are before it is known that they ended: cards and pages end with that state."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self.progress.write, ended)
        except StoreError as error:
            log.warning("How far jobs were that have ended is written later: %s", error)

    async def _apply(self, change_set: ChangeSet, started: StartResults, now: float) -> bool:
        """Write what was decided, and start each part of it at once; return whether the store changed."""
        changed = await self._apply_parts(change_set, started, now)
        with self.world.quarantine.step("holding work of people who left their teams"):
            changed |= await self._hold(await self.world.rows_as_of_now(), now)
        return changed

    async def _actuate(self, started: StartResults, now: float) -> bool:
        """Send all other orders that follow from the store; return whether it changed by what was refused."""
        pending_changes = self.world.pending_changes
        rows = await self.world.holding()  # with the commits so far
        started.not_to_start = pending_changes.not_to_start(now)
        failed = await self.actuator.actuate(
            pending_changes.rows(), pending_changes.observation(now), now, started, self._names(rows)
        )
        pending_changes.expect_starts(now, started.postponed)
        changed = await self._commit(failed, now)
        await self._commit(started.reasons, now)
        return changed

    async def _report_demand(self, observed_at: float) -> None:
        """Report what this cycle knows of the work that machines are for."""
        if (machines := self.machine_loop) is None or not machines.active or self._demand is None:
            return
        known = await machines.known(self.world, self._demand, observed_at, now := self.clock())
        if await self._commit(machines.notices(known, now), now):
            self.wake()  # the next cycle orders what was noticed
        machines.planned(known, self.term)

    async def _record(self, now: float) -> None:
        """Write what was measured, and forget what this cycle looked at."""
        await self._write_borrowed(now)
        self.world.pending_changes.end_cycle()
        self.world.quarantine.tidy()

    def _end_cycle(self, duration: float) -> None:
        """Count a cycle of `took` seconds, and set when the next one may begin."""
        self.cycles += 1
        self.last_cycle_at = time.monotonic()
        self._not_before = self.last_cycle_at + min(MAX_REST_SECONDS, max(MIN_CYCLE_SECONDS - duration, duration))
        CYCLE_SECONDS.observe(duration)

    async def _plan(self, now: float, explain: bool) -> tuple[ChangeSet, Exception | None]:
        """Return what the engine decides, or why it decides nothing: what was decided before is carried out anyway."""
        rows = await self.world.rows_as_of_now()
        if not (self.world.observed.synced and (self.machine_loop is None or self.machine_loop.may_plan(self.world))):
            return ChangeSet(), None  # without its nodes, or those that boot, the engine would give away what is kept
        try:
            return await self._plan_changes(rows, now, explain), None
        except Exception as error:
            if concerns_all(error):
                raise
            return ChangeSet(), error

    async def _plan_changes(self, rows: Mapping[str, Workload], now: float, explain: bool) -> ChangeSet:
        """Return what the engine decides."""
        planned_at = time.perf_counter()
        self._planner.demand = (machines := self.machine_loop) is not None and machines.prepare(self.world)
        plan = await self._planner.plan(rows, now, explain)
        if machines is not None:
            self._demand = plan.demand
            plan = machines.explained(plan) if explain else plan
        self._forget_absent(rows)
        change_set = change_set_of(
            plan,
            rows,
            now=now,
            lease_seconds=self.leases.seconds,
            reasons=self._reasons,
            names=self._names(rows),
            explained=explain,
            quarantine=self.world.quarantine,
            backend_of=self.world.backend_of_node,
        )
        if self.world.excluded.reasons:
            explain_excluded(change_set, excluded(self.world.excluded, rows), rows, self.world.quarantine)
        if explain:
            self._explaining.done(time.perf_counter() - planned_at)
        else:
            self._explaining.skipped()
        return change_set

    async def _apply_parts(self, change_set: ChangeSet, started: StartResults, now: float) -> bool:
        """Commit a plan part by part, and start what each part starts; return whether the store changed."""
        changed = False
        for part in change_set.parts(CHANGES_PER_COMMIT):
            if await self._commit(part, now):
                changed = True
                rows = await self.world.holding()
                await self.actuator.start([rows[c.workload] for c in part.changes if c.workload in rows], now, started)
        return changed

    async def _hold(self, rows: Mapping[str, Workload], now: float) -> bool:
        """Hold pending work of people who left its team; return whether the store changed.

        Another replica may have heard last of its owners, so that what is known of them is read before.
        """
        people, document = self.world.people, self.world.document
        if any(is_new(rows.get(id)) for id in self.world.held()):
            await people.load()
        held = [id for id in self.world.held() if (row := rows.get(id)) is not None and people.excludes(row, document)]
        changed = False
        for part in holds(rows, held, people, self._names(rows), now, self.world.quarantine).parts(CHANGES_PER_COMMIT):
            changed |= await self._commit(part, now)
        return changed

    async def _retry_on_returned(self, now: float) -> bool:
        """Have jobs in backoff tried soon where nodes came back; return whether the store changed."""
        returned, change_set = set(self.world.returned), ChangeSet()
        if returned:
            rows, quarantine = await self.world.rows_as_of_now(), self.world.quarantine
            for change in self.world.backoff.wake(rows, returned, now, quarantine):
                change_set.add(*change)
        woken = await self._commit(change_set, now)
        self.world.returned -= returned
        return woken

    def _new_limits(self) -> TimeLimits:
        limits = TimeLimits(self.backend.reports_begin)
        limits.quarantine = self.world.quarantine
        return limits

    def _forget_absent(self, rows: Mapping[str, Workload]) -> None:
        quarantine = self.world.quarantine
        if quarantine.size:
            reported = {workload for workload, _ in self.world.observed.attempts}
            quarantine.keep("workload", lambda id: id in rows or id in reported)
            quarantine.keep("node", lambda name: name.partition("/")[0] in self.world.observed.nodes)
            quarantine.keep("team", lambda name: self.world.document.policy(name) is not None)
            quarantine.keep("pool", lambda name: any(pool.name == name for pool in self.world.document.pools))
            quarantine.keep("profile", lambda name: self.world.document.profile(name) is not None)

    async def _commit(self, change_set: ChangeSet, now: float) -> bool:
        """Commit changes; where one of them cannot be written, the others are; return whether the store changed."""
        if backing_off := self.world.quarantine.backing_off((WRITING,), "workload"):
            kept = [change for change in change_set.changes if change.workload not in backing_off]
            decisions = [decision for decision in change_set.decisions if decision.workload not in backing_off]
            change_set = ChangeSet(kept, decisions)
        return await self._commit_parts(change_set, now)

    async def _commit_parts(self, change_set: ChangeSet, now: float) -> bool:
        try:
            return await self._write(change_set, now)
        except Exception as error:
            if concerns_all(error):
                raise
            if len(change_set.changes) < 2:
                for change in change_set.changes:
                    self.world.quarantine.failed(WRITING, "workload", change.workload, error)
                if not change_set.changes:
                    raise
                return False
        parts = list(change_set.parts((len(change_set.changes) + 1) // 2))
        return any([await self._commit_parts(part, now) for part in parts])

    async def _write(self, change_set: ChangeSet, now: float) -> bool:
        if not change_set.changes and not change_set.decisions:
            return False
        commit = partial(self.store.commit, change_set.changes, change_set.decisions, now=now, term=self.term)
        applied = await asyncio.get_running_loop().run_in_executor(self._threads, commit)
        with self.world.quarantine.step("counting decisions"):
            count_decisions(d for d in change_set.decisions if d.workload is None or d.workload in applied)
        self._publish_events(d for d in change_set.decisions if d.workload in applied)
        for id in self.world.quarantine.names(WRITING, "workload") & applied:
            self.world.quarantine.passed(WRITING, "workload", id)
        return bool(applied)

    def _publish_events(self, decisions: Iterable[NewDecision]) -> None:
        """Show how attempts ended that did not succeed, where people look at their machines."""
        for decision in decisions:
            number = decision.numbers.get("attempt")
            if decision.workload and number and decision.verb != "finish":
                with self.world.quarantine.guard("publishing an event", "workload", decision.workload):
                    self.backend.publish_event((decision.workload, number), decision.code, decision.message)

    def _names(self, rows: Mapping[str, Workload]) -> Names:
        return names_of(self.world.document.policies, rows, self.world.document)

    def _reconciled(
        self, rows: Mapping[str, Workload], observation: Observation, now: float, *, stopping: bool = False
    ) -> ChangeSet:
        return reconcile(
            rows,
            observation,
            now=now,
            max_infra_failures=self.max_infra_failures,
            names=self._names(rows),
            document=self.world.document,
            durable=self.world.has_durable_checkpoints,
            backoff=self.world.backoff,
            stopping=stopping,
            times=self.world.times,
            quarantine=self.world.quarantine,
        )

    async def _write_borrowed(self, now: float, at_once: bool = False) -> None:
        """Write what was borrowed, where it is not what the last value has decayed to."""
        with self.world.quarantine.step("writing what teams borrowed"):
            milli = self.world.accounting.unwritten(at_once)
            if milli is not None:
                keep = partial(self.store.keep_histories, milli, now=now, term=self.term)
                await asyncio.get_running_loop().run_in_executor(self._threads, keep)

    async def close(self, *, stop_jobs: bool) -> None:
        """Close the backend; a leader with `stop_jobs` waits until the jobs have saved, and records how they ended."""
        is_leader = self.term is not None and self.leader.term == self.term
        try:
            await self.backend.close(stop_jobs=stop_jobs and is_leader)
            if stop_jobs and is_leader:
                observation = await self.backend.observe()
                rows = await self.world.rows()
                now = self.clock()
                await self._commit(self._reconciled(rows, observation, now, stopping=True), now)
                await self.world.rows()
            if is_leader:
                await self._write_borrowed(self.clock(), at_once=True)
        except (BackendError, NotLeading, OSError) as error:
            log.warning("Stopping the jobs did not go as it should: %s", error)
