"""Sign the tokens of workers: each opens one worker of one attempt, for a while, and nothing else.

A token expires, and is void before that when its attempt has ended, which the services check. One that has expired may
still be exchanged for a new one while its attempt lives: a worker outlives a downtime of the service.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Literal

import itsdangerous

from ...store.reports.worker_reports import WorkerKey

TOKEN_SECONDS = 3600.0
"""Seconds for which a token is valid; it is replaced at half of them."""
RENEWAL_SECONDS = 86_400.0
"""Seconds for which it may be exchanged for a new one."""

PURPOSE = b"makeway: tokens of workers"
"""Makes a key of its own from the secret, which also signs other things"""

Validity = Literal["valid", "old", "expired", "void"]


class AttemptTokens:
    """Signs and reads tokens; all replicas have the same secret."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        if len(secret) < 16:
            raise ValueError("the signing secret must have at least 16 bytes")
        signing = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
        key = hmac.digest(secret, PURPOSE, "sha256")
        self._serializer = itsdangerous.URLSafeSerializer(key, salt="attempt", signer_kwargs=signing)
        self._clock = clock

    def token(self, key: WorkerKey) -> str:
        """Return a new token of a worker."""
        return str(self._serializer.dumps([*key, round(self._clock())]))

    def check(self, token: str, key: WorkerKey) -> Validity:
        """Return what a token is worth for a worker: `old` is valid and to be replaced, `expired` can be renewed."""
        try:
            workload, attempt, worker, at = self._serializer.loads(token)
        except (itsdangerous.BadData, ValueError, TypeError):  # ValueError: text that is not Unicode, or other fields
            return "void"
        age = self._clock() - float(at)
        if (workload, attempt, worker) != key or age > RENEWAL_SECONDS:
            return "void"
        if age > TOKEN_SECONDS:
            return "expired"
        return "old" if age > TOKEN_SECONDS / 2 else "valid"
