"""The policy document: which pools, profiles and teams there are, and how many GPUs each team is guaranteed."""

from .diff import diff
from .document import Document, PolicyFacts, PoolFacts, ProfileFacts
from .fit import fit, fit_text, sold_out
from .issues import Issue, PolicyInvalid
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
    "diff",
    "fit",
    "fit_text",
    "read",
    "sold_out",
    "write",
]
