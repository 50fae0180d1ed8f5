"""Confirm a change that concerns all people: with a token of the page that has shown what the change does.

Called by the policy page. A confirmation is for one login, one text and the version that the text was edited from, so
it is void as soon as a version is applied. Programs with a token of the Hub need none.
"""

from __future__ import annotations

import hashlib

from .auth import Visitor
from .tickets import Signer, same, unmasked

SECONDS = 600
"""How long what a page has shown may be confirmed."""


def confirmation(signer: Signer, visitor: Visitor, text: str, base: int) -> str:
    """Return the token with which this visitor confirms this text, edited from version `base`."""
    return signer.sign("confirmation", _subject(visitor, text, base), SECONDS)


def confirms(signer: Signer, visitor: Visitor, sent: str, text: str, base: int) -> bool:
    """Whether `sent` is the token of this visitor for this text and version, not older than `SECONDS`."""
    subject = signer.read("confirmation", sent)
    return isinstance(subject, str) and same(_subject(visitor, text, base), subject)


def _subject(visitor: Visitor, text: str, base: int) -> str:
    login = unmasked(visitor.xsrf)
    return hashlib.sha256("\0".join((visitor.caller.name, login, str(base), text)).encode()).hexdigest()
