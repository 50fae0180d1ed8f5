"""Define the tables of a snapshot file: those of a policy document, with the engine's state added.

A field is read from the key of its name or alias; the types of `policy.quantities` check and scale it. `record` is the
engine's dataclass that a table is converted to.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field

from ..engine.snapshot import (
    Kind,
    Node,
    Placed,
    Pool,
    Profile,
    Settings,
    Snapshot,
    State,
    Strategy,
    TeamQuota,
    Terminating,
    Workload,
)
from ..policy.models import PoolTable, ProfileTable, SettingsTable, TeamQuotaTable
from ..policy.quantities import (
    Cores,
    Count,
    Duration,
    Flag,
    Gpus,
    GpusEach,
    Mib,
    Name,
    Priority,
    Tier,
    Time,
    Version,
    Workers,
    count,
)
from ..policy.source import Plain
from ..policy.tables import Many, Table

T = TypeVar("T")


class FileSettings(SettingsTable):
    """The table `settings`."""

    record = Settings


class FilePool(PoolTable):
    """An entry of `pools`. The default `strategy` is always `pack`, as in files of earlier releases.

    `booting`: nodes that are being added; `sessions`: whether they will take notebooks.
    """

    record = Pool

    booting: Count = 0
    sessions: Flag = True

    @property
    def default_strategy(self) -> Strategy:
        """Return the strategy of an entry without one."""
        return "pack"


class FileForeign(Table):
    """The resources of a node that pods hold which Makeway does not manage."""

    gpus: Gpus = 0
    cpu: Cores = 0
    memory: Mib = 0
    devices: Many[Count] = ()
    pods: Count = 0


class FileTerminating(Table):
    """The resources of a node that a terminating attempt still holds."""

    record = Terminating

    workload: Name
    devices: Many[Count] = ()
    milli_per_device: Gpus = Field(1000, alias="gpu_share")
    cpu: Cores = 0
    memory: Mib = 0
    deadline: Time = 0.0
    pods: Count = 0


class FileNode(Table):
    """An entry of `nodes`."""

    record = Node

    name: Name
    pool: Name
    gpus: Annotated[int, count("GPUs", 100_000)]
    cpu: Cores = 0
    memory: Mib = 0
    ready: Flag = True
    cordoned: Flag = False
    devices: Many[Count] = ()
    model: str = ""
    foreign: FileForeign = FileForeign()
    terminating: Many[FileTerminating] = ()
    down_since: Time | None = None
    pods: Count = 0
    host: str = ""
    first_device: Count = 0
    sessions: Flag = True
    ready_at: Time | None = None

    def as_value(self, record_type: type[T], **computed: Any) -> T:
        """Return the node, with the fields of the table `foreign` as `foreign_…`."""
        foreign = {f"foreign_{key}": getattr(self.foreign, key) for key in FileForeign.model_fields}
        return super().as_value(record_type, **foreign, **computed)

    @classmethod
    def of(cls, *values: object, **computed: Any) -> Self:
        """Return the table of a node, with the fields `foreign_…` as the table `foreign`."""
        foreign = {key: getattr(values[0], f"foreign_{key}") for key in FileForeign.model_fields}
        return super().of(*values, foreign=FileForeign.of(**foreign), **computed)


class FileProfile(ProfileTable):
    """An entry of `profiles`."""

    record = Profile

    gpus: GpusEach
    policies: Many[Tier] = ()
    models: Many[Name] = ()


class FileTeamQuota(TeamQuotaTable):
    """An entry of `policies`. `history` is the team's past over-quota use, decayed by its half-life."""

    record = TeamQuota

    history: Gpus = 0
    title: str = ""


class FilePlaced(Table):
    """The placement of one worker: its node and devices."""

    record = Placed

    node: Name
    worker: Count
    devices: Many[Count] = ()
    milli_per_device: Gpus = Field(1000, alias="gpu_share")


def _with_worker_numbers(value: Any) -> Any:
    """Return a placement; a worker without a number gets its index in the list."""
    if not isinstance(value, list):
        return value
    return [{"worker": Plain(index), **item} if isinstance(item, dict) else item for index, item in enumerate(value)]


Placement = Annotated[Many[FilePlaced], BeforeValidator(_with_worker_numbers)]


class FileWorkload(Table):
    """An entry of `workloads`."""

    record = Workload

    id: Name
    team: Name = Field(alias="policy")
    profile: Name
    owner: str = ""
    kind: Kind = "job"
    priority: Priority = 0
    preemptible: Flag | None = None
    submitted_at: Time = 0.0
    state: State = "pending"
    started_at: Time | None = None
    placement: Placement = ()
    attempt: Count = 1
    last_checkpoint_at: Time | None = None
    evicted_for: Name | None = None
    deadline: Time | None = None
    nomination: Placement = ()
    paused: Flag = False
    failed_node: Name | None = None
    gpus: GpusEach | None = None
    workers: Workers | None = None
    min_workers: Workers | None = None
    cpu: Cores | None = None
    memory: Mib | None = None
    time_limit: Duration | None = None
    expected: Duration | None = None
    earlier_runtime: Duration = Field(0.0, alias="ran")
    avoid: Many[Name] = ()


class SnapshotTable(Table):
    """A whole snapshot file."""

    record = Snapshot

    version: Version
    now: Time
    settings: FileSettings = FileSettings()
    pools: Many[FilePool] = ()
    nodes: Many[FileNode] = ()
    profiles: Many[FileProfile] = ()
    policies: Many[FileTeamQuota] = ()
    workloads: Many[FileWorkload] = ()
    paused: Many[Name] = ()
