"""Sign the tokens of machines: one to join, which follows from the machine's id, and those that its agent gets then.

A join token is no secret of a row: user data has the same bytes with each call. It opens the join of its own machine
only, which the services allow to one boot and until the machine is ready. The token of a machine names its boot,
expires, and is renewed by reports while the machine lives.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import NamedTuple

import itsdangerous

from ..workers.tokens import RENEWAL_SECONDS, TOKEN_SECONDS, Validity

JOIN_PURPOSE = b"makeway: tokens by which machines join"
MACHINE_PURPOSE = b"makeway: tokens of machines"
"""Make keys of their own from the secret, so that no token is worth anything elsewhere"""


class CheckedToken(NamedTuple):
    """What a machine's token is worth, and the boot that it was given to."""

    validity: Validity
    boot: str = ""


VOID = CheckedToken("void")


class MachineTokens:
    """Signs and reads the tokens of machines; all replicas have the same secret."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        if len(secret) < 16:
            raise ValueError("the signing secret must have at least 16 bytes")
        signing = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
        key = hmac.digest(secret, MACHINE_PURPOSE, "sha256")
        self._serializer = itsdangerous.URLSafeSerializer(key, salt="machine", signer_kwargs=signing)
        self._join_key = hmac.digest(secret, JOIN_PURPOSE, "sha256")
        self._clock = clock

    def join_token(self, machine: str) -> str:
        """Return the token by which a machine joins, always the same."""
        code = hmac.digest(self._join_key, machine.encode(), "sha256")
        return f"{machine}.{base64.urlsafe_b64encode(code).rstrip(b'=').decode()}"

    def joining(self, token: str) -> str:
        """Return the machine that a join token is of; "" where it is none."""
        machine = token.rpartition(".")[0]
        try:
            valid = hmac.compare_digest(token.encode(), self.join_token(machine).encode())
        except UnicodeError:
            return ""
        return machine if valid else ""

    def token(self, machine: str, boot: str) -> str:
        """Return a new token of a machine for its agent."""
        return str(self._serializer.dumps([machine, boot, round(self._clock())]))

    def check(self, token: str, machine: str) -> CheckedToken:
        """Return what a token is worth for a machine: `old` is valid and to be replaced, `expired` can be renewed."""
        try:
            named, boot, at = self._serializer.loads(token)
            age = self._clock() - float(at)
        except (itsdangerous.BadData, ValueError, TypeError):  # ValueError: text that is not Unicode, or other fields
            return VOID
        if named != machine or not isinstance(boot, str) or age > RENEWAL_SECONDS:
            return VOID
        if age > TOKEN_SECONDS:
            return CheckedToken("expired", boot)
        return CheckedToken("old" if age > TOKEN_SECONDS / 2 else "valid", boot)
