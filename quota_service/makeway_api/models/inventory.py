"""Define the cluster on the wire: pools, nodes, devices, profiles and policies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Kind, State, Wire


class Holder(Wire):
    """A workload's part of one device."""

    workload: str
    kind: Kind
    team: str
    owner: str
    name: str
    gpus: float
    over_quota: bool
    state: State


class Device(Wire):
    """One GPU of a node with its holders, by workload."""

    index: int
    free: float
    holders: list[Holder] = Field(default_factory=list)
    outside: bool = Field(
        False,
        description="in no pool any more, by the policy or its node: shown and counted until its work ends",
    )


class Node(Wire):
    """A node of a pool with its devices."""

    name: str
    pool: str
    model: str = ""
    virtual: bool = False
    ready: bool = True
    cordoned: bool = False
    """runs on, but takes no new work, so none of its devices is free"""
    observed: bool = Field(True, description="false: its backend cannot be observed, and it is as it was seen last")
    backend: str = Field("", description="where there are several: the one that it belongs to")
    foreign: float = 0
    devices: list[Device] = Field(default_factory=list)


class Pool(Wire):
    """A set of equivalent resources."""

    name: str
    title: str = ""
    kind: Literal["static", "autoscaled"] = "static"
    resource: str = "nvidia.com/gpu"
    strategy: Literal["pack", "spread"] = Field("pack", description="`pack` also for others: read `placement`")
    placement: str = Field("", description="the strategy: `pack`, `spread`, `fill`, or one of a later release")
    capacity: float | None = None
    virtual: bool = False
    total: float = 0
    used: float = 0
    free: float = 0
    profiles: list[str] = Field(default_factory=list)
    nodes: list[Node] = Field(default_factory=list)


class Image(Wire):
    """A container image that a profile offers, by a name; `image` is its reference."""

    name: str
    title: str
    description: str = ""
    image: str
    default: bool = False


class Profile(Wire):
    """The resources of one workload."""

    name: str
    title: str
    description: str = ""
    gpus: float
    workers: int = 1
    min_workers: int = 1
    cpu: float = 0
    memory: int = 0
    pools: list[str] = Field(default_factory=list)
    policies: list[list[str]] = Field(default_factory=list, description="ranked; an inner list shares a rank")
    kinds: list[Kind] = Field(default_factory=lambda: [Kind.SESSION, Kind.JOB])
    grace: int = Field(30, description="seconds between checkpoint notice and SIGKILL")
    time_limit: int | None = None
    image: str | None = Field(
        None,
        description="container image without a choice; null: the default image of jobs (`MAKEWAY_KUBE_IMAGE`), and "
        "that of notebooks (`c.KubeSpawner.image`)",
    )
    images: list[Image] = Field(default_factory=list, description="to choose from")


class QuotaLine(Wire):
    """One line of a policy; `pools` empty means all."""

    pools: list[str] = Field(default_factory=list)
    reserved: float = 0
    limit: float | None = None
    lend: float | None = None


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
