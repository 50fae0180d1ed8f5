"""Define the API's models of the cluster: pools, nodes, devices, profiles and policies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Kind, State, Wire


class Holder(Wire):
    """The part of one device that a workload holds; without its id, owner and name if the reader may not see it."""

    workload: str
    kind: Kind
    team: str
    owner: str
    name: str
    gpus: float
    over_quota: bool
    state: State


class Device(Wire):
    """One GPU of a node, with the workloads that hold parts of it."""

    index: int
    free: float
    holders: list[Holder] = Field(default_factory=list)
    outside: bool = Field(
        False,
        description="removed from its pool by the policy or its node, but still in use: counted until its work ends",
    )


class Node(Wire):
    """A node of a pool with its devices."""

    name: str
    pool: str
    model: str = ""
    virtual: bool = Field(False, description="simulated, without real GPUs")
    ready: bool = True
    cordoned: bool = Field(False, description="takes no new work, as after `kubectl cordon`: no device counts as free")
    observed: bool = Field(True, description="false: its backend cannot be reached, and this is its last known state")
    backend: str = Field("", description="its backend, where there are several")
    foreign: float = Field(0, description="GPUs held by pods that Makeway does not manage")
    devices: list[Device] = Field(default_factory=list)


class Pool(Wire):
    """A set of nodes whose GPUs are equivalent to workloads (much like a ResourceFlavor of Kueue)."""

    name: str
    title: str = ""
    kind: Literal["static", "autoscaled"] = "static"
    resource: str = "nvidia.com/gpu"
    strategy: Literal["pack", "spread"] = Field(
        "pack", description="for old clients, `pack` for any but `spread`: read `placement`"
    )
    placement: str = Field("", description="the strategy: `pack`, `spread`, `fill`, or one of a later release")
    capacity: float | None = None
    virtual: bool = False
    total: float = 0
    used: float = 0
    free: float = 0
    profiles: list[str] = Field(default_factory=list)
    nodes: list[Node] = Field(default_factory=list)


class Image(Wire):
    """A container image that a profile offers; `image` is its reference, as `registry/name:tag`."""

    name: str
    title: str
    description: str = ""
    image: str
    default: bool = False


class Profile(Wire):
    """What a workload may request: the resources of each worker, and where and for whom it runs."""

    name: str
    title: str
    description: str = ""
    gpus: float
    workers: int = 1
    min_workers: int = 1
    cpu: float = 0
    memory: int = 0
    pools: list[str] = Field(default_factory=list)
    policies: list[list[str]] = Field(
        default_factory=list, description="teams that may use it, best rank first; an inner list shares a rank"
    )
    kinds: list[Kind] = Field(default_factory=lambda: [Kind.SESSION, Kind.JOB])
    grace: int = Field(30, description="seconds between checkpoint notice and SIGKILL")
    time_limit: int | None = None
    image: str | None = Field(
        None,
        description="default container image; null: that of jobs (`MAKEWAY_KUBE_IMAGE`), and "
        "that of notebooks (`c.KubeSpawner.image`)",
    )
    images: list[Image] = Field(default_factory=list, description="to choose from")


class QuotaLine(Wire):
    """The quota of a policy for some pools together; `pools` empty means all."""

    pools: list[str] = Field(default_factory=list)
    reserved: float = Field(0, description="guaranteed GPUs (Kueue: nominalQuota)")
    limit: float | None = Field(None, description="the most that may be used at once; null: the size of the pools")
    lend: float | None = Field(
        None, description="how much of `reserved` others may borrow while it is idle (Kueue: lendingLimit); null: all"
    )


class Policy(Wire):
    """The quota of one team, user or activity."""

    name: str
    title: str = ""
    groups: list[str] = Field(default_factory=list)
    users: list[str] = Field(default_factory=list)
    weight: Literal["None", "Lowest", "Low", "Medium", "High"] = "Medium"
    priority: int = 0
    parent: str | None = None
    quotas: list[QuotaLine] = Field(default_factory=list)
