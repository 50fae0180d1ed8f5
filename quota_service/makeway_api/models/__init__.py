"""Define the wire format: every noun of the API as a pydantic model.

GPU quantities are numbers of whole devices (0.5 is half of one), times are ISO 8601 in UTC, durations are
seconds, memory is MiB. Additive changes only: a notebook of last year must still understand the answers.
"""

from .audit import Decision, Event
from .base import (
    ENDED,
    HOLDS_GPUS,
    Health,
    Kind,
    Me,
    Priority,
    Problem,
    Reason,
    RequestBody,
    Slug,
    State,
    UserName,
    Wire,
)
from .inventory import Device, Holder, Image, Node, Policy, Pool, Profile, QuotaLine
from .people import GiveRequest, PersonRequest, PersonWork
from .policies import PolicyCheck, PolicyIssue, PolicyRequest, PolicyVersion, Preview, WorkloadEffect
from .retention import Kept, RetentionReport
from .storage import StorageAccount, StorageDelete, StorageDeleted, StorageReport
from .usage import Lending, Offer, OfferTable, TeamUsage, Usage, Victim
from .workloads import (
    Attempt,
    Checkpoint,
    DryRun,
    FileIn,
    Grant,
    Job,
    JobPage,
    JobRequest,
    LogChunk,
    Notice,
    Session,
    SessionRequest,
)

__all__ = [
    "ENDED",
    "HOLDS_GPUS",
    "Attempt",
    "Checkpoint",
    "Decision",
    "Device",
    "DryRun",
    "Event",
    "FileIn",
    "GiveRequest",
    "Grant",
    "Health",
    "Holder",
    "Image",
    "Job",
    "JobPage",
    "JobRequest",
    "Kept",
    "Kind",
    "Lending",
    "LogChunk",
    "Me",
    "Node",
    "Notice",
    "Offer",
    "OfferTable",
    "PersonRequest",
    "PersonWork",
    "Policy",
    "PolicyCheck",
    "PolicyIssue",
    "PolicyRequest",
    "PolicyVersion",
    "Pool",
    "Preview",
    "Priority",
    "Problem",
    "Profile",
    "QuotaLine",
    "Reason",
    "RequestBody",
    "RetentionReport",
    "Session",
    "SessionRequest",
    "Slug",
    "State",
    "StorageAccount",
    "StorageDelete",
    "StorageDeleted",
    "StorageReport",
    "TeamUsage",
    "Usage",
    "UserName",
    "Victim",
    "Wire",
    "WorkloadEffect",
]
