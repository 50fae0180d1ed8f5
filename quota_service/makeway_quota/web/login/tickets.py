"""Sign values that others carry for a while: picker tickets, login state, cookies, anti-forgery tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import itsdangerous

_SIGNING = {"key_derivation": "hmac", "digest_method": hashlib.sha256}


class Signer:
    """Signs small JSON values with HMAC-SHA256 (itsdangerous); each `purpose` has a key of its own.

    A signed value can be read by everyone, and is void once it is changed. `read` returns None for one of another
    secret or purpose, and for one that has expired. It carries its expiry, which its readers do not know otherwise.
    """

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        if len(secret) < 16:
            raise ValueError("the signing secret must have at least 16 bytes")
        self._serializer = partial(itsdangerous.URLSafeSerializer, secret, signer_kwargs=_SIGNING)
        self._signer = partial(itsdangerous.Signer, secret, key_derivation="hmac", digest_method=hashlib.sha256)
        self._clock = clock

    def sign(self, purpose: str, value: Any, seconds: float) -> str:
        """Return the signed value, which is valid for `seconds`."""
        return str(self._serializer(salt=f"note {purpose}").dumps([value, self._clock() + seconds]))

    def read(self, purpose: str, signed: str) -> Any | None:
        """Return the value that was signed, or None."""
        try:
            value, expires = self._serializer(salt=f"note {purpose}").loads(signed)
        except (itsdangerous.BadData, ValueError):  # ValueError: text that is not Unicode
            return None
        return value if self._clock() < expires else None

    def digest(self, purpose: str, text: str) -> str:
        """Return the token of `text` under the secret; it does not expire."""
        signer = self._signer(salt=f"digest {purpose}")
        return signer.get_signature(text.encode("utf-8", "replace")).decode()


def masked(token: str) -> str:
    """Return a token for one response, with a random mask: its bytes are others in each response.

    What a page repeats from its address, beside a secret that is always the same, would tell that secret to who can
    measure the size of the compressed pages (BREACH).
    """
    plain = token.encode("utf-8", "replace")
    mask = secrets.token_bytes(len(plain))
    hidden = bytes(a ^ b for a, b in zip(plain, mask, strict=True))
    return f"{_text(mask)}.{_text(hidden)}"


def unmasked(sent: str) -> str:
    """Return the token that was masked; what is not masked comes back as it is."""
    mask, dot, hidden = sent.partition(".")
    if not dot:
        return sent
    try:
        halves = [base64.urlsafe_b64decode(half.encode() + b"==") for half in (mask, hidden)]
        return bytes(a ^ b for a, b in zip(*halves, strict=True)).decode()
    except ValueError:
        return ""


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def same(expected: str, sent: str) -> bool:
    """Whether two tokens are equal; the time taken does not depend on where they differ."""
    return hmac.compare_digest(expected.encode("utf-8", "replace"), sent.encode("utf-8", "replace"))
