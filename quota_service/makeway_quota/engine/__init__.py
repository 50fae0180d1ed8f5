"""The policy engine: a snapshot of the world goes in, a plan comes out."""

from .offer import Enquiry
from .plan import (
    Evict,
    LineUsage,
    Move,
    Offer,
    Plan,
    Refusal,
    Scale,
    Start,
    TeamUsage,
    Victim,
    Waiting,
)
from .schedule import schedule
from .standing import Standing
from .state import (
    GPU,
    Node,
    Placed,
    Policy,
    Pool,
    Profile,
    QuotaLine,
    Settings,
    Snapshot,
    Workload,
)
from .usage import usage_by_team

__all__ = [
    "GPU",
    "Enquiry",
    "Evict",
    "LineUsage",
    "Move",
    "Node",
    "Offer",
    "Placed",
    "Plan",
    "Policy",
    "Pool",
    "Profile",
    "QuotaLine",
    "Refusal",
    "Scale",
    "Settings",
    "Snapshot",
    "Standing",
    "Start",
    "TeamUsage",
    "Victim",
    "Waiting",
    "Workload",
    "schedule",
    "usage_by_team",
]
