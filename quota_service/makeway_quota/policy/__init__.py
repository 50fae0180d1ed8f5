"""The policy document: pools, profiles, teams, and how many GPUs each team is guaranteed."""

from .advice import CAUGHT_BY_FRAMEWORKS, warnings
from .diff import diff
from .document import Document, PoolFacts, ProfileFacts, TeamFacts, workers_limit
from .issues import Issue, PolicyInvalid, closest
from .members import hub_name
from .read import Sizes, read
from .rescale import overcommitments, rescale, rescale_text
from .write import write

__all__ = [
    "CAUGHT_BY_FRAMEWORKS",
    "Document",
    "Issue",
    "PolicyInvalid",
    "PoolFacts",
    "ProfileFacts",
    "Sizes",
    "TeamFacts",
    "closest",
    "diff",
    "hub_name",
    "overcommitments",
    "read",
    "rescale",
    "rescale_text",
    "warnings",
    "workers_limit",
    "write",
]
