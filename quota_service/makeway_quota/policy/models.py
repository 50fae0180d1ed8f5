"""The tables of a policy document, in the units of the engine; a snapshot file extends some of them.

Defaults are those of the engine's dataclasses. What relates one value to another is checked in `check.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, PlainSerializer, StringConstraints, WrapValidator

from ..engine.snapshot import Kind, Pool, QuotaLine, Strategy, Weight
from .document import Image, Volume
from .issues import quote
from .pod_template import folder_problem, path_problem, plain_values, template_problems
from .quantities import (
    Cores,
    Device,
    Flag,
    Gpus,
    GpusEach,
    Label,
    Mib,
    Name,
    Seconds,
    Tier,
    Title,
    Version,
    Workers,
    count,
    duration,
)
from .tables import Many, Table, Texts, problem

T = TypeVar("T")
KINDS: tuple[Kind, ...] = get_args(Kind)
VOLUME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OURS = re.compile(r"MAKEWAY_.*|JUPYTERHUB_.*|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES")


def _local(value: Any, devices: Any) -> Any:
    return "all" if value == "all" else tuple(sorted(set(devices(value))))


def _kinds(named: tuple[str, ...]) -> tuple[Kind, ...]:
    for kind in named:
        if kind not in KINDS:
            raise problem(f"{quote(kind)} is not a kind of workload, expected session, job or both")
    if not named:
        raise problem("the profile is for nothing; name session, job or both")
    return tuple(kind for kind in KINDS if kind in named)


def _env(env: dict[str, str]) -> dict[str, str]:
    for variable in env:
        if not VARIABLE.fullmatch(variable):
            raise problem(f"{quote(variable)} is not the name of a variable: letters, digits and _, no digit first")
        if OURS.fullmatch(variable):
            raise problem(f"{variable} is set by Makeway itself; remove it")
    return env


def _volume_name(name: str) -> str:
    if not VOLUME.fullmatch(name):
        raise problem(f"{quote(name)} is not the name of a volume: small letters, digits and dashes, 40 at most")
    return name


def _claim(name: str) -> str:
    if not CLAIM.fullmatch(name):
        raise problem(f"{quote(name)} is not the name of a PersistentVolumeClaim: small letters, digits, dashes, dots")
    return name


def _mount_path(path: str) -> str:
    if wrong := path_problem(path):
        raise problem(f"{quote(path)}: {wrong}; choose another path")
    return path.rstrip("/")


def _sub_path(folder: str) -> str:
    if wrong := folder_problem(folder):
        raise problem(f"{quote(folder)}: {wrong}")
    return folder.rstrip("/")


def _pod(template: dict[str, Any]) -> dict[str, Any]:
    """Return a pod template with numbers and booleans where they are written as such; texts stay texts."""
    result = plain_values(template)
    wrong = list(template_problems(result))
    if wrong:
        raise problem("; ".join(wrong[:20]))
    return result


class SettingsTable(Table):
    """Settings for all pools."""

    victim_order: Literal["newest", "cheapest"] = "newest"
    consolidation: Flag = True
    in_team_preemption: Flag = True
    yields_after: Seconds = 0.0
    user_fairness: Flag = True
    fair_share: Literal["order", "reclaim"] = "order"
    history_half_life: Seconds = 0.0
    starvation_after: Seconds = 86_400.0
    grace: Seconds = 30.0
    stuck_after: Seconds = 60.0


class PoolTable(Table):
    """A pool as the engine knows it; without a `strategy`, one that grows fills its machines, so that others empty."""

    name: Name
    resource: Title = "nvidia.com/gpu"
    capacity: Gpus | None = None
    kind: Literal["static", "autoscaled"] = "static"
    strategy: Strategy | None = None
    profiles: Many[Name] = ()
    consolidation: Flag = True
    max_nodes: Annotated[int, count("nodes", 100_000)] = 0
    node_gpus: Annotated[int, count("GPUs", 1024)] = 0
    node_cpu: Cores = 0
    node_memory: Mib = 0

    @property
    def default_strategy(self) -> Strategy:
        """Return the strategy of an entry without one."""
        return "fill" if self.kind == "autoscaled" else "pack"

    def as_value(self, record_type: type[T], **computed: Any) -> T:
        """Return a dataclass with the values that both have, and the `computed` ones."""
        chosen = {"strategy": self.strategy or self.default_strategy} if record_type is Pool else {}
        return super().as_value(record_type, **chosen | computed)

    @classmethod
    def of(cls, *values: object, **computed: Any) -> Self:
        """Return the table of some dataclasses; a strategy that is the usual one is left out."""
        table = super().of(*values, **computed)
        usual = table.strategy == table.default_strategy
        return table.model_copy(update={"strategy": None}) if usual else table


class ProfileTable(Table):
    """A profile as the engine knows it."""

    name: Name
    workers: Workers = 1
    min_workers: Workers | None = None
    cpu: Cores = 0
    memory: Mib = 0
    pools: Many[Name] = ()
    min_runtime: Seconds = 0.0
    reclaim_after: Seconds = 0.0
    grace: Annotated[float, duration(86_400)] | None = None
    time_limit: Seconds | None = None


class QuotaTable(Table):
    """One line of a quota."""

    record = QuotaLine

    pools: Many[Name] = ()
    reserved: Gpus = 0
    limit: Gpus | None = None
    lend: Gpus | None = None


class TeamQuotaTable(Table):
    """A policy as the engine knows it."""

    name: Name
    weight: Weight = "Medium"
    priority: Annotated[int, count("", 1000, -1000)] = 0
    parent: Name | None = None
    quotas: Many[QuotaTable] = ()


class DocumentSettings(SettingsTable):
    """`settings` of a policy document."""

    sessions_per_user: Annotated[int, count("sessions", 1000, 1)] = 2
    work: Literal["private", "team"] = "private"


class LocalNodes(Table):
    """The GPUs of this machine that belong to a pool: their indices in order, or `all`, which is the default."""

    gpus: Annotated[Many[Device] | None, WrapValidator(_local), PlainSerializer(lambda devices: devices)] = None


class PoolNodes(Table):
    """The nodes of a pool."""

    local: LocalNodes | None = None
    labels: Texts = Field(default_factory=dict)


class DocumentPool(PoolTable):
    """An entry of `pools`."""

    title: Title = ""
    size: Gpus | None = None
    nodes: PoolNodes = PoolNodes()


class ImageTable(Table):
    """An entry of a profile's `images`."""

    record = Image

    name: Name
    image: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]
    title: Title = ""
    description: Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)] = ""
    default: Flag = False


class DocumentProfile(ProfileTable):
    """An entry of `profiles`."""

    gpus: GpusEach | None = None
    policies: Many[Tier] | None = None
    title: Title = ""
    description: Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)] = ""
    kinds: Annotated[Many[Label], AfterValidator(_kinds)] = KINDS
    image: Annotated[str, StringConstraints(strip_whitespace=True, max_length=1000)] = ""
    images: Many[ImageTable] = ()
    env: Annotated[Texts, AfterValidator(_env)] = Field(default_factory=dict)
    signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    pod: Annotated[dict[str, Any], AfterValidator(_pod)] = Field(default_factory=dict)
    max_workers: Workers | None = None
    disk: Mib = 0


class VolumeTable(Table):
    """An entry of a policy's `volumes`."""

    record = Volume

    name: Annotated[str, AfterValidator(_volume_name)]
    claim: Annotated[str, AfterValidator(_claim)]
    path: Annotated[str, AfterValidator(_mount_path)]
    sub_path: Annotated[str, AfterValidator(_sub_path)] = ""
    read_only: Flag = False


class DocumentTeamQuota(TeamQuotaTable):
    """An entry of `policies`."""

    title: Title = ""
    groups: Many[Label] = ()
    users: Many[Label] = ()
    work: Literal["private", "team"] | None = None
    volumes: Many[VolumeTable] = ()


class DocumentTable(Table):
    """The document. Its entries are validated one by one, so that a mistake in one hides none in others."""

    version: Version = 1
    settings: Any = Field(default_factory=dict)
    pools: Many[Any] = ()
    profiles: Many[Any] = ()
    policies: Many[Any] = ()
