"""The policy document: pools, profiles, teams, and how many GPUs each team is guaranteed."""

from .advice import CAUGHT_BY_FRAMEWORKS, policy_warnings
from .diff import policy_diff
from .document import Document, PoolFacts, ProfileFacts, TeamFacts, workers_limit
from .issues import Issue, PolicyInvalid, closest
from .members import hub_name
from .read import Sizes, read_policy
from .rescale import overcommitments, rescale, rescale_text
from .write import write_policy

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
    "hub_name",
    "overcommitments",
    "policy_diff",
    "policy_warnings",
    "read_policy",
    "rescale",
    "rescale_text",
    "workers_limit",
    "write_policy",
]
