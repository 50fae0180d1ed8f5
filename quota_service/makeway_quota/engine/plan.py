"""The plan of one admission cycle: starts, evictions, moves, scale-up, and the reasons of pending workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .snapshot import Placement

Code = Literal[
    "starting",
    "reclaiming",
    "outranked",
    "protected",
    "patience",
    "limit",
    "pool_capacity",
    "no_free_gpus",
    "stuck",
    "fragmented",
    "too_large",
    "never_over_quota",
    "waiting_for_node",
    "over_budget",
    "no_machine",
    "node_failed",
    "queue_closed",
    "paused",
    "held",
    "static_quota",
    "nominated",
    "not_in_quota",
]
Number = int | float | str | tuple[str, ...]
Numbers = Mapping[str, Number]
"""Names to plain values for the decision log; GPUs are whole devices here (0.5 = half of one)."""


_NONE: Numbers = {}


class Fact(NamedTuple):
    """One statement about a decision, without words: a code and its values; names are ids, GPUs are whole devices.

    `makeway_quota.wording.sentences` has the sentence of each code.
    """

    code: str
    values: Numbers = _NONE


Facts = tuple[Fact, ...]
"""The statements about a decision, in the order in which a sentence lists them."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a pending workload here. `in_quota` False: it runs over quota and may be evicted."""

    id: str
    pool: str
    placement: Placement
    in_quota: bool
    rule: str
    facts: Facts
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict a running workload for `preemptor` and requeue it; it has to terminate by `deadline`."""

    id: str
    preemptor: str
    deadline: float
    rule: str
    facts: Facts
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Move:
    """Checkpoint a running job and restart it at `to`, so that `preemptor` fits on its GPUs.

    By the rule `consolidate` it goes elsewhere; by the rule `shrink` it is an elastic gang that goes on with
    fewer workers, on a part of its own placement.
    """

    id: str
    preemptor: str
    source: Placement
    to: Placement
    deadline: float
    rule: str
    facts: Facts
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Scale:
    """Request `nodes` more nodes than an autoscaled pool has (booting ones included in the number)."""

    pool: str
    nodes: int
    workloads: tuple[str, ...]
    rule: str
    facts: Facts
    numbers: Numbers


class Demand(NamedTuple):
    """A pending workload that new machines of autoscaled pools could run: `pools`, in the order of its profile.

    It needs room for `workers` at once, each with `gpus` (milli-GPUs), `cpu` (milli-cores), `memory` (MiB) on one
    machine, whose GPUs are of one of `models` (none: of any). `awaits`: the nodes of a workload that waits for nodes
    which boot, one for each of its workers; `workers` are those of them that are to run on nodes which boot.
    """

    id: str
    pools: tuple[str, ...]
    workers: int
    gpus: int
    cpu: int
    memory: int
    models: tuple[str, ...] = ()
    session: bool = False
    awaits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A workload that stays pending, and why. `not_before`: no start before this time.

    `nomination` is where it will start once the workloads in `waits_for` are gone; the service returns it as
    `Workload.nomination` so that nothing else takes these GPUs. `awaits` is where it starts once nodes that boot are
    ready: each plan finds that anew, in the order of rights.
    """

    id: str
    code: Code
    rule: str
    facts: Facts
    numbers: Numbers
    not_before: float | None = None
    nomination: Placement = ()
    waits_for: tuple[str, ...] = ()
    awaits: Placement = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A session beyond the reservation: it is refused at once instead of queued."""

    id: str
    code: Code
    rule: str
    facts: Facts
    numbers: Numbers


class LineUsage(NamedTuple):
    """What one quota line counts after the plan's starts, in milli-GPUs."""

    team: str
    pools: tuple[str, ...]
    reserved: int
    limit: int | None
    usage: int
    guaranteed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every live workload is in exactly one of start, evict, move, pending, refused, keep and terminating.

    `keep` runs on untouched; `terminating` was evicted by an earlier plan. `demand` is what autoscaled pools could run,
    in the order of rights: all of it together stays within limits and reservations, in whichever of its pools each
    workload runs. It is the same with and without reasons.
    """

    start: tuple[Start, ...] = ()
    evict: tuple[Evict, ...] = ()
    move: tuple[Move, ...] = ()
    scale: tuple[Scale, ...] = ()
    pending: Sequence[Waiting] = ()
    refused: tuple[Refusal, ...] = ()
    keep: tuple[str, ...] = ()
    terminating: tuple[str, ...] = ()
    usage: tuple[LineUsage, ...] = field(default=())
    demand: tuple[Demand, ...] = ()

    @property
    def acts(self) -> bool:
        """Whether the plan changes anything that runs."""
        return bool(self.start or self.evict or self.move or self.refused)


@dataclass(frozen=True, slots=True)
class OfferVictim:
    """A workload that would be evicted or moved, as the picker shows it."""

    id: str
    owner: str
    team: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What one request would get now.

    `seconds` is the longest grace of the workloads in `victims` or `moved`, or until machines are ready, None where
    that is not known.
    `demand`, where machines of autoscaled pools could run the request: that of the work that is served before, then its
    own.
    """

    team: str
    profile: str
    code: Literal["ready_now", "ready_after_reclaim", "ready_after_launch", "wait", "refused"]
    reason: Code
    facts: Facts
    seconds: float | None = 0.0
    in_quota: bool = True
    victims: tuple[OfferVictim, ...] = ()
    moved: tuple[OfferVictim, ...] = ()
    numbers: Numbers = field(default_factory=dict)
    demand: tuple[Demand, ...] = ()


@dataclass(frozen=True, slots=True)
class TeamUsage:
    """One team's numbers in milli-GPUs, over the pools its lines cover.

    `guaranteed` sessions and `in_quota` jobs within the reservation, `borrowed` work beyond it (sessions too, once
    the reservation was lowered); the three together are what it uses. `lent` what others use of its reservation,
    `free` what it could start without any eviction, `total` the GPUs that exist.
    `borrowed_from`: (lender, milli-GPUs), where the lenders are known.
    """

    team: str
    reserved: int
    limit: int | None
    guaranteed: int
    in_quota: int
    borrowed: int
    lent: int
    free: int
    total: int
    borrowed_from: tuple[tuple[str, int], ...] = ()
