"""Answer the agents of machines: they join once, report, and read what their machine has to run.

An agent may use any replica. What it is told follows from the store alone: its row and what is placed there, after all
that any replica had committed when it was answered. The token of a machine opens that machine alone; the token of a
worker is given only to the machine where the worker is placed, while its attempt lives.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from makeway_api.models.agents import (
    AgentJoin,
    AgentJoined,
    AgentReceipt,
    AgentReportIn,
    MachineOrders,
    WorkerOrder,
)

from ...autoscale.machine import FINISHED, STARTING, Machine
from ...control.machines.channel import MachineChannel
from ...control.machines.placements import is_wanted, unwanted_at
from ...control.workers.channel import WorkerChannel
from ...store.records import Workload
from ...values import Place, ordinal
from ..context import Context
from ..limits.output_rates import OutputRates
from ..refusals import busy, refuse

REPORT_SECONDS = 10.0
"""Seconds between two reports of an unchanged machine"""
MAX_WAIT_SECONDS = 25.0
"""Seconds that a request for orders is held, at most"""
REPORT_COST_BYTES = 2**18
"""Bytes that each changed report counts for: it is a transaction"""
FIRST_PORT, PORT_COUNT = 20_000, 10_000
"""The ports at which the first workers of gangs listen"""


class AgentService:
    """What the agent of one machine may do, and nothing else."""

    def __init__(
        self,
        context: Context,
        machines: MachineChannel | None,
        workers: WorkerChannel,
        catch_up: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """`machines` None: no backend has machines. `catch_up` reads what other replicas have committed."""
        self._context = context
        self._machines = machines
        self._workers = workers
        self._catch_up = catch_up
        self._rates = OutputRates()

    @property
    def _channel(self) -> MachineChannel:
        if self._machines is None:
            message = "This service has no machines: name the backend machines in MAKEWAY_BACKEND."
            raise refuse(message, "not_found", 404)
        return self._machines

    def check_join_token(self, token: str) -> str:
        """Return the machine that a join token opens; refuse what is none."""
        if machine := self._channel.tokens.joining(token):
            return machine
        raise refuse("This token lets no machine join.", "unauthorized", 401)

    def check_token(self, token: str, machine: str, *, renewing: bool = False) -> tuple[str, bool]:
        """Refuse a token that is not this machine's or is too old; return its boot, and whether to replace it."""
        checked = self._channel.tokens.check(token, machine)
        if checked.validity == "void":
            message = "This token opens no machine, or another one than the address names."
            raise refuse(message, "unauthorized", 401)
        if checked.validity == "expired" and not renewing:
            raise refuse("This token has expired: a report of the agent gets a new one.", "token_expired", 401)
        return checked.boot, checked.validity != "valid"

    async def join(self, token: str, body: AgentJoin, address: str) -> AgentJoined:
        """Make an agent the only one of its machine. A repetition by the same boot gets a new token, until it is ready.

        After that jobs run there, which may read the join token from the machine's user data. `address`: of the
        sender.
        """
        if self.check_join_token(token) != body.machine:
            raise refuse("This token lets another machine join than the body names.", "unauthorized", 401)
        self._check_database()
        context, channel = self._context, self._channel
        row = self._require_live(await channel.row(body.machine), body.machine)
        if row.state not in STARTING:
            raise self._join_refused(row, body.boot)
        missing: dict[str, object] = {"init_exit_code": None, "spot_deadline": None, "attempts": []}
        facts = {**_facts_of(body), "address": body.address or address, **missing}
        result = await context.call(context.store.machine_reports.join, body.machine, body.boot, facts, context.clock())
        if result.outcome == "over":
            raise _machine_ended(body.machine)
        if result.outcome == "other":
            raise self._join_refused(row, body.boot)
        channel.record_contact(body.machine)
        channel.wake()
        options = channel.options(row)
        return AgentJoined(
            token=channel.tokens.token(body.machine, body.boot),
            report_seconds=REPORT_SECONDS,
            init_script=options.init_script,
            cpu_only=options.cpu_only,
            image=options.image,
            orphan_after=options.orphan_after,
            lost_after=await channel.lost_after(row.deployment),
            checkpoints=self._checkpoints,
        )

    async def report(self, token: str, machine: str, body: AgentReportIn, address: str) -> AgentReceipt:
        """Take what a machine is and runs. An expired token is renewed while the machine lives."""
        boot, renew = self.check_token(token, machine, renewing=True)
        self._check_database()
        context, channel = self._context, self._channel
        row = await self._live_machine(machine)
        if body.boot != boot:
            raise self._join_refused(row, body.boot)
        channel.record_contact(machine)
        facts = {**_facts_of(body), "address": body.address or address}
        known = channel.report(machine)
        if known is None or known.boot != boot or known.damaged or dict(known.facts) != facts:
            if wait := self._rates.take(machine, REPORT_COST_BYTES):
                raise busy("This machine reports faster than it is taken: report later.", "too_fast", 429, wait)
            if body.init is not None and body.init.output:
                await context.call(self._keep_output, row, body.init.exit_code, body.init.output)
            reports, now = context.store.machine_reports, context.clock()
            if await context.call(reports.report, machine, boot, facts, now, body.number) is None:
                current = self._require_live(await channel.row(machine), machine)
                raise self._join_refused(current, boot)
            channel.wake()
        renewed = channel.tokens.token(machine, boot) if renew else None
        return AgentReceipt(token=renewed, report_seconds=REPORT_SECONDS)

    async def orders(self, token: str, machine: str, known: str, wait: float) -> MachineOrders:
        """Return everything that a machine has to do; wait up to `wait` seconds until it is not what it knows."""
        boot, _ = self.check_token(token, machine)
        channel = self._channel
        deadline = time.monotonic() + min(max(0.0, wait), MAX_WAIT_SECONDS)
        with channel.placements.follow(machine) as follower:
            while True:
                self._check_database()
                await self._live_machine(machine, boot)
                channel.record_contact(machine)
                orders, until = self._orders(machine)
                remaining = deadline - time.monotonic()
                if orders.revision != known or remaining <= 0:
                    if self._catch_up is None:
                        return orders
                    await self._catch_up()  # another replica may have started there what is not known here
                    orders, until = self._orders(machine)
                    if orders.revision != known or remaining <= 0:
                        return orders
                await follower.wait_for_change(remaining if until is None else min(remaining, max(0.05, until)))

    # -- inside

    @property
    def _checkpoints(self) -> str | None:
        return self._context.settings.machines.checkpoint_dir or None

    def _check_database(self) -> None:
        """Refuse where other replicas may have decided anything since the database was read."""
        if self._workers.stale:
            raise busy("The database does not answer this replica: ask another one.", "database_unavailable", 503, 1.0)

    async def _live_machine(self, machine: str, boot: str = "") -> Machine:
        """Return the row of a machine that is not over; 410 otherwise, which ends its work.

        A replica may know of a machine, or of its boot, later than its agent.
        """
        row = self._channel.known(machine)
        if row is None or row.state == "terminating":
            row = await self._channel.row(machine)
        return self._require_live(row, machine)

    def _require_live(self, row: Machine | None, machine: str) -> Machine:
        if row is None or row.state in FINISHED or row.state == "terminating":
            raise _machine_ended(machine)
        return row

    def _join_refused(self, row: Machine, boot: str) -> Exception:
        """Return the refusal of a boot that is not the one that joined, or joins again after the machine was ready."""
        if row.boot == boot:
            message = f"{row.id} has joined and is ready: its agent keeps the token that it got then."
            return refuse(message, "joined", 409)
        return refuse(f"Another boot of {row.id} has joined: this one gets no work.", "other_boot", 409)

    def _keep_output(self, row: Machine, code: int, output: str) -> None:
        store, now = self._context.store, self._context.clock()
        store.machine_log.write_output(row.id, "init", output, code, now)

    def _orders(self, machine: str) -> tuple[MachineOrders, float | None]:
        """Return the orders of a machine, and in how many seconds they change by time alone."""
        now = self._context.clock()
        rows = [row for row in self._channel.placements.on(machine) if is_wanted(row, now)]
        attempts = [
            self._order(row, number, place)
            for row in rows
            for number, place in enumerate(row.placement)
            if place.node == machine
        ]
        status = self._channel.status(machine)
        drain = status is not None and status.condition == "draining"
        orders = MachineOrders(revision="", drain=drain, stop=False, attempts=attempts)
        orders.revision = _revision(orders)
        times = [at - now for row in rows if (at := unwanted_at(row, now)) is not None]
        return orders, min(times, default=None)

    def _order(self, row: Workload, number: int, place: Place) -> WorkerOrder:
        path, token = self._workers.credentials(row.id, row.attempt, number)
        status = self._channel.status(place.node)
        devices = [ordinal(device) for device in place.devices]
        hidden = not devices or (status is not None and status.cpu_only)
        shared = self._checkpoints
        return WorkerOrder(
            job=row.id,
            attempt=row.attempt,
            worker=number,
            url=f"{self._context.settings.machines.url.rstrip('/')}/{path}",
            token=token,
            image=row.image or (None if status is None else status.image),
            devices=devices,
            milli=list(place.milli),
            cpu_only=hidden,
            cpu=row.cpu,
            memory=row.memory,
            env={**self._rendezvous(row, number), **_gpus(devices, hidden, status is not None and status.virtual)},
            checkpoints=None if shared is None else f"{shared.rstrip('/')}/{row.id}",
        )

    def _rendezvous(self, row: Workload, number: int) -> dict[str, str]:
        """Return the variables by which a worker knows its rank and, in a gang, finds the others."""
        nodes = [place.node for place in row.placement]
        if len(nodes) < 2:
            return {"RANK": "0", "WORLD_SIZE": "1"}
        first = self._channel.status(nodes[0])
        address = "127.0.0.1" if len(set(nodes)) == 1 or first is None or not first.address else first.address
        digest = hashlib.sha256(f"{row.id} {row.attempt}".encode()).digest()
        port = FIRST_PORT + int.from_bytes(digest[:4], "big") % PORT_COUNT
        ranks = {"RANK": str(number), "WORLD_SIZE": str(len(nodes))}
        return {**ranks, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def _machine_ended(machine: str) -> Exception:
    message = f"The machine {machine} is over: end its work and power it off, nothing more is taken from it."
    return refuse(message, "machine_over", 410)


def _gpus(devices: list[int], hidden: bool, virtual: bool) -> dict[str, str]:
    """Return the variables by which a worker sees its GPUs."""
    if hidden:
        return {"CUDA_VISIBLE_DEVICES": "none", "NVIDIA_VISIBLE_DEVICES": "none"}
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return {**variables, "MAKEWAY_VIRTUAL_GPUS": "1"} if virtual else variables


def _facts_of(body: AgentJoin | AgentReportIn) -> dict[str, Any]:
    """Return what a machine reports as it is stored: of the init script its exit code, as its output has a row."""
    facts = body.model_dump(exclude={"machine", "boot", "number", "init"})
    if isinstance(body, AgentReportIn):
        facts["init_exit_code"] = None if body.init is None else body.init.exit_code
    return facts


def _revision(orders: MachineOrders) -> str:
    """Return what tells these orders from others: all but the tokens, which are new with each answer."""
    fields = orders.model_dump(exclude={"revision": True, "attempts": {"__all__": {"token"}}})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]
