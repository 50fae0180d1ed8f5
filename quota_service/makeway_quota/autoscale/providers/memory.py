"""A provider that exists in memory only: for tests and simulations, on the given clock.

Instances run until they are ended. It can be told to be out of stock, busy, or without an answer, to hide new
instances, and to list an earlier time or a part: as clouds do.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from ..instances import Instance, InstanceList, InstanceState
from ..provider import CallOutcomeUnknown, Denied, InvalidLaunch, JoinData, StockOut, Throttled


@dataclass(slots=True)
class MemoryInstance:
    """One instance with its times, by the provider's clock."""

    id: str
    token: str
    machine: str
    deployment: str
    request: str
    join: JoinData | None
    launched_at: float
    visible_at: float
    stopped_at: float | None = None
    ended_at: float | None = None

    def state(self, at: float) -> InstanceState:
        """Return the state at a time."""
        if self.ended_at is not None and self.ended_at <= at:
            return "terminated"
        return "stopped" if self.stopped_at is not None and self.stopped_at <= at else "running"


@dataclass(slots=True)
class MemoryProvider:
    """The provider, with what it is told to do wrong.

    `stock_out` has instance types with zones and markets. `busy`, `lost_before` and `lost_after` count calls that are
    throttled, not started and without an answer, and done and without an answer. `delay`: seconds until an instance is
    listed; `stale`: the age of lists; `forgets`: seconds after which a terminated instance is not listed any more.
    """

    clock: Callable[[], float]
    instances: dict[str, MemoryInstance] = field(default_factory=dict)
    stock_out: set[tuple[str, str, str]] = field(default_factory=set)
    busy: int = 0
    lost_before: int = 0
    lost_after: int = 0
    denied: bool = False
    ignores_tokens: bool = False
    delay: float = 0.0
    stale: float = 0.0
    partial: bool = False
    empty: bool = False
    forgets: float = 3600.0
    end_delay: float = 0.0
    launches: int = 0
    """calls of `launch` that came so far as to be answered or done"""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def check(self) -> None:
        """Raise Denied with wrong credentials."""
        if self.denied:
            raise Denied("the credentials are refused")

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return the instances of a deployment, as it is told to."""
        self._throttle()
        at = self.clock() - self.stale
        result = [
            Instance(one.id, one.machine, one.deployment, one.state(at), None)
            for one in self.instances.values()
            if one.deployment == deployment and self._shown(one, at)
        ]
        shown = [] if self.empty else result[::2] if self.partial else result
        return InstanceList(now, tuple(shown), complete=not self.partial)

    def _shown(self, one: MemoryInstance, at: float) -> bool:
        return one.visible_at <= at and (one.ended_at is None or at < one.ended_at + self.forgets)

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Launch an instance; one token is one instance, which never joins."""
        self._throttle()
        if self.lost_before:
            self.lost_before -= 1
            raise CallOutcomeUnknown("no answer")
        wanted = json.loads(request)
        known = (
            None if self.ignores_tokens else next((one for one in self.instances.values() if one.token == token), None)
        )
        self.launches += 1
        if known is not None:
            if (known.request, known.join) != (request, join):
                raise CallOutcomeUnknown("this token belongs to another request")
            return self._instance(known)
        if "instance" not in wanted:
            raise InvalidLaunch("the request names no instance type")
        if (wanted["instance"], wanted["zone"], wanted["market"]) in self.stock_out:
            raise StockOut(f"no {wanted['instance']} in {wanted['zone'] or 'any zone'}")
        now = self.clock()
        made = MemoryInstance(
            f"i-{next(self._numbers):06}",
            token,
            wanted["machine"],
            wanted["deployment"],
            request,
            join,
            now,
            now + self.delay,
        )
        self.instances[made.id] = made
        if self.lost_after:
            self.lost_after -= 1
            raise CallOutcomeUnknown("no answer")
        return self._instance(made)

    def terminate(self, instance: str) -> bool:
        """End an instance, after its delay."""
        self._throttle()
        result = self.instances.get(instance)
        if result is None or result.state(self.clock()) == "terminated":
            return False
        if result.ended_at is None:
            result.ended_at = self.clock() + self.end_delay
        return True

    def console(self, instance: str) -> str:
        """Return no output: nothing is executed."""
        return ""

    def interrupt(self, instance: str, *, stop: bool = False) -> None:
        """End an instance as the provider does with spot machines; `stop`: it is stopped, and not deleted."""
        if stop:
            self.instances[instance].stopped_at = self.clock()
        else:
            self.instances[instance].ended_at = self.clock()

    def running(self) -> dict[str, MemoryInstance]:
        """Return the instances that cost money now, by id."""
        now = self.clock()
        return {one.id: one for one in self.instances.values() if one.state(now) != "terminated"}

    def _throttle(self) -> None:
        self.check()
        if self.busy:
            self.busy -= 1
            raise Throttled("too many calls")

    def _instance(self, one: MemoryInstance) -> Instance:
        return Instance(one.id, one.machine, one.deployment, one.state(self.clock()), one.launched_at)
