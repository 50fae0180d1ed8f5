"""Define a machine of an autoscaled pool: its record, its states, and what can be observed of it.

Times are Unix seconds, prices millionths of the deployment's currency for an hour. Whether a machine is idle or busy is
derived from what runs there, and is no state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal, get_args

MachineState = Literal["requested", "booting", "joining", "ready", "draining", "lost", "terminating", "gone", "failed"]
Market = Literal["on_demand", "spot"]
DrainReason = Literal["idle", "move", "age", "removed", "budget", "pause", "spot"]

STATES: tuple[MachineState, ...] = get_args(MachineState)
FINISHED: frozenset[MachineState] = frozenset({"gone", "failed"})
"""The states in which a machine costs nothing any more"""
STARTING: frozenset[MachineState] = frozenset({"requested", "booting", "joining"})
"""The states in which a machine is on its way to be ready"""
NO_NODE = "no_node"
"""The cause of the end of a machine for which the cluster's autoscaler adds no node"""
NODE_BOOT_PREFIX = "node/"
"""How the boot of a machine begins that is a node of the cluster"""
CANCELLABLE: frozenset[DrainReason] = frozenset({"idle", "move"})
"""The drains that end when the machine is needed again"""


def boot_of(node: str) -> str:
    """Return the boot of a machine that is a node of the cluster: it has one in its life."""
    return f"{NODE_BOOT_PREFIX}{node}"


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as its row has it. The id is its tag at the provider and the token of its launch, too.

    `request` is what the provider is asked for, with each call the same bytes. `price` None is unknown, not zero.
    `gpus` counts the devices that the type promises. `launch_calls` counts the launches that were committed,
    before each was called; `attempts` are those of the newest report, None before the first one.
    """

    id: str
    deployment: str
    pool: str
    type: str
    zone: str
    market: Market
    price: int | None
    gpus: int
    request: str
    requested_at: float
    state_since: float
    """when the state began"""
    state: MachineState = "requested"
    version: int = 0
    term: int = 0
    """the term of the leader that wrote the row"""
    launch_calls: int = 0
    launch_called_at: float | None = None
    end_called_at: float | None = None
    """when the provider was last asked to end it"""
    instance: str | None = None
    launched_at: float | None = None
    boot: str | None = None
    ready_at: float | None = None
    heard_at: float | None = None
    attempts: int | None = None
    needed_at: float = 0.0
    """when work last ran there, was to start there, or waited for it"""
    drain: DrainReason | None = None
    deadline: float | None = None
    """when a drain ends what still runs"""
    missed_lists: int = 0
    """complete lists in a row without it"""
    reason: str = ""
    """the code of the cause of its state"""

    @property
    def cluster_node(self) -> str:
        """Return the node of the cluster that it is, "" for one that an agent joins, or that has none yet."""
        boot = self.boot or ""
        return boot.removeprefix(NODE_BOOT_PREFIX) if boot.startswith(NODE_BOOT_PREFIX) else ""

    @property
    def finished(self) -> bool:
        """Whether it costs nothing any more."""
        return self.state in FINISHED

    @property
    def starting(self) -> bool:
        """Whether it is on its way to be ready."""
        return self.state in STARTING

    def shifted(self, seconds: float) -> Machine:
        """Return the machine with its times moved, after the clock was set forward by so many seconds."""
        names = (
            "requested_at",
            "state_since",
            "launch_called_at",
            "end_called_at",
            "launched_at",
            "ready_at",
            "heard_at",
            "needed_at",
        )
        times = {name: getattr(self, name) for name in (*names, "deadline")}
        return self.with_fields(**{name: at + seconds for name, at in times.items() if at is not None})

    def with_fields(self, **fields: Any) -> Machine:
        """Return the machine with other values of some fields, as `dataclasses.replace` does in ten times the time."""
        values = dict(zip(FIELDS, VALUES(self), strict=True))
        values.update(fields)
        made: Machine = object.__new__(Machine)
        for assign, value in zip(SETTERS, values.values(), strict=True):  # raises ValueError for an unknown field
            assign(made, value)
        return made

    def overdue(self, now: float, timeouts: MachineTimeouts) -> bool:
        """Whether it is being ended for longer than an administrator has to be told."""
        return self.state == "terminating" and now - self.state_since > timeouts.alarm

    @property
    def accepts_work(self) -> bool:
        """Whether work may start there."""
        return self.state == "ready"


FIELDS = tuple(one.name for one in fields(Machine))
VALUES = attrgetter(*FIELDS)
SETTERS = tuple(getattr(Machine, name).__set__ for name in FIELDS)

MachineEventKind = Literal[
    "launch_called",
    "listed",
    "refused",
    "throttled",
    "joined",
    "initialised",
    "init_failed",
    "heard",
    "needed",
    "moving",
    "unneeded",
    "withdrawn",
    "drain",
    "spot_notice",
    "vacant",
    "stopped",
    "ended",
    "not_found",
    "absent",
    "fenced",
    "end_called",
    "tick",
]
MACHINE_EVENT_KINDS: tuple[MachineEventKind, ...] = get_args(MachineEventKind)


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """One thing that was observed of one machine, or decided about it.

    `at`, by the service's clock: when a list was started, a report was sent, a terminating call was started; of a
    `tick`, since when reports could have arrived. Which of the other fields count follows from the kind.
    """

    kind: MachineEventKind
    at: float = 0.0
    instance: str = ""
    boot: str = ""
    gpus: int = 0
    attempts: int = 0
    empty: bool = False
    """the list without it was empty"""
    deadline: float | None = None
    reason: str = ""
    drain: DrainReason = "idle"


@dataclass(frozen=True, slots=True)
class MachineTimeouts:
    """How long each wait for a machine may take, in seconds.

    `visibility`: for which a launched instance may be missing in lists, a call under way included; `unneeded`: for
    which a machine that boots may be without work that waits for it.
    """

    request_timeout: float = 120.0
    spin_up_timeout: float = 1200.0
    lost_after: float = 120.0
    visibility: float = 300.0
    unneeded: float = 60.0
    retry: float = 15.0
    """between two calls for one machine"""
    alarm: float = 600.0
    """for which a machine may be terminating before an administrator is told"""

    @property
    def start_timeout(self) -> float:
        """Seconds from its request for which a machine may start before it counts as late."""
        return self.request_timeout + self.spin_up_timeout

    @property
    def listed_after(self) -> float:
        """Seconds after which an instance is on every list: the call that launched it has ended."""
        return self.request_timeout + self.visibility
