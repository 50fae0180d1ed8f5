"""The policy document: pools, profiles, teams, and how many GPUs each team is guaranteed."""

from .diff import diff
from .document import Document, PolicyFacts, PoolFacts, ProfileFacts
from .fit import fit, fit_text, sold_out
from .issues import Issue, PolicyInvalid, closest
from .read import Sizes, read
from .write import write

__all__ = [
    "Document",
    "Issue",
    "PolicyFacts",
    "PolicyInvalid",
    "PoolFacts",
    "ProfileFacts",
    "Sizes",
    "closest",
    "diff",
    "fit",
    "fit_text",
    "read",
    "sold_out",
    "write",
]
