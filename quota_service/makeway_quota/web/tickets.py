"""Sign values that others carry for a while: picker tickets, login state, cookies, anti-forgery tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Any


class Signer:
    """Signs small JSON values with HMAC-SHA256; each `purpose` has a key of its own.

    A note is `base64(json).base64(mac)`: readable, and invalid once it is changed. `read` returns None for
    a note of another secret or purpose, and for one that is too old.
    """

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        if len(secret) < 16:
            raise ValueError("the signing secret must have at least 16 bytes")
        self._secret = secret
        self._clock = clock

    def sign(self, purpose: str, value: Any, seconds: float) -> str:
        """Return a note that is valid for `seconds`."""
        body = json.dumps([value, self._clock() + seconds], separators=(",", ":")).encode()
        return f"{_encode(body)}.{_encode(self._mac(purpose, body))}"

    def read(self, purpose: str, note: str) -> Any | None:
        """Return the value that was signed, or None."""
        try:
            head, _, tail = note.partition(".")
            body, mac = _decode(head), _decode(tail)
            if not hmac.compare_digest(mac, self._mac(purpose, body)):
                return None
            value, expires = json.loads(body)
        except (ValueError, TypeError):
            return None
        return value if self._clock() < expires else None

    def digest(self, purpose: str, text: str) -> str:
        """Return the token of `text` under the secret; it does not expire."""
        return _encode(self._mac(purpose, text.encode("utf-8", "replace")))

    def _mac(self, purpose: str, body: bytes) -> bytes:
        key = hmac.digest(self._secret, purpose.encode(), hashlib.sha256)
        return hmac.digest(key, body, hashlib.sha256)


def same(expected: str, sent: str) -> bool:
    """Whether two tokens are equal; the time taken does not depend on where they differ."""
    return hmac.compare_digest(expected.encode("utf-8", "replace"), sent.encode("utf-8", "replace"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    raw = text.encode("ascii")
    return base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
