"""Refuse a spawn with a message for the user.

JupyterHub 6 has SpawnException for this; before, an HTTPError does the same but for the Hub's failure count.
Both keep their status, so that a refusal is a page or an answer of 4xx and never "500: unhandled error".
"""

from __future__ import annotations

import re

import jupyterhub.spawner
from makeway_api.errors import MakewayError
from tornado.web import HTTPError

_Base = getattr(jupyterhub.spawner, "SpawnException", HTTPError)


class Refused(_Base):  # type: ignore[misc, valid-type]
    """A spawn that is refused: `jupyterhub_message` is what every page and the progress stream show."""

    def __init__(self, message: str, *, code: str = "refused", status: int = 409) -> None:
        reason = re.sub(r"[^a-z0-9 ]+", " ", code.lower()).strip()[:60] or "refused"
        if _Base is HTTPError:
            super().__init__(status, message, reason=reason)
        else:
            super().__init__(message, reason=reason, status_code=status)
        self.code = code
        self.jupyterhub_message = message

    def __str__(self) -> str:
        """Return the message without the class's name: some pages of the Hub show this text."""
        return self.jupyterhub_message


def refusal_of(error: MakewayError) -> Refused:
    """Return the service's error as a refusal of the spawn; 5xx becomes 503, which clients may retry."""
    status = error.status if 400 <= error.status < 500 else 503
    return Refused(error.message, code=error.code, status=status)
