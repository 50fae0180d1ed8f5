"""The policy engine: a snapshot of the world goes in, a plan comes out."""

from .incremental import IncrementalEngine
from .plan import (
    Evict,
    LineUsage,
    Move,
    Offer,
    OfferVictim,
    Plan,
    Refusal,
    Scale,
    Start,
    TeamUsage,
    Waiting,
)
from .rules.usage import usage_by_team
from .schedule import schedule
from .snapshot import (
    GPU,
    Node,
    Placed,
    Pool,
    Profile,
    QuotaLine,
    Settings,
    Snapshot,
    TeamQuota,
    Terminating,
    Workload,
)
from .what_if import WhatIf

__all__ = [
    "GPU",
    "Evict",
    "IncrementalEngine",
    "LineUsage",
    "Move",
    "Node",
    "Offer",
    "OfferVictim",
    "Placed",
    "Plan",
    "Pool",
    "Profile",
    "QuotaLine",
    "Refusal",
    "Scale",
    "Settings",
    "Snapshot",
    "Start",
    "TeamQuota",
    "TeamUsage",
    "Terminating",
    "Waiting",
    "WhatIf",
    "Workload",
    "schedule",
    "usage_by_team",
]
