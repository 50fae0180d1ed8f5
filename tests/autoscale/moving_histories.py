"""Random histories of a deployment whose machines are shared by jobs, which are moved so that one can be given back.

Whether jobs of a draining machine get their notices is decided by the service's own code, from what a cycle knows at
its end. Every other rule and every fault is that of `histories`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from autoscale.agents import Job
from autoscale.fleet import EURO
from autoscale.histories import TICK, History
from makeway_quota.autoscale.demand import MachineDemand, PendingWork, PlacedWork
from makeway_quota.autoscale.deployment import MoveRules
from makeway_quota.autoscale.machine import Machine, MachineEvent
from makeway_quota.autoscale.step import MachineChanges, StepInput
from makeway_quota.control.machines.machine_notices import moving

SLOTS = {"gpu": 2, "cpu": 1}
"""Workers that a machine of a pool holds"""


class MovingHistory(History):
    """One history in which each GPU machine has room for two workers, and jobs may be moved."""

    quiet_ticks = 1000
    """more than in other histories, as its jobs run for longer"""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.chance = chance = Random(f"moves {seed}")
        self.rules = MoveRules(chance.choice((60.0, 120.0)), chance.choice((0, 0, 1)), chance.choice((1, 2)))
        kinds = tuple(
            replace(machine_type, idle_timeout=300.0, max_machines=4) for machine_type in self.deployment.types
        )
        hour = None if self.deployment.hourly_budget is None else 25 * EURO
        self.deployment = replace(self.deployment, moves=self.rules, types=kinds, max_machines=9, hourly_budget=hour)
        self.moved_at = self.now
        self.began: dict[str, float] = {}
        """when the present attempt of each job began, as the world has it"""
        self.moves: dict[str, list[float]] = {}
        self.cancelled_moves = 0
        self.answers = Random(f"answers {seed}")
        """whether the engine would start the jobs of a machine elsewhere, by chance"""

    def _submit(self) -> None:
        super()._submit()
        job = self.jobs[-1]
        job.seconds = self.chance.choice((60.0, 200.0, 200.0, 700.0, 1500.0))
        job.pool = self.chance.choice(("gpu",) * 7 + ("cpu",))
        job.workers = self.chance.choice((1, 1, 1, 1, 2)) if job.pool == "gpu" else 1

    def _pause(self) -> None:
        if self.chance.random() < 0.3:
            super()._pause()

    def _set_clock(self) -> None:
        before = self.ahead
        super()._set_clock()
        self.moved_at += self.ahead - before

    def _seen(self) -> StepInput:
        self.moved_at = max(self.moved_at, self.term_started)  # a new leader knows of no move before
        return replace(super()._seen(), moved_at=self.moved_at)

    # ── Work ────────────────────────────────────────────────────────────────

    def _free(self, pool: str) -> list[str]:
        """Return a machine for each worker that has room, the fullest machine first."""
        used = Counter(machine for job in self.jobs for machine in job.placed)
        rows = [row for row in self.store.rows.values() if row.accepts_work and row.pool == pool]
        rows.sort(key=lambda row: (-used[row.id], row.id))
        return [row.id for row in rows for _ in range(SLOTS[pool] - used[row.id])]

    def _demand(self) -> MachineDemand:
        pending, nominated = [], set()
        free = {pool: self._free(pool) for pool in SLOTS}
        for job in self._waiting():
            taken, free[job.pool] = free[job.pool][: job.workers], free[job.pool][job.workers :]
            nominated.update(taken)
            if missing := job.workers - len(taken):
                pending.append(PendingWork(job.name, (job.pool,), missing, 1000 if job.pool == "gpu" else 0))
        busy = Counter(machine for job in self.jobs for machine in set(job.placed))
        nodes = frozenset(row.id for row in self.store.rows.values() if row.state == "ready")
        placed = tuple(self._placed_work())
        return MachineDemand(tuple(pending), nodes, busy, frozenset(nominated), placed, restartable=self._restartable())

    def _restartable(self) -> frozenset[str]:
        """Return most machines: now and then a rule that only the engine knows keeps the jobs of one where they are."""
        return frozenset(name for name in sorted(self.store.rows) if self.answers.random() < 0.7)

    def _placed_work(self) -> list[PlacedWork]:
        slots = Counter[str]()
        result = []
        for job in self.jobs:
            for machine in job.placed:
                devices = (slots[machine],) if job.pool == "gpu" else ()
                slots[machine] += 1
                began, noticed = self.began[job.name] + self.ahead, job.notice_at is not None
                work = PlacedWork(job.name, machine, devices, 1000 * len(devices), attempt_started_at=began)
                result.append(
                    work._replace(movable=job.workers == 1 and not noticed, notice="give_back" if noticed else "")
                )
        return result

    def _place(self) -> None:
        before = {job.name: job.attempt for job in self.jobs}
        super()._place()
        for job in self.jobs:
            if job.attempt != before[job.name]:
                self.began[job.name] = self.true_now
        self._notice()

    def _notice(self) -> None:
        """Notify jobs that are moved, as a cycle does at its end."""
        if self.faults and self.chance.random() < 0.5:
            return  # the cycle that would do it is a later one
        rows, demand = list(self.store.rows.values()), self._demand()
        for name in moving([self.deployment], rows, {self.deployment.name: demand}):
            row = self.store.rows[name]
            told = any(job.notice_at is not None for job in self.jobs if name in job.placed)
            assert told or name in demand.restartable, self._text("jobs move that would not start again")
            for job in [job for job in self.jobs if name in job.placed and job.notice_at is None]:
                assert not any(one.pool == row.pool for one in self._waiting()), self._text(
                    "work waits, and a job moves"
                )
                self._move(job)

    def _move(self, job: Job) -> None:
        job.notice_at = self.true_now
        times = self.moves.setdefault(job.name, [])
        assert not times or self.true_now - times[-1] >= self.rules.interval, self._text(f"{job} moves again")
        times.append(self.true_now)

    def _end_jobs(self) -> None:
        super()._end_jobs()
        for job in self.jobs:
            if job.notice_at is not None and self.true_now - job.notice_at >= TICK:  # it has saved and left
                job.placed, job.notice_at = (), None

    # ── What may never happen ───────────────────────────────────────────────

    def check_commit(self, before: dict[str, Machine], changes: MachineChanges, term: int) -> None:
        super().check_commit(before, changes, term)
        for row in changes.changed:
            old = before[row.id]
            if row.state == "draining" and row.drain == "move" and old.drain != "move":
                self._check_move(row)
            elif old.drain == "move" and row.state == "ready":
                self.cancelled_moves += 1

    def _check_move(self, row: Machine) -> None:
        """Check a machine that begins to be emptied."""
        assert self.now - self.moved_at >= self.rules.interval, self._text("moves are too close to each other")
        self.moved_at = self.now
        jobs = [job for job in self.jobs if row.id in job.placed]
        assert 0 < len(jobs) <= self.rules.max_jobs, self._text(f"{len(jobs)} jobs move")
        assert all(job.workers == 1 for job in jobs), self._text("a gang moves")
        assert row.id in self.demand.restartable, self._text("jobs would move that would not start again")
        young = [job for job in jobs if self.true_now - self.began[job.name] < self.rules.interval]
        assert not young, self._text(f"young jobs move: {young}")
        others = [one for one in self.store.rows.values() if one.pool == row.pool and one.id != row.id]
        assert not any(one.starting for one in others), self._text("a job moves while a machine boots")
        assert not any(work.pools == (row.pool,) for work in self.demand.pending), self._text("work waits")
        free = sum(SLOTS[row.pool] - self._used(one) for one in others if one.accepts_work and self._used(one))
        assert free >= len(jobs) + self.rules.free_gpus, self._text("the jobs have no room elsewhere")

    def _used(self, row: Machine) -> int:
        return sum(job.placed.count(row.id) for job in self.jobs)

    def _spot_loss(self) -> None:
        """Take back, often, a machine that is being emptied."""
        moved = [row for row in self.store.rows.values() if row.drain == "move" and row.instance in self.agents]
        if moved and self.chance.random() < 0.5:
            row = self.chance.choice(moved)
            if row.instance in self.provider.running():
                self.reports.append((row.id, MachineEvent("spot_notice", deadline=self.now + 60)))
                self.provider.instances[row.instance].ended_at = self.true_now + 60
                return
        super()._spot_loss()
