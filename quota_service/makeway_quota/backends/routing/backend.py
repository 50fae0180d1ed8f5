"""Several backends as one: each node belongs to one of them, and attempts are routed by where they are placed.

A backend that fails, is slow or starts late stops no other: its nodes take no new work, its attempts stay as they were
seen last, and `Observation.backends` says why. A node that two backends name alike is offered by the one that showed it
first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ...policy import Document
from ...quarantine import Quarantine
from ...values import Notice
from ..base import (
    AttemptElsewhere,
    AttemptStatus,
    Backend,
    BackendError,
    BackendState,
    BackendUnavailable,
    Key,
    NodeStatus,
    Observation,
    Phase,
    StartOrder,
    TerminationProgress,
)
from ..machines.machine_source import MachineSource
from ..remote.channel import Channel
from ..versions import ObservationTracker
from .channels import SplitChannel
from .part import PartLimits, RoutedPart
from .placements import EndedPlacements

T = TypeVar("T")

TERMINAL_PHASES = (Phase.EXITED, Phase.LOST)


class RoutingBackend(Backend):
    """The backends in the order of their settings. Notebooks start on the nodes of the first one."""

    name = "routing"

    def __init__(self, backends: Sequence[Backend], limits: PartLimits = PartLimits()) -> None:  # noqa: B008 (a constant)
        """ValueError where two have the same name."""
        names = [backend.name for backend in backends]
        if len(set(names)) < len(names):
            raise ValueError(f"Each backend is named once, not {', '.join(names)}.")
        self.parts = [RoutedPart(backend, number == 0, limits) for number, backend in enumerate(backends)]
        self._by_name = {part.name: part for part in self.parts}
        self._limits = limits
        self.shared = all(backend.shared for backend in backends)
        self.durable_checkpoints = all(backend.durable_checkpoints for backend in backends)
        self.worker_kind = backends[0].worker_kind
        self.keeps_outputs = any(backend.keeps_outputs for backend in backends)
        self.remote = any(backend.remote for backend in backends)
        self.reports_begin = any(backend.reports_begin for backend in backends)
        self.lost_after = max(backend.lost_after for backend in backends)
        self._placed_on: Callable[[str, int], str] = lambda workload, attempt: ""
        self._ended = EndedPlacements()
        self._backend_of_node: dict[str, str] = {}
        """node to the backend that offers it"""
        self._changes = ObservationTracker()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the backends, in the order of the settings."""
        return tuple(self._by_name)

    @property
    def reachable(self) -> bool:
        """Whether attempts can be started and ended on any of them."""
        return any(part.opened and not part.late and part.backend.reachable for part in self.parts)

    def has_durable_checkpoints(self, backend: str) -> bool:
        """Whether a backend leaves the checkpoints of its attempts to the next ones; "" or unknown: whether all do."""
        part = self._by_name.get(backend)
        return self.durable_checkpoints if part is None else part.backend.durable_checkpoints

    # -- routing

    def part_of(self, key: Key) -> RoutedPart | None:
        """Return the backend that an attempt belongs to; None where no one knows it, or it is not there any more."""
        if name := self._placed_on(*key):
            return self._by_name.get(name)
        reporting = [part for part in self.parts if key in part.attempts]
        alive = [part for part in reporting if part.attempts[key].phase not in TERMINAL_PHASES]
        return next(iter([*alive, *reporting]), None)

    def _parts_of(self, key: Key) -> list[RoutedPart]:
        """Return the backends to ask about an attempt: its own, or all where that is not known."""
        if name := self._placed_on(*key):
            return [self._by_name[name]] if name in self._by_name else []
        part = self.part_of(key)
        return self.parts if part is None else [part]

    async def _parts_with_outputs(self, key: Key) -> list[RoutedPart]:
        """Return the backends that may have what an attempt wrote, also after its end: as `_parts_of`."""
        if self._placed_on(*key) or self.part_of(key) is not None:
            return self._parts_of(key)
        part = self._by_name.get(await self._ended.backend_of(key))
        return self.parts if part is None else [part]

    def _belongs_to(self, key: Key, name: str) -> bool:
        return self._placed_on(*key) in ("", name)

    async def _send(self, key: Key, send: Callable[[Backend], Awaitable[None]]) -> None:
        """Send an order about an attempt. A repetition, and one about an unknown attempt, do nothing."""
        await _to_all(self._parts_of(key), send)

    async def _first_answer(
        self, key: Key, ask: Callable[[Backend], Awaitable[T]], there: Callable[[T], bool]
    ) -> T | None:
        """Return what the first backend answers that has something; None where none does.

        Only its own is asked, where that is known. One that cannot be reached hides nothing of the others;
        BackendUnavailable where only that one may have it.
        """
        failed: list[BackendUnavailable] = []
        for part in await self._parts_with_outputs(key):
            try:
                answer = await part.order(lambda part=part: ask(part.backend))  # type: ignore[misc]
            except BackendUnavailable as error:
                failed.append(error)
                continue
            if there(answer):
                return answer
        if failed:
            raise failed[0]
        return None

    # -- the protocol

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever one of them shows something new."""
        for part in self.parts:
            part.on_change(wake)

    def connect(self, channel: Channel) -> None:
        """Connect each to its own part of the channel."""
        split = SplitChannel(channel)
        for part in [part for part in self.parts if part.backend.remote]:
            part.backend.connect(split.part(lambda key, name=part.name: self._belongs_to(key, name)))  # type: ignore[misc]

    def follow_machines(self, machines: MachineSource) -> None:
        """Have each read the machines of deployments from this."""
        for part in self.parts:
            part.backend.follow_machines(machines)

    def lost_after_of(self, workload: str, attempt: int) -> float:
        """Return the seconds of the backend that an attempt belongs to; the longest where that is not known."""
        part = self.part_of((workload, attempt))
        return self.lost_after if part is None else part.backend.lost_after_of(workload, attempt)

    def act_for_database(self, database: str) -> None:
        """Act in the name of this database."""
        for part in self.parts:
            part.backend.act_for_database(database)

    def use_backend_lookup(self, backend_of: Callable[[str, int], str]) -> None:
        """Learn where attempts were placed, also by an earlier process."""
        self._placed_on = backend_of

    def use_ended_backend_lookup(self, ended: Callable[[str], Awaitable[Mapping[int, str]]]) -> None:
        """Read where attempts that have ended were placed."""
        self._ended.read = ended

    def running_elsewhere(self, workloads: Collection[str]) -> list[AttemptElsewhere]:
        """Return what any of them finds."""
        return [attempt for part in self.parts for attempt in part.backend.running_elsewhere(workloads)]

    async def open(self) -> None:
        """Open all at the same time, again and again those that fail; raise the first failure where none opens."""
        for part in self.parts:
            part.open()
        tried = [asyncio.create_task(part.tried.wait()) for part in self.parts]
        await asyncio.wait(tried, timeout=self._limits.open)
        for task in tried:
            task.cancel()
        failures = [part.failure for part in self.parts if part.failure is not None and not part.opened]
        if len(failures) == len(self.parts):
            await self.close(stop_jobs=False)
            raise failures[0]

    async def open_for_reading(self) -> None:
        """Open all for a process that decides nothing; the first failure is raised."""
        for part in self.parts:
            await part.backend.open_for_reading()
            part.opened = True

    async def close(self, *, stop_jobs: bool) -> None:
        """Close all at the same time."""
        await asyncio.gather(*(part.close(stop_jobs=stop_jobs) for part in self.parts))

    async def observe(self, since: int | None = None) -> Observation:
        """Return the nodes and attempts of all; what one of them cannot show is as it was seen last."""
        looking = [task for part in self.parts if (task := part.observe()) is not None]
        if looking:
            await asyncio.wait(looking, timeout=self._limits.observe)
        for part in self.parts:
            part.take()
        nodes, conflicts = self._nodes()
        attempts = self._attempts()
        states = tuple(part.state(tuple(sorted(conflicts[part.name]))) for part in self.parts)
        synced = any(state.synced for state in states)
        observation = self._changes.observation(nodes, attempts, since, synced=synced)
        return replace(observation, backends=states, problem=_of_all(states))

    def _nodes(self) -> tuple[dict[str, NodeStatus], dict[str, list[str]]]:
        """Return the nodes by name, and those of each backend that are not offered as their name is taken."""
        result: dict[str, NodeStatus] = {}
        conflicts: dict[str, list[str]] = {part.name: [] for part in self.parts}
        owners: dict[str, str] = {}
        for part in self.parts:
            for name in part.nodes:
                before = self._by_name.get(self._backend_of_node.get(name, ""))
                owners.setdefault(name, part.name if before is None or name not in before.nodes else before.name)
        for part in self.parts:
            problem = bool(part.problem)
            for name, node in part.nodes.items():
                if owners[name] != part.name:
                    conflicts[part.name].append(name)
                    continue
                if problem:
                    node = replace(node, cordoned=True, observed=False)
                result[name] = node
        self._backend_of_node = owners
        return result, conflicts

    def _attempts(self) -> dict[Key, AttemptStatus]:
        """Return the attempts of all; one that two of them report as its own backend does."""
        result: dict[Key, AttemptStatus] = {}
        for part in self.parts:
            for key, attempt in part.attempts.items():
                if key not in result or self.part_of(key) is part:
                    result[key] = attempt
        return result

    async def start(self, order: StartOrder) -> None:
        """Start an attempt on the backend of its nodes."""
        names = {place.backend or self._backend_of_node.get(place.node, "") for place in order.workers}
        if len(names) > 1:
            raise BackendError(f"Its workers were placed on nodes of several backends: {', '.join(sorted(names))}.")
        name = next(iter(names), self.parts[0].name)
        part = self._by_name.get(name)
        if part is None:
            node = order.workers[0].node
            raise BackendUnavailable(f"The backend of the node {node!r} is not known at the moment")
        await part.order(lambda: part.backend.start(order))

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        """Order an attempt to save and end."""
        await self._send((workload, attempt), lambda backend: backend.notice(workload, attempt, notice))

    async def kill(self, workload: str, attempt: int) -> None:
        """Stop an attempt now."""
        await self._send((workload, attempt), lambda backend: backend.kill(workload, attempt))

    async def forget(self, workload: str, attempt: int) -> None:
        """Stop reporting an attempt, wherever it is reported."""
        key = (workload, attempt)
        reporting = [part for part in self.parts if key in part.attempts] or self._parts_of(key)
        for part in reporting:
            await part.order(lambda part=part: part.backend.forget(workload, attempt))  # type: ignore[misc]

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes of the log, from the backend that has one."""
        key = (workload, attempt)
        result = await self._first_answer(
            key, lambda b: b.log(workload, attempt, offset, size), lambda answer: answer[1] > 0
        )
        return (b"", 0) if result is None else result

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of a very long log that were dropped."""
        key = (workload, attempt)
        return await self._first_answer(key, lambda b: b.log_gap(workload, attempt), lambda answer: answer is not None)

    async def result(self, workload: str, attempt: int) -> bytes | None:
        """Return the result, from the backend that has one."""
        key = (workload, attempt)
        return await self._first_answer(key, lambda b: b.result(workload, attempt), lambda answer: answer is not None)

    async def result_part(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return part of the result and the size of the whole."""

        def ask(backend: Backend) -> Awaitable[tuple[bytes, int] | None]:
            return backend.result_part(workload, attempt, offset, size)

        return await self._first_answer((workload, attempt), ask, lambda answer: answer is not None)

    async def error(self, workload: str, attempt: int) -> bytes | None:
        """Return the JSON about the exception."""
        key = (workload, attempt)
        return await self._first_answer(key, lambda b: b.error(workload, attempt), lambda answer: answer is not None)

    async def purge(self, workload: str, team: str) -> bool:
        """Remove everything that any of them keeps; False while one of them cannot."""
        done = True
        for part in self.parts:
            try:
                done &= await part.order(lambda part=part: part.backend.purge(workload, team))  # type: ignore[misc]
            except BackendUnavailable:
                done = False
        return done

    # -- what only some backends do

    def quarantine_in(self, quarantine: Quarantine) -> None:
        """Add what an observation fails with to this quarantine."""
        for part in self.parts:
            part.backend.quarantine_in(quarantine)

    def fence_with(self, may_act: Callable[[], bool]) -> None:
        """Act without an order only while `may_act`."""
        for part in self.parts:
            part.backend.fence_with(may_act)

    def begin_term(self) -> None:
        """Forget what an earlier term concluded and ordered."""
        for part in self.parts:
            part.backend.begin_term()

    def follow_policy(self, document: Callable[[], Document]) -> None:
        """Use the policy document that this returns."""
        for part in self.parts:
            part.backend.follow_policy(document)

    def on_progress(self, note: Callable[[str, int, object], None]) -> None:
        """Pass what attempts report of their progress to `note`."""
        for part in self.parts:
            part.backend.on_progress(note)

    def termination_progress(self, workload: str) -> TerminationProgress | None:
        """Return what was done to end what is left of a workload, by the first that was ordered to."""
        return next(self._answers(lambda backend: backend.termination_progress(workload)), None)

    def publish_event(self, key: Key, code: str, message: str) -> None:
        """Show a decision about an attempt beside its workers."""
        for part in self._parts_of(key):
            part.backend.publish_event(key, code, message)

    async def pod_notices(self, owner: str, team: str) -> list[str]:
        """Return what the owner of a job has to know, of those that are open."""
        return await self._gather(lambda backend: backend.pod_notices(owner, team))

    async def policy_notices(self, document: Document) -> list[tuple[str, str]]:
        """Return the profiles of a document that will not work on one of them, each with the reason."""
        return await self._gather(lambda backend: backend.policy_notices(document))

    async def notebook_problem(self, profile: str) -> str:
        """Return why no notebook of a profile would get its GPUs, from the first of them, which has the notebooks."""
        part = self.parts[0]
        return await part.backend.notebook_problem(profile) if part.opened and not part.late else ""

    def folder_bytes(self, workload: str) -> int | None:
        """Return the bytes of a job's folder on this machine."""
        return next(self._answers(lambda backend: backend.folder_bytes(workload)), None)

    async def output_bytes(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of an attempt's log and result, from the backend that keeps them."""

        def ask(backend: Backend) -> Awaitable[tuple[int, int] | None]:
            return backend.output_bytes(workload, attempt)

        return await self._first_answer((workload, attempt), ask, lambda answer: answer is not None and any(answer))

    async def remove_output(self, workload: str, attempt: int) -> None:
        """Remove what an attempt wrote, wherever it is kept."""
        parts = await self._parts_with_outputs((workload, attempt))
        await _to_all(parts, lambda backend: backend.remove_output(workload, attempt))

    async def _gather(self, ask: Callable[[Backend], Awaitable[list[T]]]) -> list[T]:
        answers = await asyncio.gather(*(ask(part.backend) for part in self.parts if part.opened))
        return [item for answer in answers for item in answer]

    def _answers(self, ask: Callable[[Backend], T | None]) -> Iterator[T]:
        return (answer for part in self.parts if (answer := ask(part.backend)) is not None)


async def _to_all(parts: Sequence[RoutedPart], send: Callable[[Backend], Awaitable[None]]) -> None:
    """Send an order to some backends, one after the other; the first failure is raised once all were asked."""
    failed: list[BackendError] = []
    for part in parts:
        try:
            await part.order(lambda part=part: send(part.backend))  # type: ignore[misc]
        except BackendError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _of_all(states: Sequence[BackendState]) -> str:
    """Return why nothing is known at all; "" where one of the backends is observed."""
    if not all(state.problem for state in states):
        return ""
    return "; ".join(f"{state.name}: {state.problem}" for state in states)
