"""Show the machines of deployments page by page, one with its history and outputs, and the log; for administrators."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence

from makeway_api.models import Machine as MachineModel
from makeway_api.models import MachineDetail, MachineLogEntry, MachinePage
from makeway_api.models import MachineOutput as OutputModel

from ...autoscale.budget import MICROS_PER_UNIT
from ...autoscale.machine import Machine, MachineState
from ...autoscale.provider import ProviderError
from ...store.machines.log import MachineLogEvent, StateHistory
from ...store.pages import read_cursor
from ...wording.machines import machine_reason, readable
from ..caller import Caller
from ..context import Context
from ..refusals import busy, refuse
from ..times import to_datetime, to_optional_datetime
from .deployments import require_administrator, unknown_deployment

log = logging.getLogger("makeway.machines")

HISTORY = 200
"""Events of the history of one machine: the newest ones"""
WINDOW = 3600.0
"""Seconds of the lines of machines by state"""
STEP = 10.0
"""Seconds within which only the last change, and the one with the most machines before it, are points of these lines"""
CONSOLE_SECONDS = 20.0
"""Seconds that a provider may take to answer what a console says"""
MARK_SECONDS = 1.0
"""Seconds for which all streams share a mark"""
LINES: Mapping[str, str] = {
    **dict.fromkeys(("requested", "booting", "joining"), "starting"),
    "ready": "ready",
    **dict.fromkeys(("draining", "terminating"), "ending"),
    "lost": "lost",
}
"""The line that counts the machines in a state; those that are over are in none"""
ReadConsole = Callable[[str, str], Awaitable[str]]
"""Return what the console of an instance of a deployment says; it may raise a ProviderError"""
Timeline = Mapping[str, Sequence[float]]
"""`at` has times in Unix seconds, each other line as many counts, which hold until the next time"""


class MachineService:
    """Machines and their log. Those of a deployment that was deleted are shown as long as they are kept."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._mark: tuple[float, Hashable] = (float("-inf"), None)
        self._reading = asyncio.Lock()
        self._read_console: ReadConsole | None = None

    def read_consoles_with(self, read: ReadConsole) -> None:
        """Read consoles by a provider; without, none can be read."""
        self._read_console = read

    async def mark(self, caller: Caller) -> Hashable:
        """Return a value that is another one when what the pages of deployments show has changed; for their streams."""
        require_administrator(caller)
        async with self._reading:  # all open pages wait for one reading
            if time.monotonic() - self._mark[0] >= MARK_SECONDS:
                mark = await self._context.call(self._context.store.machine_log.mark)
                self._mark = (time.monotonic(), mark)
        return self._mark[1]

    async def timeline(self, caller: Caller, deployment: str) -> Timeline:
        """Return how many machines of a deployment were in which states, in the last hour, as its log has it."""
        require_administrator(caller)
        store, since = self._context.store, self._context.clock() - WINDOW

        def read() -> Timeline:
            history = store.machine_log.states(deployment, since)
            return timeline(history, store.machines.read(deployment).machines)

        return await self._context.call(read)

    async def page(
        self,
        caller: Caller,
        deployment: str,
        states: Sequence[MachineState] | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> MachinePage:
        """Return one page of the machines of a deployment, those that are over too, newest first."""
        require_administrator(caller)
        try:
            after = None if cursor is None else read_cursor(cursor)
        except ValueError:
            raise refuse("That cursor does not come from this service.", "bad_cursor", 422) from None
        store = self._context.store.machines
        rows = await self._context.call(store.machines, deployment, states, limit + 1, after)
        if not rows:
            await self._known(deployment)
        shown = rows[:limit]
        following = f"{shown[-1].requested_at!r}~{shown[-1].id}" if len(rows) > limit else None
        return MachinePage(machines=[machine_model(row) for row in shown], next=following)

    async def machine(self, caller: Caller, deployment: str, id: str) -> MachineDetail:
        """Return one machine with its history, newest first, and what its console and init script wrote."""
        require_administrator(caller)
        return await self._context.call(self._detail, deployment, id)

    async def console(self, caller: Caller, deployment: str, id: str) -> MachineDetail:
        """Read what a machine's console says now from the provider, keep it, and return the machine with it."""
        require_administrator(caller)
        context = self._context
        row = await context.call(self._row, deployment, id)
        text = await self._console_of(row)
        if not text:
            raise refuse(f"The provider has no output of the console of {id} now.", "no_console", 404)
        await context.call(context.store.machine_log.write_output, id, "console", text, None, context.clock())
        return await context.call(self._detail, deployment, id)

    async def _console_of(self, row: Machine) -> str:
        if self._read_console is None:
            raise refuse("This service has no backend for machines: it asks no provider.", "no_console", 409)
        if not row.instance:
            raise refuse(f"{row.id} has no instance at the provider yet.", "no_console", 409)
        try:
            async with asyncio.timeout(CONSOLE_SECONDS):
                return await self._read_console(row.deployment, row.instance)
        except TimeoutError:
            message = f"The provider did not say within {round(CONSOLE_SECONDS)} s what the console of {row.id} says."
        except ProviderError as error:
            said = str(error).rstrip(".") or machine_reason(error.failure).rstrip(".")
            message = f"The console of {row.id} cannot be read: {said}."
        except Exception as error:
            log.exception("The console of %s cannot be read", row.id)
            message = f"The console of {row.id} cannot be read: {type(error).__name__}; the service's log says more."
        raise busy(message, "console_failed", 503, 5)

    async def log(
        self, caller: Caller, deployment: str, limit: int = 100, before: int | None = None
    ) -> list[MachineLogEntry]:
        """Return the log of a deployment, newest first; `before` is the last id of the page before."""
        require_administrator(caller)
        store = self._context.store.machine_log
        rows = await self._context.call(store.events, deployment, None, before, limit)
        if not rows and before is None:
            await self._known(deployment)
        return [event_model(row) for row in rows]

    def _row(self, deployment: str, id: str) -> Machine:
        row = self._context.store.machines.machine(id)
        if row is None or row.deployment != deployment:
            raise refuse(
                f"The deployment {deployment} has no machine {id}; those that are gone are removed after a while.",
                "not_found",
                404,
            )
        return row

    def _detail(self, deployment: str, id: str) -> MachineDetail:
        row, store = self._row(deployment, id), self._context.store
        events = store.machine_log.events(machine=id, limit=HISTORY)
        outputs = [
            OutputModel(
                kind=one.kind,
                at=to_datetime(one.at),
                exit_code=one.exit_code,
                text=readable(one.text, one.omitted),
                omitted=one.omitted,
            )
            for one in store.machine_log.outputs(id)
        ]
        shown = machine_model(row).model_dump()
        return MachineDetail(**shown, events=[event_model(event) for event in events], outputs=outputs)

    async def _known(self, deployment: str) -> None:
        if await self._context.call(self._context.store.deployments.read, deployment) is None:
            raise unknown_deployment(deployment)


def machine_model(row: Machine) -> MachineModel:
    """Return a machine as the API shows it."""
    return MachineModel(
        id=row.id,
        deployment=row.deployment,
        type=row.type,
        pool=row.pool,
        zone=row.zone,
        market=row.market,
        state=row.state,
        reason=row.reason,
        message=machine_reason(row.reason),
        since=to_datetime(row.state_since),
        requested_at=to_datetime(row.requested_at),
        ready_at=to_optional_datetime(row.ready_at),
        heard_at=to_optional_datetime(row.heard_at),
        instance=row.instance,
        gpus=row.gpus,
        attempts=row.attempts,
        price=None if row.price is None else row.price / MICROS_PER_UNIT,
        deadline=to_optional_datetime(row.deadline),
    )


def event_model(row: MachineLogEvent) -> MachineLogEntry:
    """Return a line of the log as the API shows it: the sentence of its cause, then what else is known."""
    message = sentence = machine_reason(row.reason) if row.machine else ""
    if row.message and sentence and row.state:  # facts, such as `instance i-1`
        message = f"{sentence[:-1]} ({row.message})."
    elif row.message:
        message = f"{sentence} {row.message}".lstrip()
    return MachineLogEntry(
        id=row.id,
        at=to_datetime(row.at),
        deployment=row.deployment,
        machine=row.machine,
        state=row.state,
        reason=row.reason,
        message=message,
    )


def timeline(history: StateHistory, live: Sequence[Machine]) -> Timeline:
    """Return the counts of machines by line, from the states that they had; `live` are those that are not over."""
    states = dict(history.earlier)
    changed = {machine for _, machine, _ in history.changes}
    for one in live:
        if one.id not in changed:
            states[one.id] = one.state  # as it has been since the beginning
    points = [(history.since, _counted(states))]
    for when_changed, machine, state in history.changes:
        states[machine] = state
        point = max(points[-1][0], when_changed), _counted(states)
        if [len(points) > 1 and one[0] // STEP == point[0] // STEP for one in points[-2:]] == [True, True]:
            last = points.pop()
            if last[1].total() > points[-1][1].total():
                points[-1] = last
        points.append(point)
    result: dict[str, list[float]] = {"at": [round(moment, 1) for moment, _ in points]}
    return result | {name: [counts[name] for _, counts in points] for name in dict.fromkeys(LINES.values())}


def _counted(states: Mapping[str, str]) -> Counter[str]:
    return Counter(line for state in states.values() if (line := LINES.get(state)))
