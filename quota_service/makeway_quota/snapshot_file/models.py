"""The tables of a snapshot file: those of a policy document, and what only the engine sees."""

from __future__ import annotations

from typing import Annotated

from ..engine.state import Kind, State
from ..policy.models import PolicyTable, PoolTable, ProfileTable, SettingsTable
from ..policy.quantities import (
    Choice,
    Cores,
    Count,
    Flag,
    Gpus,
    GpusEach,
    Mib,
    Name,
    Priority,
    Rank,
    Text,
    Time,
    Version,
    Workers,
    duration,
)
from ..policy.tables import Many, Table

Duration = Annotated[float, duration()]


class FilePool(PoolTable):
    """An entry of `pools`."""

    booting: Count = 0


class FileForeign(Table):
    """What pods outside Makeway hold on a node."""

    gpus: Gpus = 0
    cpu: Cores = 0
    memory: Mib = 0
    devices: Many[Count] = ()


class FileNode(Table):
    """An entry of `nodes`."""

    name: Name
    pool: Name
    gpus: Count
    cpu: Cores = 0
    memory: Mib = 0
    ready: Flag = True
    cordoned: Flag = False
    devices: Many[Count] = ()
    model: Text = ""
    foreign: FileForeign = FileForeign()


class FileProfile(ProfileTable):
    """An entry of `profiles`."""

    gpus: GpusEach
    policies: Many[Rank] = ()
    models: Many[Name] = ()


class FilePolicy(PolicyTable):
    """An entry of `policies`. `history` is what it borrowed of late."""

    history: Gpus = 0
    title: Text = ""


class FilePlaced(Table):
    """A worker on a node; `worker` is by default its place in the list."""

    node: Name
    worker: Count | None = None
    devices: Many[Count] = ()
    gpu_share: Gpus = 1000


class FileWorkload(Table):
    """An entry of `workloads`."""

    id: Name
    policy: Name
    profile: Name
    owner: Text = ""
    kind: Choice[Kind] = "job"
    priority: Priority = 0
    preemptible: Flag | None = None
    submitted_at: Time = 0.0
    state: Choice[State] = "pending"
    started_at: Time | None = None
    placement: Many[FilePlaced] = ()
    attempt: Count = 1
    last_checkpoint_at: Time | None = None
    evicted_for: Name | None = None
    deadline: Time | None = None
    nomination: Many[FilePlaced] = ()
    paused: Flag = False
    failed_node: Name | None = None
    gpus: GpusEach | None = None
    workers: Workers | None = None
    min_workers: Workers | None = None
    cpu: Cores | None = None
    memory: Mib | None = None
    time_limit: Duration | None = None
    expected: Duration | None = None
    ran: Duration = 0.0


class FileTable(Table):
    """The file."""

    version: Version
    now: Time
    settings: SettingsTable = SettingsTable()
    pools: Many[FilePool] = ()
    nodes: Many[FileNode] = ()
    profiles: Many[FileProfile] = ()
    policies: Many[FilePolicy] = ()
    workloads: Many[FileWorkload] = ()
    paused: Many[Name] = ()
