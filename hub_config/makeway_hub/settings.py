"""What the environment says about this portal, read once and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .state import PORT, State

SERVICE_PATH = "/services/makeway"
ON = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Plain values of the variables that docs/reference/settings.md lists."""

    state: State
    port: int
    mode: str
    keep: bool
    lease_seconds: float
    admin_groups: frozenset[str]
    allowed_groups: frozenset[str]

    @property
    def url(self) -> str:
        """Where people go."""
        return f"http://127.0.0.1:{self.port}"


def read(env: Mapping[str, str] = os.environ) -> Settings:
    """Read PORT, MAKEWAY_STATE_DIR, MAKEWAY_MODE, MAKEWAY_KEEP and so on; ValueError says what is accepted."""
    mode = env.get("MAKEWAY_MODE") or "demo"
    if mode not in ("demo", "system"):
        raise ValueError(f"MAKEWAY_MODE={mode!r} is not known: use demo (the default) or system.")
    text = env.get("PORT") or str(PORT)
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"PORT={text!r} is no port: use a number from 1 to 65535.")
    lease = env.get("MAKEWAY_LEASE_SECONDS") or "15"
    try:
        lease_seconds = float(lease)
    except ValueError:
        raise ValueError(f"MAKEWAY_LEASE_SECONDS={lease!r} is no number of seconds.") from None
    return Settings(
        state=State.of(env),
        port=int(text),
        mode=mode,
        keep=(env.get("MAKEWAY_KEEP") or env.get("KEEP") or "").lower() in ON,
        lease_seconds=max(3.0, lease_seconds),
        admin_groups=_names(env.get("MAKEWAY_ADMIN_GROUPS", "makeway-admins")),
        allowed_groups=_names(env.get("MAKEWAY_ALLOWED_GROUPS", "")),
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())
