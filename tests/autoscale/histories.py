"""Random histories of a deployment: work, agents, a faulty provider and leaders that die, on a clock of their own.

`History.play` checks after every commit and call what may never happen, and at the end that all work is done and no
machine is left. The world is as the service will be: a scheduler that places work only on rows that accept it, agents
that report what they run, a leader that may be killed between a commit and its calls, and a deposed one that wakes up
and makes its calls late.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

from autoscale.agents import Agent, Job
from autoscale.fleet import EURO, START
from makeway_quota.autoscale.demand import MachineDemand, PendingWork
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.autoscale.instances import InstanceList
from makeway_quota.autoscale.machine import STARTING, Machine, MachineEvent
from makeway_quota.autoscale.provider import ProviderError
from makeway_quota.autoscale.providers.memory import MemoryProvider
from makeway_quota.autoscale.step import MachineChanges, ProviderCall, StepInput, StepLeader, answer, step
from makeway_quota.simulate.memory import MemoryMachineStore

HISTORIES = int(os.environ.get("HISTORIES", "60"))
"""`make test` plays 200, which are PARTS * HISTORIES // 6; `make invariants` 10,000."""
TICK = 20.0
SLACK = 6 * TICK


class CheckedStore(MemoryMachineStore):
    """A store that checks each commit before it is made."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history

    def commit(self, deployment: str, term: int, changes: MachineChanges) -> bool:
        before = dict(self.rows)
        done = super().commit(deployment, term, changes)
        if done:
            self.history.check_commit(before, changes, term)
        return done


class History:
    """One history; the seed decides all of it."""

    quiet_ticks = 400
    """ticks, at most, until all is done when no more faults happen: about 2 hours of back-offs and boots"""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.seed = seed
        self.true_now = START  # as the world has it
        self.ahead = 0.0  # by which the service's clock differs
        self.step_pending = 0.0
        kinds = [
            MachineType(
                "cheap", "gpu", "cheap-2", gpus=2, zones=("a", "b"), price=2 * EURO, spot_price=EURO,
                market=random.choice(("on_demand", "spot", "spot_first")), max_machines=random.randint(2, 4),
                idle_timeout=random.choice((60.0, 300.0)), spin_up_timeout=600.0, max_age=random.choice((None, 900.0)),
            ),
            MachineType(
                "dear", "gpu", "dear-2", gpus=2, price=5 * EURO, max_machines=random.randint(2, 4),
                idle_timeout=random.choice((60.0, 600.0)), spin_up_timeout=900.0,
            ),
            MachineType(
                "cpu", "cpu", "cpu-8", price=EURO // 2, max_machines=2, idle_timeout=120.0, spin_up_timeout=600.0
            ),
        ]  # fmt: skip
        self.deployment = Deployment(
            "cloud", "memory", tuple(kinds), hourly_budget=random.choice((None, 11 * EURO, 16 * EURO)),
            max_machines=random.randint(3, 7), drain_timeout=120.0,
        )  # fmt: skip
        self.store = CheckedStore(self)
        self.provider = MemoryProvider(lambda: self.true_now)
        self.provider.ignores_tokens = random.random() < 0.2
        self.agents: dict[str, Agent] = {}
        self.jobs: list[Job] = []
        self.faults = True
        self.term_started = self.now
        self.down_until = 0.0
        self.late: list[tuple[float, ProviderCall]] = []
        self.reports: list[tuple[str, MachineEvent]] = []
        self.demand = MachineDemand()
        self.ids = 0
        self.idle_for: dict[str, float] = {}
        self.orphan_for: dict[str, float] = {}
        self.heard: dict[str, float] = {}
        self.unanswered_for: dict[str, float] = {}
        self.weather: dict[str, float] = {}
        """until when the provider does one thing wrong all the time"""
        self.launched_late: set[str] = set()

    @property
    def now(self) -> float:
        """The service's clock."""
        return self.true_now + self.ahead

    # ── The world ───────────────────────────────────────────────────────────

    def play(self, ticks: int = 60) -> None:
        for _ in range(ticks):
            self._tick()
        self._calm()
        for _ in range(self.quiet_ticks):
            self._tick()
            if self._finished():
                break
        unfinished = [job for job in self.jobs if not job.done]
        assert not unfinished, self._text(f"jobs never end: {unfinished}")
        assert not self.store.rows, self._text(f"rows are left: {list(self.store.rows.values())}")
        assert not self.provider.running(), self._text("instances are left")
        self._check_money()

    def _finished(self) -> bool:
        return all(job.done for job in self.jobs) and not self.store.rows and not self.provider.running()

    def _calm(self) -> None:
        self.faults = False
        self.weather = {}
        self.deployment = replace(self.deployment, paused=False)
        provider = self.provider
        provider.stock_out = set()
        provider.busy = provider.lost_before = provider.lost_after = 0
        provider.denied = provider.partial = provider.empty = False
        provider.stale = provider.delay = provider.end_delay = 0.0
        for one in provider.instances.values():
            if one.ended_at is not None:
                one.ended_at = min(one.ended_at, self.true_now)
        for agent in self.agents.values():
            agent.cut_until = 0.0

    def _tick(self) -> None:
        self.true_now += TICK
        if self.faults:
            self._happen()
        self._wake_late_calls()
        self._agents()
        if self.true_now >= self.down_until:
            self._lead()
        self._check_world()

    def _happen(self) -> None:
        random, provider = self.random, self.provider
        for chance, event in (
            (0.25, self._submit), (0.03, self._cancel), (0.08, self._change_stock), (0.05, self._spot_loss),
            (0.04, self._partition), (0.03, self._set_clock), (0.02, self._restart), (0.01, self._pause),
        ):  # fmt: skip
            if random.random() < chance:
                event()
        provider.busy = random.choice((0, 0, 0, 0, 0, 1, 2, 5))
        provider.lost_after = random.choice((0, 0, 0, 0, 1))
        provider.lost_before = random.choice((0, 0, 0, 0, 0, 1))
        for trouble in ("partial", "empty", "silent", "denied"):
            if random.random() < 0.01:
                self.weather[trouble] = self.true_now + random.choice((60, 200, 600))
        provider.lost_before = 100 if self._rages("silent") else provider.lost_before
        provider.partial = random.random() < 0.1 or self._rages("partial")
        provider.empty = random.random() < 0.1 or self._rages("empty")
        provider.stale = random.choice((0, 0, 0, 30, 150))
        provider.delay = random.choice((0, 0, 40, 140))
        provider.end_delay = random.choice((0, 0, 60, 200))
        provider.denied = random.random() < 0.02 or self._rages("denied")

    def _rages(self, trouble: str) -> bool:
        return self.weather.get(trouble, 0.0) > self.true_now

    def _submit(self) -> None:
        pool = self.random.choice(("gpu", "gpu", "cpu"))
        workers = self.random.choice((1, 1, 1, 2))
        self.jobs.append(Job(f"job-{len(self.jobs)}", pool, workers, self.random.choice((60.0, 200.0, 700.0))))

    def _cancel(self) -> None:
        running = [job for job in self.jobs if not job.done]
        if running:
            job = self.random.choice(running)
            job.done, job.placed = True, ()

    def _change_stock(self) -> None:
        every = [
            (machine_type.instance_type, zone, market)
            for machine_type in self.deployment.types
            for zone in machine_type.zones
            for market in ("spot", "on_demand")
        ]
        self.provider.stock_out = {one for one in every if self.random.random() < 0.4}

    def _spot_loss(self) -> None:
        running = sorted(self.provider.running())
        if not running:
            return
        instance = self.random.choice(running)
        agent = self.agents.get(instance)
        if agent is not None and agent.joined and self.random.random() < 0.4:
            self.reports.append((agent.machine, MachineEvent("spot_notice", deadline=self.now + 60)))
            self.provider.instances[instance].ended_at = self.true_now + 60
        else:
            self.provider.interrupt(instance, stop=self.random.random() < 0.3)

    def _partition(self) -> None:
        if self.agents:
            agent = self.random.choice(list(self.agents.values()))
            agent.cut_until = self.true_now + self.random.choice((20, 60, 200, 10_000))

    def _set_clock(self) -> None:
        if self.true_now >= self.down_until:  # a leader notices it
            seconds = self.random.choice((-3600.0, -40.0, 40.0, 3600.0))
            self.ahead += seconds
            self.step_pending += seconds
            self.term_started += seconds

    def _restart(self) -> None:
        self.store.term += 1
        self.down_until = self.true_now + self.random.choice((0, 40, 400))

    def _pause(self) -> None:
        self.deployment = replace(self.deployment, paused=not self.deployment.paused)

    def _wake_late_calls(self) -> None:
        due = [one for one in self.late if one[0] <= self.true_now]
        self.late = [one for one in self.late if one[0] > self.true_now]
        for _, call in due:
            before = set(self.provider.instances)
            self._call(call)
            self.launched_late |= set(self.provider.instances) - before

    def _call(self, call: ProviderCall) -> object:
        if call.kind == "terminate":
            self._check_end(call)
        return call.make(self.provider)

    # ── Agents ──────────────────────────────────────────────────────────────

    def _agents(self) -> None:
        running = self.provider.running()
        for instance in list(self.agents):
            if instance not in running or running[instance].state(self.true_now) == "stopped":
                del self.agents[instance]
        for instance, one in running.items():
            if instance not in self.agents and one.state(self.true_now) == "running":
                self._boot(instance, one.machine)
        for agent in self.agents.values():
            if self.true_now >= agent.joins_at and self.true_now >= agent.cut_until:
                self._report(agent)

    def _boot(self, instance: str, machine: str) -> None:
        random = self.random
        trouble = random.random() if self.faults else 1.0
        delay = 1e12 if trouble < 0.05 else random.choice((40.0, 120.0, 300.0, 540.0))
        wrong = 1 if 0.10 < trouble < 0.13 else None
        joins = self.provider.instances[instance].launched_at + delay
        self.agents[instance] = Agent(instance, machine, joins, 0.05 < trouble < 0.10, wrong)

    def _report(self, agent: Agent) -> None:
        row = self.store.rows.get(agent.machine)
        if row is None or (row.instance is not None and row.instance != agent.instance):
            return
        boot = f"boot-{agent.instance}"
        if not agent.joined:
            agent.joined = True
            self._say(agent, "joined", boot=boot, instance=agent.instance)
        if row.state == "joining" and row.boot == boot:
            if agent.init_fails:
                self._say(agent, "init_failed", boot=boot)
            else:
                self._say(agent, "initialised", boot=boot, gpus=row.gpus if agent.gpus is None else agent.gpus)
        wanted = {(job.name, job.attempt): job for job in self.jobs if row.id in job.placed and row.boot == boot}
        agent.attempts = {key for key in agent.attempts & wanted.keys() if not self._ended(wanted[key], row.id)}
        self._say(agent, "heard", boot=boot, attempts=len(agent.attempts))
        late = self.faults and self.random.random() < 0.5
        for key, job in () if late else wanted.items():  # its orders come after the report
            job.started.setdefault(row.id, self.true_now)
            if not self._ended(job, row.id):
                agent.attempts.add(key)

    def _ended(self, job: Job, machine: str) -> bool:
        return machine in job.started and self.true_now - job.started[machine] >= job.seconds

    def _say(self, agent: Agent, kind: object, **fields: object) -> None:
        if self.true_now >= self.down_until:
            self.heard[agent.machine] = self.true_now
            self.reports.append((agent.machine, MachineEvent(kind, at=self.now, **fields)))  # type: ignore[arg-type]
        elif kind == "joined":
            agent.joined = False  # refused: it tries again

    # ── The service ─────────────────────────────────────────────────────────

    def _lead(self) -> None:
        if self.down_until:
            self.down_until, self.term_started = 0.0, self.now
            self.reports = [one for one in self.reports if one[1].kind == "spot_notice"]
        self._end_jobs()
        seen = self._seen()
        for _ in range(4):
            result = step(
                self.store, self.deployment, seen, StepLeader(self.store.term, self._new_id, lambda: self.now)
            )
            if not result.committed:
                return
            self.step_pending = 0.0
            if self.faults and result.calls and self.random.random() < 0.05:
                self._kill(result.calls)
                return
            answers = [(call, self.now, self._call(call)) for call in result.calls]
            answer(self.store, self.deployment, answers, self.store.term, self.now)  # type: ignore[arg-type]
            if not any(isinstance(results, ProviderError) and results.certain for _, _, results in answers):
                break
            seen = replace(seen, lists=(), reports=(), clock_step=0.0)
        self._place()
        self._fence()

    def _kill(self, calls: tuple[ProviderCall, ...]) -> None:
        """Depose the leader between commit and calls: they are never made, or late, when others lead."""
        if self.random.random() < 0.5:
            wakes = self.true_now + self.random.choice((20, 90, 1500))
            self.late += [(wakes, call) for call in calls]
        self._restart()

    def _new_id(self) -> str:
        self.ids += 1
        return f"m-{self.ids:04}"

    def _seen(self) -> StepInput:
        lists: tuple[InstanceList, ...] = ()
        try:
            lists = (self.provider.list("cloud", self.now),)
        except ProviderError:
            lists = ()
        self.demand = self._demand()
        reports, self.reports = tuple(self.reports), []
        return StepInput(
            self.now,
            self.term_started,
            self.demand,
            lists,
            reports,
            frozenset(),
            self.step_pending,
        )

    def _free(self, pool: str) -> list[str]:
        used = {machine for job in self.jobs for machine in job.placed}
        return sorted(
            row.id for row in self.store.rows.values() if row.accepts_work and row.pool == pool and row.id not in used
        )

    def _waiting(self) -> list[Job]:
        return [job for job in self.jobs if not job.done and not job.placed]

    def _demand(self) -> MachineDemand:
        pending, nominated = [], set()
        free = {pool: self._free(pool) for pool in ("gpu", "cpu")}
        for job in self._waiting():
            taken, free[job.pool] = free[job.pool][: job.workers], free[job.pool][job.workers :]
            nominated.update(taken)
            if missing := job.workers - len(taken):
                pending.append(PendingWork(job.name, (job.pool,), missing, 2000 if job.pool == "gpu" else 0))
        busy = {machine: 1 for job in self.jobs for machine in job.placed}
        nodes = frozenset(row.id for row in self.store.rows.values() if row.state == "ready")
        return MachineDemand(tuple(pending), nodes, busy, frozenset(nominated))

    def _place(self) -> None:
        for job in self._waiting():
            free = self._free(job.pool)
            if len(free) >= job.workers:
                job.placed, job.attempt, job.started = tuple(free[: job.workers]), job.attempt + 1, {}

    def _end_jobs(self) -> None:
        for job in self.jobs:
            if job.placed and not job.done and all(self._ended(job, machine) for machine in job.placed):
                job.done, job.placed = True, ()
            draining = [self.store.rows[one] for one in job.placed if one in self.store.rows]
            if any(row.deadline is not None and row.state == "draining" for row in draining):
                job.notice_at = job.notice_at or self.true_now
                if self.true_now - job.notice_at >= TICK:  # it made way
                    job.placed, job.notice_at = (), None

    def _fence(self) -> None:
        """Requeue what ran on machines that are lost or gone, and say so."""
        rows = self.store.rows
        for job in self.jobs:
            if any(machine not in rows or rows[machine].state in ("lost", "terminating") for machine in job.placed):
                job.placed, job.notice_at = (), None
        for row in rows.values():
            if row.state == "lost" and self.random.random() < 0.5:
                self.reports.append((row.id, MachineEvent("fenced")))
                if any(row.id in job.placed for job in self.jobs):
                    raise AssertionError("fenced with work")

    # ── What may never happen ───────────────────────────────────────────────

    def check_commit(self, before: dict[str, Machine], changes: MachineChanges, term: int) -> None:
        rows = list(self.store.rows.values())
        committed = sum(row.price or 0 for row in rows)
        if changes.launched:
            assert self.deployment.hourly_budget is None or committed <= self.deployment.hourly_budget, self._text(
                "over budget"
            )
            assert len(rows) <= self.deployment.max_machines, self._text("too many machines")
            for machine_type in self.deployment.types:
                assert sum(row.type == machine_type.name for row in rows) <= machine_type.max_machines, self._text(
                    "too many of a type"
                )
            self._check_need(before, changes)
        assert all(row.term == term for row in (*changes.launched, *changes.changed)), self._text(
            "a write without a term"
        )
        for row in changes.changed:
            old = before[row.id]
            self._check_gone(row)
            heard = self.true_now - self.heard.get(row.id, 0.0) <= self.deployment.lost_after
            assert not (row.state == "lost" != old.state and heard), self._text(f"lost, though heard: {row}")
            ends = row.state == "terminating" and old.state in ("ready", "draining")
            busy = any(row.id in job.placed for job in self.jobs)
            due = row.deadline is not None and self.now >= row.deadline
            stopped = row.reason in ("stopped",)
            assert not (ends and busy and not due and not stopped), self._text(f"a busy machine is ended: {old} {row}")

    def _check_gone(self, row: Machine) -> None:
        """No machine is given up while its instance runs."""
        if row.finished:
            kept = [one for one in self.provider.running().values() if one.machine == row.id]
            unknown = row.instance is None and row.state == "gone" and not self.provider.empty  # else it is an orphan
            lost = [one.id for one in kept if row.instance == one.id or unknown]
            assert set(lost) <= self.launched_late, self._text(f"{row} is given up, and {lost} runs")

    def _check_need(self, before: dict[str, Machine], changes: MachineChanges) -> None:
        """Compare the launches with a plain count: each worker takes a whole machine."""
        known = {row.id: row for row in (*before.values(), *changes.changed)}
        for pool in ("gpu", "cpu"):
            wanted = sum(work.workers for work in self.demand.pending if work.pools == (pool,))
            coming = sum(
                row.pool == pool
                and (row.state in STARTING or (row.state == "ready" and row.id not in self.demand.nodes))
                for row in known.values()
            )
            launched = sum(row.pool == pool for row in changes.launched)
            assert not launched or launched + coming <= wanted, self._text(
                f"{launched} launched for {wanted} - {coming}"
            )

    def _check_end(self, call: ProviderCall) -> None:
        """No call ends an instance on which work runs that has a row there."""
        agent = self.agents.get(call.instance)
        row = self.store.rows.get(agent.machine) if agent else None
        if agent is None or row is None or row.instance != call.instance:
            return
        current = {(job.name, job.attempt) for job in self.jobs if row.id in job.placed}
        assert not agent.attempts & current or row.state == "terminating", self._text("work is killed by a call")

    def _check_world(self) -> None:
        """Count for how long machines without a reason live while the service can act."""
        able = self.true_now >= self.down_until and not self.provider.denied and not self.provider.partial
        rows = self.store.rows
        expected = {row.instance for row in rows.values()}
        tags = [one.machine for one in self.provider.instances.values()]
        assert self.provider.ignores_tokens or len(set(tags)) == len(tags), self._text("two instances of one machine")
        for one in self.provider.running().values():
            row = rows.get(one.machine)
            orphan = row is None or (row.instance is not None and one.id not in expected)
            listed = not self.provider.empty and one.visible_at <= self.true_now - self.provider.stale
            if orphan and one.ended_at is None and able and listed and not self.provider.busy:
                waited = self.orphan_for[one.id] = self.orphan_for.get(one.id, 0.0) + TICK
                assert waited <= 420 + 300 + SLACK, self._text(f"{one} belongs to no row")
            elif not orphan:
                self.orphan_for.pop(one.id, None)
        for row in rows.values():
            if row.state == "requested" and row.launch_calls and able:
                waited = self.unanswered_for[row.id] = self.unanswered_for.get(row.id, 0.0) + TICK
                assert waited <= self.deployment.request_timeout + SLACK, self._text(f"requested for ever: {row}")
            machine_type = self.deployment.type(row.type)
            used = self.demand.has_work(row.id) or any(work.pools == (row.pool,) for work in self.demand.pending)
            if row.state in (*STARTING, "ready") and not used and machine_type is not None:
                if able:
                    self.idle_for[row.id] = self.idle_for.get(row.id, 0.0) + TICK
                window = machine_type.idle_timeout if row.state == "ready" else 60.0
                assert self.idle_for.get(row.id, 0.0) <= window + 60 + SLACK, self._text(f"no reason to live: {row}")
            else:
                self.idle_for.pop(row.id, None)

    def _check_money(self) -> None:
        """Compare the closed spend with what the rows cost, each added up by itself."""
        cost = 0.0
        for row in self.store.finished.values():
            if row.state != "failed":
                cost += (row.price or 0) * max(0.0, row.state_since - row.requested_at) / 3600
        closed = sum(self.store.closed_spend.values())
        assert cost - 1 <= closed <= cost + 10 * len(self.store.finished) + 1, self._text(f"{closed} is not {cost}")

    def _text(self, message: str) -> str:
        return f"history {self.seed} at {self.true_now - START:.0f} s: {message}"
